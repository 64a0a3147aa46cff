"""Peak memory of a training step without a GPU: its real operations on fake tensors, replayed through an allocator.

    python benchmarks/replay.py [--layers N] [--shape Llama-3.2-1B] [--out FILE]    every way to train, a minute

Transformers, PEFT and autograd run as they do on a GPU, on tensors that have sizes and no memory, so that the storages
alive at any moment are exact at any size. The stream of allocations then goes through a model of CUDA's caching
allocator (c10/cuda/CUDACachingAllocator.cpp: rounding, best fit, splitting, segments), which says what would be
reserved. Not replayed: Liger (Triton kernels), cuBLAS's workspaces, temporaries inside one kernel.
"""

from __future__ import annotations

import argparse
import bisect
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from trl.models.selective_activation_checkpointing import enable_selective_activation_checkpointing

sys.path.insert(0, str(Path(__file__).parents[1]))

from octavo import Float8Linear, FrozenFloat8Linear
from octavo.formats.granularity import PerRow, from_tile
from octavo.formats.rule import Rule
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import SPECS
from octavo.integrations import fused as fused_layers
from octavo.integrations.peft import get_peft_model, lora_config
from octavo.kernels.cuda import loader
from octavo.ops import adapter_columns, adapter_gradients, dequant, fused, native
from octavo.workflows.planner.memory import memory
from octavo.workflows.planner.model import Model
from octavo.workflows.planner.setup import Setup
from octavo.workflows.planner.source import published
from octavo.workflows.planner.tables import GIB

MIB = 1 << 20
TILE = (4096, 32768)  # tokens and words of a tile of TRL's head
PRODUCTS = ("::mm", "addmm", "bmm", "attention", "empty")


class Recorder(TorchDispatchMode):
    """Follows every storage that operations make. events: (number, bytes) of an allocation, (-number, bytes) of its
    end. live, peak: bytes. launches: operations that are no views. moved: bytes that those of them read and write that
    are no products."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.launches = self.moved = 0
        self.events: list[tuple[int, int]] = []
        self._known: dict[int, int] = {}

    def see(self, tensor: torch.Tensor) -> bool:
        """Whether the storage is new."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return False
        number = len(self.events) + 1
        self._known[key] = number
        self.events.append((number, size))
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, number, size)
        return True

    def _gone(self, key: int, number: int, size: int) -> None:
        if self._known.get(key) == number:
            del self._known[key]
        self.live -= size
        self.events.append((-number, size))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "octavo":  # its own operations too, not the result alone
            with self:
                return _KERNELS[func._schema.name.removeprefix("octavo::")](*args)
        result = func(*args, **(kwargs or {}))
        made = [self.see(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(made) or func._schema.name.endswith("_"):
            self.launches += 1
            if not any(word in func._schema.name for word in PRODUCTS):
                touched = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
                self.moved += sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in touched)
        return result


def _scaled(codes: torch.Tensor, scale: torch.Tensor, spec: str, rows: int, cols: int) -> ScaledTensor:
    return ScaledTensor(codes, scale, SPECS[spec], from_tile(rows, cols))


def _linear(x: Any, codes: Any, scale: Any, bias: Any, given: Any, spec: str, rows: int, cols: int, act: str, _: Any):  # type: ignore[no-untyped-def]
    y = dequant.linear(x.flatten(0, -2), _scaled(codes, scale, spec, rows, cols), bias, act, given)
    return y.reshape(*x.shape[:-1], codes.shape[0])


def _linear_dx(grad: Any, codes: Any, scale: Any, spec: str, rows: int, cols: int, _: Any) -> torch.Tensor:
    dx = dequant.linear_dx(grad.flatten(0, -2), _scaled(codes, scale, spec, rows, cols))
    return dx.reshape(*grad.shape[:-1], codes.shape[1])


def _fake_quantize(x: Any, scale: Any, spec: str, rows: int, cols: int, method: str, form: str, _: Any) -> torch.Tensor:
    q = dequant.quantize(x, scale, Rule(SPECS[spec], from_tile(rows, cols), method, form))
    return dequant.dequantize(q, x.dtype)


_KERNELS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "linear_dx": _linear_dx,
    "fake_quantize": _fake_quantize,
}


