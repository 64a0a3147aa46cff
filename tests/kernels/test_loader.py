"""Kernels compile for every GPU without one being here: no spills, no local arrays, no FP64; and the cache is safe."""

import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from octavo.base.errors import UnsupportedError
from octavo.kernels.cuda import loader
from octavo.kernels.plans import Block, Ring, TermBlock
from octavo.kernels.tiling import gated_block, group_block, row_block
from octavo.ops.attention import attention_variants

pytest.importorskip("cuda.core")
ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]


def w8a16(plan, x_bf16, e5m2, scales):
    return loader.Variant(plan.source, (("X_BF16", x_bf16), ("E5M2", e5m2), ("SCALES", scales), *plan.defines))


PLANS = [Ring(1, 1, 2, 8, 3), Ring(1, 2, 1, 8, 4), Ring(2, 2, 1, 16, 2, staged=0)]
PLANS += [Block(2, 4, 4, 4), Block(2, 8, 4, 4, splits=2)]
VARIANTS = [w8a16(plan, 1, 0, 2) for plan in PLANS] + [w8a16(plan, 0, 1, 0) for plan in (PLANS[0], PLANS[3])]
VARIANTS += [
    loader.Variant("w8a16_sum.cu", (("X_BF16", 1), ("PARTS_FLOAT", floats), ("WIDTH", width)))
    for floats, width in ((1, 8), (0, 8), (1, 1))
]
VARIANTS += [
    loader.Variant("split.cu", (("X_BF16", 1), ("FINER", 32), ("THREADS", 512), ("ROUNDS", rounds)))
    for rounds in (4, 8)
]


def tokens(k, parts=1, fold=1, norm=0, add=0):
    block = row_block(k, bool(fold))
    shape = {"X_BF16": 1, "GROUPED": 0, "FOLD": fold, "PARTS": parts, "NORM": norm, "ADD": add}
    return loader.Variant("quantize.cu", tuple((shape | block.defines).items()))


def gated(k, backward, shared, gelu=0):
    block = gated_block(k, bool(backward), shared << 10)
    shape = {"X_BF16": 1, "BACKWARD": backward, "GELU": gelu}
    return loader.Variant("gated.cu", tuple((shape | block.defines).items()))


VARIANTS += [
    tokens(64, fold=0),
    tokens(4096, norm=1),
    tokens(4096, norm=1, add=1),
    tokens(6144, parts=3),
    tokens(14336),
    tokens(28672),
]
VARIANTS += [
    loader.Variant("quantize.cu", (("X_BF16", 1), ("GROUPED", 1), ("FOLD", 1), ("THREADS", threads), ("ROUNDS", rows)))
    for threads, rows in (dataclasses.astuple(group_block(k)) for k in (64, 4096))
]
VARIANTS += [gated(k, backward, 227) for k in (576, 14336, 28672) for backward in (0, 1)]
VARIANTS += [gated(14336, backward, 99, gelu=1) for backward in (0, 1)]
VARIANTS += [
    loader.Variant("norm.cu", (("X_BF16", 1), ("CODES", codes), ("THREADS", 512), ("ROUNDS", 4))) for codes in (0, 1)
]
VARIANTS += [
    loader.Variant("dequantize.cu", (("OUT_BF16", 1), ("SCALES", scales), ("ALIGNED", aligned)))
    for scales, aligned in ((0, 0), (1, 1), (2, 1))
]
VARIANTS.append(loader.Variant("transpose.cu", ()))
VARIANTS += [
    loader.Variant("cast.cu", (("X_BF16", 1), ("AMAX", amax), ("SCALES", 2 + amax), ("THREADS", 256), ("ROUNDS", 4)))
    for amax in (0, 1)
]
VARIANTS += [loader.Variant("downs.cu", ()), loader.Variant("drop_codes.cu", ())]
VARIANTS.append(loader.Variant("add_kept.cu", (("X_BF16", 1),)))
VARIANTS += [loader.Variant("low_gradients.cu", (("RANKS", ranks), ("STAGES", 4 * ranks))) for ranks in (1, 2)]
VARIANTS.append(loader.Variant("sum_parts.cu", ()))
VARIANTS += [loader.Variant("ups.cu", (("BLOCKS", blocks),)) for blocks in (0, 1)]
VARIANTS += [
    loader.Variant("groups.cu", (("X_BF16", 1), ("NORM", norm), ("THREADS", 512), ("ROUNDS", rounds)))
    for norm, rounds in ((0, 8), (1, 4))
]
VARIANTS += [
    loader.Variant("gated_groups.cu", (("X_BF16", 1), ("BACKWARD", backward), ("GELU", gelu), ("THREADS", 256)))
    for backward, gelu in ((0, 0), (0, 1), (1, 0), (1, 1))
]
VARIANTS += [
    loader.Variant("over_tokens.cu", (("X_BF16", 1), ("RANKS", ranks), ("ALIGNED", 1), ("GROUPED", grouped)))
    for ranks, grouped in ((1, 0), (2, 0), (3, 0), (3, 1))
]
VARIANTS += [
    loader.Variant("append.cu", (("X_BF16", 1), ("FORWARD", forward), ("GROUPED", grouped)))
    for forward, grouped in ((0, 0), (1, 0), (0, 1), (1, 1))
]
VARIANTS += [
    variant
    for head, kind in ((64, 0), (96, 1), (128, 0), (128, 1), (128, 2), (256, 1))
    for variant in attention_variants(head, torch.bfloat16, kind)
]
VARIANTS += [
    loader.Variant(
        "kv_store.cu",
        (("X_BF16", 1), ("THREADS", 128), ("HEAD", 128), ("KV", kind), ("ROTARY", rotary), ("NORM", norm)),
    )
    for kind, rotary, norm in ((0, 1, 0), (1, 1, 1), (1, 0, 0), (2, 1, 0))
]
VARIANTS += [
    loader.Variant("residual_norm.cu", (("X_BF16", 1), ("THREADS", 512), ("ROUNDS", rounds))) for rounds in (1, 8)
]
VARIANTS += [loader.Variant("gate.cu", (("X_BF16", 1), ("THREADS", 128), ("GELU", gelu))) for gelu in (0, 1)]
VARIANTS += [
    loader.Variant("round_columns.cu", (("COMPENSATE", passed), ("MANTISSA", 3), ("MAX", 448), ("FINEST", 9)))
    for passed in (0, 1)
]


