"""Choosing a kernel is pure: tables for GPUs nobody here has."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import octavo
from octavo.base.errors import ConfigError, UnsupportedError
from octavo.ops import backends
from octavo.ops.backends import BACKENDS, OPS, Backend, Problem, check_table, choose, load_table
from octavo.testing import fake_caps

GPUS = ["sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("gpu", ["cpu", *GPUS])
def test_auto_takes_the_first_that_can(gpu, op):
    caps = fake_caps(gpu)
    device = "cuda" if caps.is_cuda else "cpu"
    choice = choose(Problem(op, device, torch.float16), caps)
    weights = op in ("linear", "linear_dx", "dequantize")
    fast = {"w8a16": caps.is_cuda and weights and caps.sm >= (8, 0), "native": op == "quantize" and caps.tag == "sm90"}
    assert choice.backend == next((name for name, takes in fast.items() if takes), "dequant" if caps.is_cuda else "cpu")


@pytest.mark.parametrize("activation, chosen", [("none", "w8a16"), ("token", "native"), ("static", "native")])
def test_products_in_fp8_where_inputs_are(activation, chosen):
    problem = Problem("linear", "cuda", activation=activation)
    assert choose(problem, fake_caps("h200")).backend == chosen
    back = Problem("linear_dx", "cuda")
    assert choose(back, fake_caps("h200")).backend == "w8a16"  # exact: dY is rounded to FP8 by nobody who did not ask


def test_the_choice_says_how_it_multiplies():
    assert "w8a16, one pass over the codes" in str(choose(Problem("linear", "cuda"), fake_caps("h200")))
    ways = {m: choose(Problem("linear", "cuda", m=m), fake_caps("h200")).kernel for m in (16, 17, 4096)}
    assert "w8a16_ring" in ways[16] and "two E4M3 terms" in ways[17] and "decoded to 16 bit" in ways[4096]
    assert "w8a16_tile" in choose(Problem("linear", "cuda", m=17), fake_caps("a100")).kernel
    assert choose(Problem("linear", "cpu"), fake_caps("cpu")).kernel == ""


def test_turing_has_no_bfloat16():
    choice = choose(Problem("linear", "cuda", torch.bfloat16), fake_caps("t4"))
    assert choice.backend == "reference"
    assert choice.refused[-1] == ("dequant", "bfloat16 needs sm80 or later, this is sm75")
    assert "not dequant: bfloat16 needs sm80" in str(choice)


def test_a_named_backend_that_cannot_is_an_error_with_every_reason():
    problem = Problem("linear", "cuda", torch.float64)
    with pytest.raises(UnsupportedError) as error:
        choose(problem, fake_caps("h100"), backend="cpu")
    assert "runs on CPU tensors" in str(error.value) and "computes in float32" in str(error.value)
    assert "one of: reference" in error.value.fix and error.value.exit_code == 3
    assert choose(problem, fake_caps("h100"), backend="reference").backend == "reference"


def test_auto_without_any_backend_lists_all(monkeypatch):
    never = {name: Backend(name, lambda p, c, n=name: f"{n} says no", "") for name in BACKENDS}
    monkeypatch.setattr(backends, "BACKENDS", never)
    with pytest.raises(UnsupportedError, match="cpu: cpu says no; reference: reference says no"):
        choose(Problem("linear"), fake_caps("cpu"))


def test_the_table_decides_the_order():
    table = {"version": 2, "rows": [{"op": "linear", "device": "sm90", "order": ["reference"]}]}
    table["rows"].append({"op": "*", "device": "*", "order": ["dequant", "reference"]})
    problem = Problem("linear", "cuda")
    assert choose(problem, fake_caps("h200"), table).backend == "reference"
    assert choose(problem, fake_caps("a100"), table).backend == "dequant"
    assert choose(Problem("quantize", "cuda"), fake_caps("h200"), table).backend == "dequant"


def test_table_file_is_sound_and_versioned():
    table = json.loads((Path(backends.__file__).parent / "table.json").read_text())
    assert table == load_table()
    with pytest.raises(ConfigError, match="version 0"):
        check_table({**table, "version": 0})
    with pytest.raises(ConfigError, match="Did you mean 'cpu'"):
        check_table({"version": 2, "rows": [{"op": "*", "device": "*", "order": ["cpuu"]}]})
    with pytest.raises(ConfigError, match="no row"):
        choose(Problem("linear"), fake_caps("cpu"), {"version": 2, "rows": []})


def test_every_backend_loads_and_offers_its_ops():
    for backend in BACKENDS.values():
        kernels = backend.load()
        for op in OPS:
            if op in backend.ops:
                assert callable(getattr(kernels, op))
            else:
                assert backend.refuse(Problem(op, "cuda", k=128), fake_caps("h200")) is not None


@pytest.mark.parametrize(
    "backend, change, reason",
    [
        ("w8a16", {"device": "cpu"}, "CUDA device"),
        ("w8a16", {"m": 0}, "nothing to do for M=0"),
        ("w8a16", {"k": 0}, "nothing to do"),
        ("w8a16", {"tile": (1, 128)}, "not group128"),
        ("w8a16", {"dtype": torch.float32}, "these are torch.float32"),
        ("w8a16", {"activation": "token"}, "per token"),
        ("w8a16", {"spec": "e5m2", "m": 129}, "128 tokens or fewer"),
        ("w8a16", {"op": "scaled_mm"}, "asked for scaled_mm"),
        ("native", {"activation": "none"}, "static or token with these weights, not none"),
        ("native", {"activation": "group128"}, "not group128"),
        ("native", {"tile": (128, 128), "n": 4096, "k": 4096, "activation": "token"}, "group128 with these weights"),
        ("native", {"tile": (128, 128), "k": 576, "activation": "group128"}, "multiples of 128"),
        ("native", {"op": "linear_dx", "tile": (128, 128)}, "block128x128 forward on sm90"),
        ("native", {"n": 200, "activation": "token"}, "multiples of 16, not 200"),
        ("native", {"dtype": torch.float16, "activation": "token"}, "cuBLAS writes bfloat16"),
        ("native", {"op": "quantize", "k": 129}, "multiple of 8"),
        ("native", {"op": "quantize", "tile": (128, 128)}, "not e4m3 block128x128"),
        ("native", {"spec": "e5m2", "activation": "token"}, "not e5m2"),
    ],
    ids=str,
)
def test_what_our_kernels_refuse(backend, change, reason):
    problem = Problem(**{"op": "linear", "device": "cuda", "n": 576, "k": 576, **change})
    with pytest.raises(UnsupportedError, match=reason):
        choose(problem, fake_caps("h200"), backend=backend)


@pytest.mark.parametrize(
    "backend, least, problem",
    [
        ("w8a16", "a100", Problem("linear", "cuda", m=16, k=576)),
        ("w8a16", "a100", Problem("linear_dx", "cuda", m=5000, n=200, k=136, tile=(128, 128))),
        ("w8a16", "a100", Problem("dequantize", "cuda", k=7)),
        ("native", "l4", Problem("linear", "cuda", activation="token")),
        ("native", "l4", Problem("linear_dx", "cuda", m=77)),
        ("native", "h200", Problem("linear", "cuda", tile=(128, 128), activation="group128", m=4)),
        ("native", "l4", Problem("quantize", "cuda", tile=(1, 128), k=576)),
    ],
    ids=str,
)
def test_what_our_kernels_take(backend, least, problem):
    assert choose(problem, fake_caps(least), backend=backend).backend == backend
    assert "sm75" in str(BACKENDS[backend].refuse(problem, fake_caps("t4")))


@pytest.mark.parametrize("op", ["linear", "quantize"])
def test_an_old_driver_gets_the_plain_backend(op, monkeypatch):
    """Code for CUDA 13 does not load on a driver of CUDA 12: the reason is said before, not by an error in a launch."""
    old, new, elsewhere = (dataclasses.replace(fake_caps("h200"), cuda=major) for major in (12, 13, 0))
    choice = choose(Problem(op, "cuda"), old)
    assert choice.backend == "dequant" and "the driver runs CUDA 12: update it" in str(choice)
    assert all(choose(Problem(op, "cuda"), caps).backend in ("w8a16", "native") for caps in (new, elsewhere))
    monkeypatch.setattr(backends, "version_of", lambda name: None)
    assert "compiles with cuda-core and cuda-bindings, which is not installed" in str(choose(Problem(op, "cuda"), new))


def test_why():
    choice = octavo.why("linear", m=8, n=64, k=128, gpu="rtx3090")
    assert choice.backend == "w8a16" and "linear e4m3 row bfloat16 M=8 N=64 K=128 on rtx3090 (sm86)" in str(choice)
    assert octavo.why("quantize", device="cpu").backend == "cpu"
    assert "quantize e4m3 row bfloat16 4096x4096" in str(octavo.why("quantize", device="cpu"))
    assert octavo.why(dtype=torch.float64, device="cpu").refused[0][0] == "cpu"
    with pytest.raises(ConfigError, match="Did you mean 'linear'"):
        octavo.why("linaer")