class TiledLoss(torch.autograd.Function):
    """The allocations of TRL's fused head: logits of one tile at a time, gradients summed in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        kept = hidden.flatten(0, 1).clone()  # the positions that have a label
        tile = kept.new_empty(min(len(kept), TILE[0]), TILE[1], dtype=torch.bfloat16)
        for start in range(0, len(weight), TILE[1]):
            weight[start : start + TILE[1]].to(torch.bfloat16)
        ctx.save_for_backward(kept, weight)
        ctx.shape = hidden.shape
        return tile.new_zeros(len(kept), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        dx = kept.new_zeros(kept.shape, dtype=torch.float32)
        dw = weight.new_zeros(weight.shape, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        kept.new_empty(min(len(kept), TILE[0]), TILE[1], dtype=torch.bfloat16)
        for start in range(0, len(weight), TILE[1]):
            weight[start : start + TILE[1]].to(torch.bfloat16)
        return dx.to(kept.dtype).reshape(ctx.shape), None if dw is None else dw.to(weight.dtype)


@dataclass(frozen=True)
class Replayed:
    """Bytes: the peaks of what is live in the forward pass, in the backward pass and in the optimizer's step, the
    largest of them, and what an allocator would reserve, without and with expandable segments. launches, moved: of a
    step, see Recorder."""

    forward: int
    backward: int
    optimizer: int
    launches: int
    moved: int
    reserved: int
    expandable: int

    @property
    def peak(self) -> int:
        return max(self.forward, self.backward, self.optimizer)


def build(config: dict[str, Any], setup: Setup) -> nn.Module:
    """The model of a setup, ready to train, on the meta device."""
    made = AutoConfig.for_model(**config)
    made.use_cache = False
    with torch.device("meta"):
        dtype = torch.float32 if setup.method == "full" else torch.bfloat16
        model = AutoModelForCausalLM.from_config(made, dtype=dtype, attn_implementation="sdpa")
        base = model
        if setup.precision == "fp8":
            for name, module in list(model.model.layers.named_modules()):
                if type(module) is nn.Linear:
                    new = (
                        Float8Linear.from_linear(module)
                        if setup.method == "full"
                        else FrozenFloat8Linear(
                            module.in_features,
                            module.out_features,
                            rule=Rule(SPECS["e4m3"], PerRow()),
                            activation="token" if setup.saved_fp8 else "none",
                            device="meta",
                        )
                    )
                    model.model.layers.set_submodule(name, new)
        if setup.method == "lora":
            model = get_peft_model(model, lora_config(base, rank=setup.rank, alpha=32))
        if setup.checkpointing == "selective":
            enable_selective_activation_checkpointing(base)
        if setup.recomputes:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
    return model.train()


def replay(config: dict[str, Any], setup: Setup, steps: int = 2) -> Replayed:
    """`steps` optimizer steps of accumulation 1 as octavo finetune takes them; the figures are the last one's."""
    model, recorder = build(config, setup), Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), _on_a_gpu(model.config.model_type):
        _materialize(model)
        for tensor in (*model.parameters(), *model.buffers()):
            recorder.see(tensor)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        ids = torch.zeros(setup.micro, setup.context, dtype=torch.long)
        with recorder:
            for _ in range(steps):
                recorder.launches, recorder.moved, peaks = 0, 0, []
                for part in _step(model, optimizer, trained, ids, setup):
                    part()
                    peaks.append(recorder.peak)
                    recorder.peak = recorder.live
    held = (reserved(recorder.events, expandable) for expandable in (False, True))
    return Replayed(*peaks, recorder.launches, recorder.moved, *held)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, trained: list[nn.Parameter], ids: torch.Tensor, setup: Setup
) -> Iterator[Callable[[], Any]]:
    losses: list[torch.Tensor] = []

    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            if setup.loss == "plain":
                losses.append(model(input_ids=ids, labels=ids).loss)
                return
            base = model.get_base_model() if setup.method == "lora" else model
            hidden = base.model(input_ids=ids).last_hidden_state
            losses.append(TiledLoss.apply(hidden, base.lm_head.weight).sum())

    def finish() -> None:
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    yield forward
    yield lambda: losses.pop().backward()
    yield finish