ON_HOPPER = [w8a16(plan, 1, 0, 1) for plan in (TermBlock(), TermBlock(splits=2), TermBlock(224, 128, 3))]
ON_HOPPER += [w8a16(TermBlock(128, tokens, 4, 1), 1, 0, 2) for tokens in (64, 128)]


# The source asks for 8.9 and for 9.0: 8.0 and 9.0 take all its branches. What is left to the others is the compiler's.
OTHERS = [arch for arch in ARCHITECTURES if arch not in ("sm_80", "sm_90a")]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles(arch):
    """Spills, local memory and FP64 are errors in `loader.PTXAS`; so is more than 48 KiB of static shared memory.

    For 8.0 and 9.0 every variant, for the others each in turn; soak has every variant for all.
    """
    variants = VARIANTS[OTHERS.index(arch) :: len(OTHERS)] if arch in OTHERS else VARIANTS
    for variant in variants + (ON_HOPPER if arch == "sm_90a" else []):
        assert loader.compile_variant(variant, arch)[:4] == b"\x7fELF"


@pytest.mark.soak
@pytest.mark.parametrize("arch", OTHERS)
def test_every_kernel_compiles_for_the_others(arch):
    for variant in VARIANTS:
        assert loader.compile_variant(variant, arch)[:4] == b"\x7fELF"


