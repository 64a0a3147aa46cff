"""scaled_mm against its two oracles: dequantized operands and unquantized operands."""

import pytest
import torch

import octavo
from octavo.base.errors import ShapeError
from octavo.formats.reference import dequantize_ref
from octavo.formats.rule import Rule
from octavo.formats.spec import E4M3, E5M2
from octavo.ops import cpu, dequant, reference
from octavo.testing import FLOOR_DB, assert_sqnr
from tests.ops.cases import GRANULARITIES


@pytest.mark.parametrize("kernels", [cpu, dequant, reference], ids=lambda m: m.__name__.split(".")[-1])
@pytest.mark.parametrize("spec", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_both_oracles(granularity, spec, kernels):
    torch.manual_seed(0)
    a, b = torch.randn(2, 33, 520), torch.randn(65, 520)
    left = kernels.quantize(a, None, Rule(spec))
    right = kernels.quantize(b, None, Rule(spec, granularity))
    found = kernels.scaled_mm(left, right, torch.float32)
    assert_sqnr(found, dequantize_ref(left) @ dequantize_ref(right).T, FLOOR_DB["rounding", "float32"])
    assert_sqnr(found, a @ b.T, FLOOR_DB["scaled_mm", spec.name, "normal"])


def test_public_call():
    a, b = octavo.quantize(torch.randn(70, 40)), octavo.quantize(torch.randn(90, 40))
    y = octavo.scaled_mm(a, b)
    assert y.dtype == torch.bfloat16 and y.shape == (70, 90)
    exact = dequantize_ref(a) @ dequantize_ref(b).T
    assert_sqnr(y, exact, FLOOR_DB["rounding", "bfloat16"])
    assert_sqnr(octavo.scaled_mm(a, b, torch.float16, "reference"), exact, FLOOR_DB["rounding", "float16"])
    with pytest.raises(ShapeError, match=r"\[70, 40\] and \[9, 41\]"):
        octavo.scaled_mm(a, octavo.quantize(torch.randn(9, 41)))
