"""Time of one optimizer step: a roofline for each kind of work, the launches that bound small models, and what of the
communication is not hidden. Derivation and comparison with measurements: docs/planner.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.workflows.planner import fused
from octavo.workflows.planner.memory import liger_chunks, trained_parameters
from octavo.workflows.planner.model import Model, Width
from octavo.workflows.planner.setup import Setup
from octavo.workflows.planner.tables import Backend, Gpu, Machine, backend, factor, load, rate

TERA = 1e12
OVERLAP = (
    2.0  # of launches and GPU: between their maximum and their sum; of 2, 3, 4, 6 and 10 the best on measured steps
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step. parts: kind of work -> seconds of the step. low, high: bounds of the total.

    mfu: model FLOPs (no recomputation) over BF16 peak times GPUs times seconds, for every precision alike. bound: what
    the pass waits for: `GPU` or `launches`. measured: whether every rate was measured on this GPU.
    """

    seconds: float
    low: float
    high: float
    parts: Mapping[str, float]
    mfu: float
    bound: str
    measured: bool


@dataclass(frozen=True)
class Rates:
    """What the GPU does in practice: products and attention in FLOP/s; one large copy, and the element-wise kernels
    of a step, in bytes/s."""

    gemm: float
    attention: float
    copy: float
    eager: float
    measured: bool


def fp8_arithmetic(gpu: Gpu, scheme: str) -> str | None:
    """Why FP8 products of this scheme do not run on this GPU, or None where they do."""
    table = load("capability")["arithmetic"][scheme]
    if gpu.sm in table["sm"] and gpu.fp8:
        return None
    reason = table.get("refused", {}).get(gpu.sm)
    if reason:
        return str(reason)
    if not gpu.fp8:
        return f"{gpu.name} ({gpu.sm}) has no FP8 units: products run in 16 bit"
    return f"torch has no FP8 product with scales '{scheme}' on {gpu.sm}"


def rates(gpu: Gpu, fp8: bool) -> Rates:
    """Measured on this GPU where the table has it; else a measured product, else the peak, times a share of an H200."""
    name = "fp8_gemm" if fp8 else "bf16_gemm"
    share = "fp8_gemm" if fp8 else "gemm"
    found = rate(gpu, f"{name}_tflops")
    best, peak = (gpu.matmul_fp8, gpu.fp8 or 0.0) if fp8 else (gpu.matmul_bf16, gpu.bf16)
    if found is None:
        found = best * factor(f"{share}_of_matmul").value if best else peak * factor(f"{share}_of_peak").value
    attention = rate(gpu, "attention_tflops") or gpu.bf16 * factor("attention_of_peak").value
    copy = rate(gpu, "copy_tbs") or gpu.bandwidth * factor("copy_of_bandwidth").value
    known = all(rate(gpu, key) is not None for key in (f"{name}_tflops", "attention_tflops", "copy_tbs"))
    eager = copy * factor("eager_of_copy").value
    return Rates(found * TERA, attention * TERA, copy * TERA, eager * TERA, known)


def step_time(model: Model, setup: Setup, machine: Machine, nodes: int = 1) -> StepTime:
    """nodes: instances. The products of FP8 linears run as `setup.backend` runs them."""
    gpu, own = machine.gpu, backend(setup.backend)
    fp8 = setup.precision == "fp8" and own.products == "fp8"
    kind = rates(gpu, fp8)
    parts = _device(model, setup, gpu, kind, own)
    device, host = sum(parts.values()), _host(model, setup, own)
    # A step has stretches that wait for launches and others that wait for the GPU: more than the larger of both.
    compute = (device**OVERLAP + host**OVERLAP) ** (1 / OVERLAP)
    scale = compute / device
    exposed = _exposed(model, setup, machine, nodes, compute)
    trained = trained_parameters(model, setup)
    shards = setup.world if setup.sharding == "fsdp" else 1
    # AdamW reads four float32 values and writes three; the norm of the gradients and their clipping three more.
    once = 40.0 * trained / shards / kind.copy
    once += _all_reduce(model, setup, machine, nodes, trained)
    passes = setup.accumulation
    seconds = passes * (compute + exposed) + once
    named = {name: passes * value * scale for name, value in parts.items()}
    named["exposed communication"], named["optimizer"] = passes * exposed, once
    spread = 0.15 if kind.measured else 0.35
    if exposed > 0.1 * compute:
        spread += 0.25  # topology of PCIe and networks is the least known part
    flops = model_flops(model, setup) * setup.tokens * passes * setup.world
    mfu = flops / (gpu.bf16 * TERA * setup.world * seconds)
    bound = "launches" if host > device else "GPU"
    return StepTime(seconds, seconds * (1 - spread), seconds * (1 + spread), named, mfu, bound, kind.measured)


