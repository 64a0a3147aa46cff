"""octavo::linear: forward and backward of every granularity, ragged shapes, and what it keeps."""

import pytest
import torch

from octavo.formats.granularity import PerBlock, PerGroup, PerRow, PerTensor
from octavo.formats.recipe import Rule
from octavo.formats.reference import dequantize_ref
from octavo.ops.linear import linear
from octavo.ops.quantize import quantize
from octavo.testing import FLOOR_DB, assert_sqnr

GRANULARITIES = [PerTensor(), PerRow(), PerGroup(128), PerBlock(128, 128), PerBlock(64, 32)]


@pytest.mark.parametrize("shape", [(200, 136), (576, 200), (1, 1), (128, 256)], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_forward_and_gradient(granularity, shape):
    n, k = shape
    torch.manual_seed(0)
    q = quantize(torch.randn(n, k), Rule(granularity=granularity))
    w = dequantize_ref(q)
    x = torch.randn(2, 3, k, requires_grad=True)
    grad = torch.randn(2, 3, n)
    y = linear(x, q)
    y.backward(grad)
    assert_sqnr(y.detach(), x.detach() @ w.T, FLOOR_DB["rounding", "float32"])
    assert_sqnr(x.grad, grad @ w, FLOOR_DB["rounding", "float32"])
