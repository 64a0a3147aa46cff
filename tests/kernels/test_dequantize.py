"""dequantize.cu and transpose.cu on the host."""

import pytest
import torch

from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.formats.reference import dequantize_ref
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3
from octavo.ops import native, w8a16

pytestmark = pytest.mark.usefixtures("on_host")
GRANULARITIES = pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(128, 128)], ids=str)


@GRANULARITIES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("k", [16, 200, 272])
def test_every_code(granularity, dtype, k):
    """The bits of the reference, NaN codes included; K that is and is not a multiple of 16."""
    codes = (torch.arange(200 * k) * 7 % 256).to(torch.uint8).view(200, k)
    scale = torch.rand(granularity.scale_shape((200, k)), generator=torch.Generator().manual_seed(0)) + 0.01
    q = ScaledTensor(codes, scale, E4M3, granularity)
    found, want = w8a16.dequantize(q, dtype), dequantize_ref(q, dtype)
    assert torch.equal(found.isnan(), want.isnan()) and torch.equal(found.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("n, k", [(16, 16), (128, 128), (144, 304), (576, 192)])
def test_transpose(n, k):
    codes = (torch.arange(n * k) * 31 % 251).to(torch.uint8).view(n, k)
    assert torch.equal(native.transposed(codes), codes.mT)
    parts = codes[:16], codes, codes.flip(0).contiguous(), codes[:16] + 1
    for count in (2, 3, 4):
        assert torch.equal(native.transposed(*parts[:count]), torch.cat(parts[:count]).mT)