def model_flops(model: Model, setup: Setup) -> float:
    """FLOPs a token needs without recomputation: 2 per parameter and pass; a frozen weight has no gradient."""
    passes = 3 if setup.method == "full" else 2
    linear = sum(w.active * w.layers for w in model.widths)
    return 2.0 * passes * (linear + model.hidden * model.vocab) + 3.5 * attention_flops(model, setup)


def attention_flops(model: Model, setup: Setup) -> float:
    """Forward FLOPs of causal attention per token, all layers: half of 2 * s * (q + v) each for QK^T and PV."""
    q, _, _, out = model.attention
    return float(setup.context * (q + out) * model.layers)


def _device(model: Model, setup: Setup, gpu: Gpu, kind: Rates, own: Backend) -> dict[str, float]:
    """Kind of work -> seconds the GPU needs for it in one pass."""
    tokens, full, again = setup.tokens, setup.method == "full", setup.checkpointing == "full"
    passes = (3 if full else 2) + setup.recomputes
    gemm = sum(_gemm_seconds(setup, kind, width, tokens, passes) * width.layers for width in model.widths)
    if setup.saved_fp8 and setup.recomputes:  # a fused layer's last product is not run again
        gemm -= 2.0 * model.hidden * sum(w.ffn * w.layers for w in model.widths) * tokens / kind.gemm
    head_rate = rates(gpu, False).gemm
    of_head = (3 if full else 2) + (setup.loss == "tiled")  # TRL makes the logits again in backward
    head = 2.0 * of_head * model.hidden * model.vocab * tokens / head_rate
    attention = attention_flops(model, setup) * tokens * (3.5 + again) / kind.attention
    moved = sum(_moved(model, setup, width) * width.layers for width in model.widths) * tokens / kind.eager
    moved += (_moved_weights(model, setup) + _moved_loss(model, setup)) / kind.copy
    found = {"products": gemm, "head": head, "attention": attention, "element-wise": moved}
    if setup.saved_fp8:
        found["transposing weights"] = fused.moved_weights(model, setup) / kind.copy
    elif setup.precision == "fp8":
        found["decoding and rounding"] = _moved_fp8(model, setup, own) / kind.copy
    return found


def _gemm_seconds(setup: Setup, kind: Rates, width: Width, tokens: int, passes: int) -> float:
    flops = 2.0 * passes * width.active * tokens / kind.gemm
    weights = passes * setup.width * width.active / kind.copy
    adapters = 0.0
    if setup.method == "lora":
        # Two thin products forward, four backward; those in float32 run on CUDA cores.
        slow = factor("float32_adapter_slowdown").value if setup.adapters == "float32" else 1.0
        values = setup.rank * (width.adapted_in + width.adapted_out)
        adapters = 2.0 * (passes + 1) * values * tokens * slow / kind.gemm
    return max(flops, weights) + adapters


def _moved(model: Model, setup: Setup, width: Width) -> float:
    """Bytes that element-wise kernels read and write per token and layer, forward, recomputed and backward."""
    if setup.saved_fp8:
        forward, backward = fused.moved(model, setup, width)
        return forward * (1 + setup.recomputes) + backward
    a, h, linears = setup.width, model.hidden, width.adapted_in + width.adapted_out
    q, k, _, _ = model.attention
    norms, rope = len(model.family.norms), (2 if setup.fused_layers else 11) * a * (q + k)
    forward = (2 * a if setup.fused_layers else 34) * norms * h + 3 * a * 2 * h + rope
    forward += (3 if setup.fused_layers else 5) * a * width.ffn + 4 * a * width.routed * h
    backward = 2.0 * forward
    if setup.method == "lora":
        # Per linear: scale the adapter's result, add it; cast input and sum where adapters are float32.
        out, into = {"same": (12, 0), "autocast": (12, 12), "float32": (28, 6)}[setup.adapters]
        forward += out * width.adapted_out + into * width.adapted_in
        backward += (4 if setup.adapters == "same" else 10) * linears
    elif setup.casts:  # between the float32 stream and 16-bit products
        forward, backward = forward + 4 * width.adapted_in, backward + 7 * linears
    return forward * (1 + setup.recomputes) + backward


