"""drop_codes.cu and add_kept.cu on the host: the bits of the same functions in plain torch."""

import pytest
import torch

from octavo.formats.granularity import PerRow
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3
from octavo.ops import dropout
from octavo.ops.dropout import Dropout

pytestmark = pytest.mark.usefixtures("on_host")
DROPS = [Dropout(0, 1), Dropout(2**63 - 1, 65535), Dropout(0x123456789ABCDEF, 3277)]


@pytest.mark.parametrize("some", DROPS, ids=lambda some: str(some.below))
@pytest.mark.parametrize(("m", "k", "pitch"), [(1, 16, 16), (7, 592, 720), (33, 128, 128), (0, 64, 64)])
def test_codes(both, some, m, k, pitch):
    wide = torch.randint(256, (m, pitch), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    q = ScaledTensor(wide[:, :k], torch.ones(m, 1), E4M3, PerRow())
    found, want = both(lambda: dropout.dropped_codes(q, some).codes)
    assert torch.equal(found, want) and found.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k", "at_once"), [(1, 8, 1 << 25), (7, 592, 1200), (300, 72, 72 * 128), (0, 64, 64)])
def test_sums(both, monkeypatch, dtype, m, k, at_once):
    """In parts of some rows as well; NaN that is dropped reaches nothing."""
    monkeypatch.setattr(dropout, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(1)
    y, low, a = (torch.randn(shape, generator=generator).to(dtype) for shape in ((m, k), (m, 5), (5, k)))
    low[m // 2 :, 0] = torch.nan
    y[:, :3] = -0.0

    def run():
        result = y.clone()
        dropout.add_kept(result, low, a, Dropout(77, 30000))
        return result

    found, want = both(run)
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit() & (found == 0), want.signbit() & (want == 0))
    assert bool(want.isnan().any()) is bool(m)