@contextmanager
def _on_a_gpu(model_type: str) -> Iterator[None]:
    """What a GPU does otherwise: no mask where attention is causal, products of 16-bit operands into float32."""
    from importlib import import_module

    modeling = import_module(f"transformers.models.{model_type}.modeling_{model_type}")

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.shape[0], w.shape[0], dtype=torch.float32)

    def scaled_mm(x: torch.Tensor, w: torch.Tensor, *_: Any, output_dtype: torch.dtype, **__: Any) -> torch.Tensor:
        return x.new_empty(x.shape[0], w.shape[1], dtype=output_dtype)

    instead: list[tuple[Any, str, Callable[..., Any]]] = [
        (modeling, "create_causal_mask", lambda *a, **k: None),
        (dequant, "_matmul", product),
        # Fused layers: their kernels' tensors without the kernels.
        (torch.nn.functional, "scaled_mm", scaled_mm),
        (fused, "on_kernels", lambda x: True),
        (fused_layers, "products_run", lambda shape, device: True),
        (fused_layers, "codes_suffice", lambda weight: True),
        (loader, "launch", lambda *a: None),
        (native, "aligned", lambda x: x),
        (adapter_columns, "master", lambda part: part),
        (adapter_gradients, "master", lambda part: part),
    ]
    with ExitStack() as stack:
        for kept in (adapter_columns._one, native._ones):  # what they hold is real outside of here
            kept.cache_clear()
            stack.callback(kept.cache_clear)
        for owner, name, other in instead:
            stack.enter_context(mock.patch.object(owner, name, other))
        yield