def _moved_fp8(model: Model, setup: Setup, own: Backend) -> float:
    """Bytes per pass of Octavo's kernels beside their products: weights decoded or rounded, inputs rounded, results
    scaled."""
    forwards = 1 + setup.recomputes
    into = sum(width.adapted_in * width.layers for width in model.widths) * setup.tokens
    out = sum(width.adapted_out * width.layers for width in model.widths) * setup.tokens
    if setup.method == "full":
        return own.moved_round * forwards * (into + model.quantized)
    tokens = forwards * own.moved_result * out + (forwards + 1) * own.moved_input * (into + out)
    return tokens + model.quantized * (forwards * own.moved_weight + own.moved_weight_backward)


def _moved_weights(model: Model, setup: Setup) -> float:
    """Bytes per pass of weights that train: cast for the products, their gradients cast back."""
    if setup.method == "lora":
        return 0.0
    head = model.hidden * model.vocab
    casts = 6.0 * (2 + setup.recomputes) * (model.quantized + head) if setup.casts else 0.0
    return casts + 16.0 * head  # the embedding's gradient: zeros, then the sum with the head's


def _moved_loss(model: Model, setup: Setup) -> float:
    """Bytes per pass around the logits."""
    if setup.loss == "plain":  # float32 copy, log-softmax and gradients, read and written
        return (3.0 * setup.width + 36.0) * model.vocab * setup.tokens
    each = (2.0 if setup.loss == "liger" else 6.0) * setup.width * model.vocab * setup.tokens
    if setup.loss == "tiled" or setup.method == "lora":
        return each
    return each + 20.0 * liger_chunks(model, setup)[0] * model.vocab * model.hidden  # the head's gradient, summed up


def _host(model: Model, setup: Setup, own: Backend) -> float:
    """Seconds the host needs to launch one pass: PyTorch's operations, and the calls of Octavo's own on top."""
    kind, again = "fused" if setup.saved_fp8 else setup.method, setup.recomputes
    counts = load("calibration")["launches"][kind]
    each = (counts["pass"] + again * counts["recomputed"]) * factor("launch_s").value
    if setup.precision == "fp8" and not setup.saved_fp8:
        full, linears = setup.method == "full", max(width.adapters for width in model.widths)
        calls = linears * (2 + 2 * again if full else 2 + again)  # input and weight; forward and dX
        inside = own.launches_round if full else own.launches
        each += calls * (factor("call_s").value + inside * factor("launch_inside_s").value)
    return float(model.layers * each)


def bus(machine: Machine, nodes: int) -> float:
    """Bytes/s that one GPU sends in a ring over all: the slowest link decides."""
    gpu = machine.gpu
    speed = gpu.link_gbs * 1e9 * factor(f"{gpu.link}_efficiency").value
    if nodes > 1:
        network = (machine.network or 10.0) / 8 * 1e9 / machine.gpus
        speed = min(speed, network * factor("network_efficiency").value)
    return speed


def _exposed(model: Model, setup: Setup, machine: Machine, nodes: int, compute: float) -> float:
    """FSDP, every pass of an accumulation: two all-gathers of the weights, one reduce-scatter of what is trained."""
    if setup.sharding != "fsdp":
        return 0.0
    share = (setup.world - 1) / setup.world
    size = 1.0 if setup.precision == "fp8" and setup.method == "lora" else 2.0
    weights = size * model.quantized + 2.0 * (model.parameters - model.quantized)
    gradients = 4.0 * model.parameters if setup.method == "full" else 0.0
    total = share * (2 * weights + gradients) / bus(machine, nodes)
    first_block = total / (3 * model.layers)
    return max(0.0, total - factor("overlap").value * compute) + first_block


def _all_reduce(model: Model, setup: Setup, machine: Machine, nodes: int, trained: int) -> float:
    """DDP: gradients once per optimizer step, float32."""
    if setup.sharding != "ddp":
        return 0.0
    return 2 * (setup.world - 1) / setup.world * 4.0 * trained / bus(machine, nodes)


def fp8_shapes(model: Model, scheme: str) -> list[str]:
    """Linears whose contracted dimension FP8 products do not take: the name without its layer, and the size."""
    need = 128 if scheme == "block128" else 16
    bad = {}
    for name, kind in model.roles.items():
        shape = model.shapes[name]
        if kind in ("linear", "expert") and (shape[-1] % need or shape[-2] % need):
            bad[name.removesuffix(".weight").rpartition(".")[2]] = shape[-2:]
    return [f"{name} {list(shape)}: not multiples of {need}" for name, shape in bad.items()]
