"""An adapter's product in columns of the FP8 product, against float64: as good as bfloat16 would be, at any size."""

import pytest
import torch

from octavo.formats.granularity import PerRow
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.spec import E4M3
from octavo.ops import adapter_columns, fused
from octavo.testing import sqnr_db

K, N, RANK = 512, 128, 16


def product(power, outlier=1.0, zero_row=False):
    """(found, exact) part of the adapter and (found, exact) sum, float64; and the codes as `project` leaves them."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(32, K, generator=generator), torch.randn(N, K, generator=generator) / 50
    x[:, 5] *= outlier
    if zero_row:
        w[1:] = 0
    a = (torch.rand(RANK, K, generator=generator) * 2 - 1) / K**0.5
    b = torch.randn(N, RANK, generator=generator) / 100 * 2.0**power
    weight = quantize_ref(w, E4M3, PerRow())
    q, _ = fused.quantize_tokens(x.bfloat16(), spare=adapter_columns.room_for(K, RANK))
    seen, base = dequantize_ref(q).double(), dequantize_ref(weight).double()
    downs = adapter_columns.encode_downs([a], [2.0])
    wide, low = adapter_columns.append_products(q, downs, torch.bfloat16)
    found = dequantize_ref(wide).double() @ dequantize_ref(adapter_columns.extended(weight, b, 0, downs)).double().mT
    exact = 2 * (seen @ a.double().mT) @ b.double().mT
    assert sqnr_db(low, 2 * seen @ a.double().mT) > 50  # bfloat16, and A in eight bits
    return found - seen @ base.mT, exact, found, seen @ base.mT + exact


@pytest.mark.parametrize("outlier", [1.0, 3000.0])
@pytest.mark.parametrize("power", [-8, -4, 0, 4, 8, 16])
def test_at_least_bfloat16(power, outlier):
    """B from 1 / 4,000 of a typical weight to 30,000 times one. Operands in bfloat16 would give 51 dB."""
    part, exact, _, _ = product(power, outlier)
    if power <= 0:
        assert sqnr_db(part, exact) > 51
    else:  # rows have shrunk: what their weights lose is far below what the sum is rounded to
        _, _, total, want = product(power, outlier)
        assert sqnr_db(total, want) > 51


def test_an_adapter_near_nothing():
    """Where it is 1e-5 of the layer's output its own error grows; the sum's does not."""
    part, exact, total, want = product(-14)
    assert exact.norm() < 1e-5 * want.norm() and sqnr_db(part, exact) > 15
    assert sqnr_db(total, want) > 110


def test_nothing_at_all():
    part, *_ = product(-200)
    assert part.abs().max() < 1e-12  # float64 sums in another order


def test_rows_of_zeros_take_the_scale_of_the_adapter():
    part, exact, _, _ = product(-12, zero_row=True)
    assert sqnr_db(part[:, 1:], exact[:, 1:]) > 51


def test_room():
    assert adapter_columns.room_for(4096, 16) == 128 and adapter_columns.room_for(4096, 48) == 256
    assert adapter_columns.room_for(4096, 0) == 0
    assert adapter_columns.room_for(4096, 1024) == 0, "another pass over the result is cheaper"