def _materialize(model: nn.Module) -> None:
    """Fake tensors instead of meta tensors, tied ones once: autocast and the optimizer take them for a CPU's."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None:
                if id(old) not in made:
                    made[id(old)] = nn.Parameter(torch.empty(old.shape, dtype=old.dtype), old.requires_grad)
                module._parameters[name] = made[id(old)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class _Pool:
    """Blocks of one size class in the order of their addresses, free ones by size."""

    def __init__(self, small: bool) -> None:
        self.small, self.free, self.bytes, self.last, self.end = small, [], 0, None, 0  # type: ignore[var-annotated]

    def put(self, block: _Block) -> None:
        bisect.insort(self.free, block, key=_Block.key)

    def drop(self, block: _Block) -> None:
        self.free.pop(bisect.bisect_left(self.free, block.key(), key=_Block.key))


class _Block:
    def __init__(self, pool: _Pool, at: int, size: int) -> None:
        self.pool, self.at, self.size, self.idle = pool, at, size, False
        self.before: _Block | None = None
        self.after: _Block | None = None

    def key(self) -> tuple[int, int]:
        return self.size, self.at

    def join(self, other: _Block) -> None:
        """Take in the free neighbour that follows."""
        self.size, self.after = self.size + other.size, other.after
        if other.after is not None:
            other.after.before = self
        if self.pool.last is other:
            self.pool.last = self

    def split(self, size: int) -> None:
        rest = _Block(self.pool, self.at + size, self.size - size)
        rest.idle, rest.before, rest.after = True, self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        if self.pool.last is self:
            self.pool.last = rest
        self.pool.put(rest)


def reserved(events: list[tuple[int, int]], expandable: bool) -> int:
    """Bytes that CUDA's caching allocator holds in the end, on one stream and never short of memory."""
    pools = {small: _Pool(small) for small in (True, False)}
    held: dict[int, _Block] = {}
    for number, size in events:
        if number < 0:
            _release(held.pop(-number))
            continue
        size = max(512, -(-size // 512) * 512)
        pool = pools[size <= MIB]
        found = bisect.bisect_left(pool.free, (size, -1), key=_Block.key)
        block = pool.free.pop(found) if found < len(pool.free) else _grow(pool, size, expandable)
        block.idle = False
        if block.size - size >= (512 if pool.small or expandable else MIB + 1):
            block.split(size)
        held[number] = block
    return sum(pool.bytes for pool in pools.values())


def _grow(pool: _Pool, size: int, expandable: bool) -> _Block:
    """More memory: of an expandable segment what its free end lacks, else a segment of its own."""
    last = pool.last
    if expandable and last is not None and last.idle:
        pool.drop(last)
        block, need = last, size - last.size
    else:
        block, need = _Block(pool, pool.end, 0), size
    unit = 2 * MIB if pool.small else 20 * MIB
    if not expandable and not pool.small and need >= 10 * MIB:
        unit = 2 * MIB
    more = -(-need // unit) * unit
    block.size, pool.bytes, pool.end = block.size + more, pool.bytes + more, pool.end + more
    if expandable and block is not last:
        block.before = last
        if last is not None:
            last.after = block
        pool.last = block
    return block


def _release(block: _Block) -> None:
    pool = block.pool
    block.idle = True
    if block.after is not None and block.after.idle:
        pool.drop(block.after)
        block.join(block.after)
    if block.before is not None and block.before.idle:
        pool.drop(block.before)
        block.before.join(block)
        block = block.before
    pool.put(block)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="Llama-3.2-1B")
    parser.add_argument("--layers", type=int, help="instead of all")
    parser.add_argument("--tokens", default="1024,4096,16384")
    parser.add_argument("--only", default="", help="part of a setting's name, such as 'full fp8'")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = published()[options.shape.lower()]
    if options.layers:
        config = config | {"num_hidden_layers": options.layers}
    model = Model.from_config(options.shape, config)
    print("                                     GiB of allocated memory          reserved, and above allocated")
    print("setting                            formula replayed  error      plain      expandable  formula error")
    for setup in setups([int(n) for n in options.tokens.split(",")]):
        precision = f"{setup.precision} saved" if setup.saved_fp8 else setup.precision
        name = f"{setup.method} {precision} {setup.context} {setup.checkpointing} {setup.loss}"
        if options.only not in name:
            continue
        real, account = replay(config, setup), memory(model, setup)
        mine, whole = account.allocated, account.reserved
        print(
            f"{name:34} {mine / GIB:8.2f} {real.peak / GIB:8.2f} {mine / real.peak - 1:+7.1%} "
            f"{real.reserved / GIB:8.2f} {real.reserved / real.peak - 1:+6.1%} {real.expandable / GIB:8.2f} "
            f"{real.expandable / real.peak - 1:+6.1%} {whole / GIB:8.2f} {whole / real.expandable - 1:+6.1%}",
            flush=True,
        )
        if options.out:
            row = vars(setup) | vars(real) | {"shape": options.shape, "layers": options.layers}
            row |= {"formula": mine, "formula_reserved": whole, "instant": account.instant}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    return 0


def setups(contexts: list[int]) -> Iterator[Setup]:
    ways = [(method, precision, False) for method in ("lora", "full") for precision in ("bf16", "fp8")]
    for context in contexts:
        for method, precision, saved_fp8 in (*ways, ("lora", "fp8", True)):
            for checkpointing in ("none", "full"):
                for loss in ("tiled", "plain"):
                    yield Setup(
                        method=method,
                        precision=precision,
                        context=context,
                        checkpointing=checkpointing,  # type: ignore[arg-type]
                        loss=loss,  # type: ignore[arg-type]
                        saved_fp8=saved_fp8,
                        backend="native" if saved_fp8 else "dequant",
                        evaluates=False,
                    )


if __name__ == "__main__":
    sys.exit(main())
