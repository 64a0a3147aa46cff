"""Which kernel each engine selects for a linear or an expert block, by compute capability. Data, then one look-up.

Read from the engines' sources: vLLM 0.33 kernels/linear/__init__.py and each kernel's is_supported, SGLang 0.5.23
fp8_utils.py, Transformers 5.24 integrations/finegrained_fp8.py. Mode: w8a8 multiplies in FP8, w8a16 keeps activations
in 16 bit and decodes the weights, w16a16 dequantizes everything while it loads.
"""

from __future__ import annotations

from dataclasses import dataclass

SM = tuple[int, int]
CPU: SM = (0, 0)
ALL_SM: tuple[SM, ...] = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))


@dataclass(frozen=True)
class Kernel:
    """name: as the engine logs it. mode: w8a8, w8a16, w16a16 or none. note: what to know, may be empty."""

    name: str
    mode: str
    note: str = ""


MARLIN = Kernel("Marlin", "w8a16", "no FP8 units on this GPU: weights are decoded on the fly")
MARLIN_ADA = Kernel("Marlin", "w8a16", "vLLM has no block W8A8 kernel for SM89: CUTLASS needs SM90, DeepGEMM SM90")
CUTLASS = Kernel("CUTLASS", "w8a8")
DEEP_GEMM = Kernel("DeepGEMM", "w8a8")
DEEP_GEMM_PO2 = Kernel("DeepGEMM UE8M0", "w8a8", "scales are rounded up to powers of two and weights requantized")
TRITON = Kernel("Triton", "w8a8")
NONE = Kernel("none", "none")

_OLD = dict.fromkeys(((7, 5), (8, 0), (8, 6)), MARLIN)
_NEW = ((10, 0), (10, 3))
_RTX = ((12, 0), (12, 1))

VLLM: dict[str, dict[SM, Kernel]] = {
    "scalar-dynamic": _OLD | dict.fromkeys(((8, 9), (9, 0), *_NEW, *_RTX), CUTLASS) | {CPU: NONE},
    "scalar-static": _OLD
    | dict.fromkeys(((8, 9), (9, 0), *_RTX), CUTLASS)
    | {sm: Kernel("FlashInfer", "w8a8") for sm in _NEW}
    | {CPU: NONE},
    "channel": _OLD
    | dict.fromkeys(((8, 9), (9, 0), *_NEW, *_RTX), CUTLASS)
    | {CPU: Kernel("ChannelWiseTorchFP8ScaledMM", "w8a8")},
    "block": _OLD
    | {(8, 9): MARLIN_ADA, (9, 0): Kernel("FlashInfer/DeepGEMM UE8M0", "w8a8", DEEP_GEMM_PO2.note)}
    | dict.fromkeys((*_NEW, *_RTX), DEEP_GEMM_PO2)
    | {CPU: Kernel("AMX block kernel", "w8a8", "needs a CPU with AMX tiles")},
    "expert-scalar": _OLD | dict.fromkeys(((8, 9), (9, 0), *_NEW, *_RTX), TRITON) | {CPU: NONE},
    "expert-channel": _OLD
    | {sm: Kernel("CUTLASS grouped GEMM", "w8a8") for sm in ((8, 9), (9, 0), *_NEW)}
    | dict.fromkeys(_RTX, TRITON)
    | {CPU: NONE},
    "expert-block": _OLD
    | {(8, 9): TRITON, (9, 0): Kernel("Triton (FlashInfer CUTLASS with expert parallelism)", "w8a8")}
    | {sm: Kernel("FlashInfer TRTLLM/CUTLASS", "w8a8") for sm in _NEW}
    | dict.fromkeys(_RTX, TRITON)
    | {CPU: Kernel("AMX block kernel", "w8a8", "needs a CPU with AMX tiles")},
}

_AMPERE = dict.fromkeys(((8, 0), (8, 6)), MARLIN)
_SGLANG_SCALAR = _AMPERE | dict.fromkeys(((8, 9), (9, 0), *_NEW, *_RTX), CUTLASS)
_SGLANG_BLOCK = (
    _AMPERE
    | {(8, 9): TRITON, (9, 0): DEEP_GEMM}
    | dict.fromkeys(_NEW, DEEP_GEMM_PO2)
    | {sm: Kernel("CUTLASS", "w8a8", DEEP_GEMM_PO2.note) for sm in _RTX}
)
_SGLANG_EXPERT = _AMPERE | dict.fromkeys(((8, 9), (9, 0), *_NEW, *_RTX), TRITON)
SGLANG: dict[str, dict[SM, Kernel]] = {
    "scalar-dynamic": _SGLANG_SCALAR,
    "scalar-static": _SGLANG_SCALAR,
    "channel": _SGLANG_SCALAR,
    "block": _SGLANG_BLOCK,
    "expert-scalar": _SGLANG_EXPERT,
    "expert-channel": _SGLANG_EXPERT,
    "expert-block": _SGLANG_EXPERT,
}

_DEQUANTIZED = Kernel("torch matmul after dequantizing", "w16a16", "below SM89 the whole model is dequantized to BF16")
_HF_OLD = dict.fromkeys((CPU, (7, 5), (8, 0), (8, 6)), _DEQUANTIZED)
_HF_TRITON = Kernel("kernels-community/finegrained-fp8 (Triton)", "w8a8", "fetched from the hub at run time")
_HF_DEEP = Kernel("DeepGEMM, else Triton", "w8a8", "fetched from the hub at run time")
_HF_BLOCK = _HF_OLD | {(8, 9): _HF_TRITON, (9, 0): _HF_DEEP} | dict.fromkeys((*_NEW, *_RTX), _HF_TRITON)
_HF_SCALAR = _HF_OLD | dict.fromkeys(((8, 9), (9, 0), *_NEW, *_RTX), _HF_TRITON)
TRANSFORMERS: dict[str, dict[SM, Kernel]] = {
    "scalar-dynamic": _HF_SCALAR,
    "scalar-static": _HF_SCALAR,
    "channel": _HF_SCALAR,
    "block": _HF_BLOCK,
    "expert-scalar": _HF_SCALAR,
    "expert-channel": _HF_SCALAR,
    "expert-block": _HF_BLOCK,
}
# compressed-tensors in Transformers: decompressed on the first forward pass, on every device.
DECOMPRESSED = Kernel("torch matmul after decompressing", "w16a16", "use_optimized_inference=True keeps FP8 on SM89+")


def kind_of(strategy: str, activation: str, *, expert: bool) -> str:
    """The row of a table: `channel`, `block`, `scalar-static`, `expert-block`, ..."""
    if strategy == "tensor":
        kind = "scalar" if expert else f"scalar-{'static' if activation == 'static' else 'dynamic'}"
    else:
        kind = strategy if strategy in ("channel", "block") else "block"
    return f"expert-{kind}" if expert else kind


def kernel_for(table: dict[str, dict[SM, Kernel]], kind: str, sm: SM, activation: str) -> Kernel:
    """The kernel of a table row. Weight-only checkpoints (`activation` none) get Marlin where Marlin exists."""
    kernel = table[kind].get(sm, NONE)
    if activation == "none" and kernel.mode == "w8a8" and sm > CPU:
        return Kernel("Marlin", "w8a16", "the checkpoint asks for 16-bit activations")
    if activation == "none" and sm == CPU:
        return NONE
    return kernel
