"""The cases of benchmarks/failure_cases.py, one test each: on the CPU, and on a GPU where there is one."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
cases = importlib.import_module("failure_cases")
sys.path.pop(0)


@pytest.mark.parametrize("check", cases.CHECKS, ids=lambda c: c.__name__)
def test_on_the_cpu(check):
    assert check("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("check", cases.CHECKS, ids=lambda c: c.__name__)
def test_on_the_gpu(check):
    assert check("cuda")
