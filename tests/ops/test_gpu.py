"""The checks of benchmarks/gpu_check.py, one test each: on a GPU where there is one, the cheap ones on the CPU too."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
gpu_check = importlib.util.module_from_spec(spec)
sys.modules["gpu_check"] = gpu_check
spec.loader.exec_module(gpu_check)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("check", gpu_check.CHECKS, ids=lambda c: c.__name__)
def test_on_the_gpu(check):
    assert check("cuda")


@pytest.mark.parametrize(
    "name", ["every_bfloat16_and_every_code", "module_moves_and_saves", "what_calibrate_and_eval_count"]
)
def test_the_script_itself(name):
    assert getattr(gpu_check, name)("cpu")


def test_scales_are_not_divided_by_a_python_number(monkeypatch):
    """CUDA multiplies by the rounded reciprocal of a Python number; dividing by a tensor is IEEE division."""
    from octavo.formats import scale

    divisors = []
    real = torch.Tensor.__truediv__
    monkeypatch.setattr(torch.Tensor, "__truediv__", lambda self, other: divisors.append(other) or real(self, other))
    scale.scale_of(torch.tensor([1.0, 3.0]), gpu_check.E4M3)
    assert divisors and all(isinstance(d, torch.Tensor) and d.dtype == torch.float32 for d in divisors)
