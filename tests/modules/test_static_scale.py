"""Static input scales from histograms, against the inputs themselves."""

import pytest
import torch

from octavo.formats.granularity import PerTensor
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.scale import CANDIDATES
from octavo.formats.spec import E4M3
from octavo.modules.observers import BINS, InputStats
from octavo.modules.static_scale import relative_noise, static_scale


def inputs(kind):
    torch.manual_seed(0)
    x = torch.randn(400, 96)
    if kind == "repeating":  # channels that say nearly the same for every token, as language models have them
        x[:, 7], x[:, 40] = 61.0 + torch.randn(400) * 1.5, -37.0 + torch.randn(400)
    if kind == "loud token":
        x[3, 5] = 3000.0
    return x


def noise(x, scale):
    """Mean over tokens of |error|^2 / |token|^2, from the inputs themselves."""
    rounded = dequantize_ref(quantize_ref(x, E4M3, PerTensor(), scale=torch.tensor(scale)))
    return float(((rounded - x).square().sum(1) / x.square().sum(1)).mean())


@pytest.mark.parametrize("kind", ["normal", "repeating", "loud token"])
def test_histogram_stands_for_the_inputs(kind):
    x = inputs(kind)
    stats = InputStats.of(x, rows=0)
    assert stats.energy.shape == (BINS,) and float(stats.energy.sum()) == pytest.approx(len(x))
    start = static_scale(stats, "amax")
    found = [relative_noise(stats.energy, start * factor) for factor in CANDIDATES]
    exact = [noise(x, start * factor) for factor in CANDIDATES]
    assert found == pytest.approx(exact, rel=0.2)
    assert noise(x, static_scale(stats, "mse")) <= min(exact) * 1.06


def test_repeating_channels_move_onto_the_grid():
    x = inputs("repeating")
    stats = InputStats.of(x, rows=0)
    start, best = static_scale(stats, "amax"), noise(x, static_scale(stats, "mse"))
    every = [noise(x, start * factor) for factor in CANDIDATES]
    assert best <= every[0] and best < 0.5 * max(every), "where the grid lies matters"


def test_one_loud_token_does_not_decide():
    """In plain squared error its 3000 is all there is; and yet it is not cut off."""
    x, stats = inputs("loud token"), InputStats.of(inputs("loud token"), rows=0)
    scale = static_scale(stats)
    others = torch.cat([x[:3], x[4:]])
    best = min(noise(others, static_scale(stats, "amax") * factor) for factor in CANDIDATES)
    assert noise(others, scale) <= best * 1.06 and scale * 448 >= 3000


def test_amax_is_the_range_over_the_largest_code():
    stats = InputStats.of(torch.tensor([[1.0, -7.0], [3.0, 0.0]]), rows=0)
    assert static_scale(stats, "amax") == pytest.approx(7 / 448)


def test_statistics_add_up():
    x = inputs("repeating")
    parts = InputStats(0)
    for part in x.split(150):
        parts.merge(InputStats.of(part, rows=0))
    assert static_scale(parts) == static_scale(InputStats.of(x, rows=0))


def test_nothing_zeros_and_extremes():
    assert static_scale(InputStats(0)) is None
    assert static_scale(InputStats.of(torch.zeros(3, 8), rows=0)) == 1.0
    for size in (1e-30, 1e30):
        assert 0 < static_scale(InputStats.of(torch.full((2, 4), size), rows=0)) < float("inf")