def ptx(variant):
    """What the compiler's first half makes of it: NVRTC needs no driver for that."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(variant.text.encode(), variant.source.encode(), 0, [], [])
    options = [b"--gpu-architecture=compute_90a", b"--std=c++17"]
    assert not nvrtc.nvrtcCompileProgram(program, len(options), options)[0].value
    text = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode()


EARLY = re.compile(r"\b(ld|st|red|atom)(\.\w+)*\.global")


def test_nothing_is_read_or_written_while_the_kernel_before_runs():
    """Loads said to be of constants may be moved across the wait. Weights that are copied ahead are no loads."""
    waiting = 0
    for variant in VARIANTS + ON_HOPPER:
        before, wait, behind = ptx(variant).partition("griddepcontrol.wait")
        waiting += bool(wait)
        assert not wait or (not EARLY.search(before) and EARLY.search(behind)), variant
    assert waiting > len(VARIANTS) / 2


def test_the_gate_works(monkeypatch, tmp_path):
    """What the gate forbids does not compile, and the message shows the line."""
    monkeypatch.setattr(loader, "SOURCES", tmp_path)
    signature = 'extern "C" __global__ void NAME(double* x, int n)'
    broken = {
        "fp64": f"{signature} {{ x[0] = x[1] * 3.0; }}",
        "local": f"{signature} {{ int a[64]; for (int i = 0; i < 64; ++i) a[i] = n * i; x[0] = (float)a[n]; }}",
        "typo": f"{signature} {{\n  int missing = nowhere;\n}}",
    }
    for name, text in broken.items():
        (tmp_path / f"{name}.cu").write_text(text)
        with pytest.raises(UnsupportedError, match=f"{name}.cu.*does not compile for sm_80"):
            loader.compile_variant(loader.Variant(f"{name}.cu", (("DEPTH", 2),)), "sm_80")
    with pytest.raises(UnsupportedError, match="int missing = nowhere"):
        loader.compile_variant(loader.Variant("typo.cu", ()), "sm_80")


def test_cache_key_names_what_changes_the_code(monkeypatch):
    one, other = VARIANTS[:2]
    keys = {loader.cache_key(one, "sm_80"), loader.cache_key(other, "sm_80"), loader.cache_key(one, "sm_90")}
    monkeypatch.setattr(loader, "nvrtc_version", lambda: (99, 0))
    assert len(keys | {loader.cache_key(one, "sm_80")}) == 4


def test_a_damaged_cache_file_is_not_run(tmp_path):
    path = tmp_path / "kernel.cubin"
    assert loader.read_cached(path) is None
    digest = loader.hashlib.sha256(b"code").digest()
    path.write_bytes(digest + b"code")
    assert loader.read_cached(path) == b"code"
    for damaged in (digest + b"cod", digest + b"codf", b"", b"code"):
        path.write_bytes(damaged)
        assert loader.read_cached(path) is None


def test_cache_is_private(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o755)
    monkeypatch.setattr(loader, "env", lambda: dataclasses.replace(real, cache_dir=tmp_path))
    assert loader.cache_folder() == folder and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(loader.os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(UnsupportedError, match="a folder of user"):
        loader.cache_folder()


def test_forced_architecture(monkeypatch):
    assert loader.architecture((9, 0)) == "sm_90a" and loader.architecture((8, 6)) == "sm_86"
    assert loader.may_overlap((9, 0)) and not loader.may_overlap((8, 9))
    monkeypatch.setattr(loader, "env", lambda: dataclasses.replace(real, arch="80"))
    assert loader.architecture((9, 0)) == "compute_80"
    assert not loader.may_overlap((9, 0))  # that code does not wait


def test_dynamic_shared_memory_is_always_asked_for(monkeypatch):
    """48 KiB come without asking, for static and dynamic memory together: 48 of the latter alone are too many."""
    asked, device = [], torch.device("cuda", 0)
    monkeypatch.setattr(loader, "load", lambda variant, sm: None)
    monkeypatch.setattr(loader, "_allow_shared", lambda variant, index: asked.append(variant.shared))
    monkeypatch.setattr(loader, "_core", lambda: SimpleNamespace(LaunchConfig=dict))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for shared in (0, 16, 48 << 10):
        loader._prepared.__wrapped__(loader.Variant("gated.cu", (), shared), (1,), 32, False, device)
    assert asked == [16, 48 << 10]


def test_a_thread_without_a_context_gets_torch_s_own_once(monkeypatch):
    from cuda.bindings import driver

    calls, current = [], {}

    def answer(name, value=None, **change):
        def function(*given):
            calls.append(name)
            current.update(change)
            return (driver.CUresult.CUDA_SUCCESS, *([] if value is None else [value()]))

        monkeypatch.setattr(driver, name, function)

    answer("cuCtxGetCurrent", lambda: driver.CUcontext(current.get("context", 0)))
    answer("cuDeviceGet", lambda: driver.CUdevice(0))
    answer("cuDevicePrimaryCtxRetain", lambda: driver.CUcontext(7))
    answer("cuCtxSetCurrent", context=7)
    binding = ["cuCtxGetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]

    def in_a_thread():
        with ThreadPoolExecutor(1) as pool:
            for _ in range(2):
                pool.submit(loader._bind_context, torch.device("cuda", 0)).result()

    in_a_thread()
    assert calls == binding
    in_a_thread()  # one that the runtime has bound already
    assert calls == [*binding, "cuCtxGetCurrent"]


real = loader.env()
