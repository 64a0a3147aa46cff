"""What dropout takes, in plain torch: the published generator, the asked rate, the same values for the same seed."""

import pytest
import torch

from octavo.formats.granularity import PerRow
from octavo.formats.reference import quantize_ref
from octavo.formats.spec import E4M3
from octavo.ops import dropout
from octavo.ops.dropout import Dropout, draw, dropped_codes, exact_rate, kept

CPU = torch.device("cpu")


def test_the_generator_is_philox():
    """Known answer of Random123 for a counter and key of zeros."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(word) for word in dropout.philox([zero, zero, zero], 0)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_the_rate(rate):
    """Within five standard errors, over all, every column and every row."""
    m, k = 512, 1024
    gone = ~kept(m, k, Dropout(2**61 + 3, round(rate * 65536)), CPU)
    error = (rate * (1 - rate)) ** 0.5
    for share, count in ((gone.float().mean(), m * k), (gone.float().mean(0), m), (gone.float().mean(1), k)):
        assert ((share - rate).abs() < 5 * error / count**0.5).all()


def test_neighbours_know_nothing_of_each_other():
    gone = ~kept(512, 1024, Dropout(5, 32768), CPU)
    other = ~kept(512, 1024, Dropout(6, 32768), CPU)
    for a, b in ((gone[1:], gone[:-1]), (gone[:, 1:], gone[:, :-1]), (gone, other)):
        assert ((a == b).float().mean() - 0.5).abs() < 5 * 0.5 / a.numel() ** 0.5


def test_rows_have_their_place():
    some = Dropout(2**62 + 12345, 20000)
    assert torch.equal(kept(64, 200, some, CPU)[40:], kept(24, 200, some, CPU, first=40))
    assert not torch.equal(kept(8, 200, some, CPU), kept(8, 200, some, CPU, first=2**32)), "rows beyond 32 bits"


def test_the_generator_of_the_cpu_draws_the_seed():
    torch.manual_seed(1)
    first, second = draw(0.25), draw(0.25)
    torch.manual_seed(1)
    assert first == draw(0.25) != second and draw(0.0) is None
    assert 0 <= first.seed < 2**63 and first.below == 16384
    with torch.device("meta"):
        assert draw(0.25).below == 16384, "not that of the default device"


@pytest.mark.parametrize(("p", "rate"), [(0.0, 0.0), (1e-9, 0.0), (0.05, 3277 / 65536), (0.999999, 1.0), (1.0, 1.0)])
def test_rates_of_sixteen_bits(p, rate):
    assert exact_rate(p) == rate


def test_codes_are_those_of_the_values_left():
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    q = quantize_ref(x, E4M3, PerRow())
    some = Dropout(9, 30000)
    left = dropped_codes(q, some)
    assert torch.equal(left.codes, torch.where(kept(6, 48, some, CPU), q.codes, 0)) and left.scale is q.scale
