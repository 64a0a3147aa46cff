"""Observers against brute force: ranges, percentiles, padding, experts, the KV cache, broken activations."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from octavo.base.errors import CheckpointError, ShapeError
from octavo.modules.observers import CacheObserver, InputObserver, InputStats, histogram


class Block(nn.Module):
    """q and k share their input; down has its own."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.down = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x):
        return self.down(self.q(x) * self.k(x))


class Experts(nn.Module):
    """Two products per expert on slices of 3-D weights; the last expert gets no token."""

    def __init__(self, transposed=False):
        super().__init__()
        self.transposed = transposed
        self.up = nn.Parameter(torch.randn(3, 8, 6) if transposed else torch.randn(3, 6, 8))
        self.down = nn.Parameter(torch.randn(3, 6, 8) if transposed else torch.randn(3, 8, 6))

    def forward(self, x):
        x = x.reshape(-1, 8)
        parts = []
        for expert, rows in ((torch.tensor(0), x[:3]), (torch.tensor(1), x[3:])):
            up, down = self.up[expert], self.down[expert]
            hidden = rows @ up if self.transposed else F.linear(rows, up)
            parts.append(torch.matmul(hidden, down) if self.transposed else F.linear(hidden, down))
        return torch.cat(parts)


def test_ranges_and_tokens_over_samples():
    model, samples = Block(), [torch.randn(1, 5, 8), torch.randn(1, 3, 8) * 3]
    with torch.no_grad(), InputObserver(model, ["q", "k", "down"]) as inputs:
        for x in samples:
            model(x)
    seen = torch.cat([x.reshape(-1, 8) for x in samples])
    for name in ("q", "k"):
        assert inputs.stats[name].tokens == 8
        assert torch.equal(inputs.stats[name].channel_amax, seen.abs().amax(0))
        assert inputs.stats[name].amax == seen.abs().max()
    with torch.no_grad():
        hidden = model.q(seen) * model.k(seen)
    torch.testing.assert_close(inputs.stats["down"].channel_amax, hidden.abs().amax(0))


def test_hooks_are_gone_after_the_block():
    model = Block()
    with InputObserver(model, ["q"]) as inputs:
        pass
    model(torch.randn(1, 2, 8))
    assert inputs.stats["q"].tokens == 0


def test_siblings_share_the_work_but_not_a_later_change(monkeypatch):
    calls = []
    monkeypatch.setattr(
        InputStats, "of", classmethod(lambda cls, x, rows, of=InputStats.of: calls.append(x) or of(x, rows))
    )
    model, x = Block(), torch.randn(1, 4, 8)
    with torch.no_grad(), InputObserver(model, ["q", "k"]) as inputs:
        model.q(x)
        model.k(x)
        assert len(calls) == 1
        x.mul_(10)
        model.k(x)
    assert inputs.stats["k"].amax == pytest.approx(10 * inputs.stats["q"].amax)


def test_padding_is_excluded():
    model, x = Block(), torch.randn(2, 4, 8)
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]], dtype=torch.bool)
    x[~mask] = 1e4
    with torch.no_grad(), InputObserver(model, ["q"]) as inputs:
        inputs.mask = mask
        model.q(x)
    assert inputs.stats["q"].tokens == 6
    assert torch.equal(inputs.stats["q"].channel_amax, x[mask].abs().amax(0))


def test_a_mask_that_does_not_fit_is_an_error():
    model = Block()
    with InputObserver(model, ["q"]) as inputs, pytest.raises(ShapeError, match="padding cannot be told"):
        inputs.mask = torch.ones(2, 4, dtype=torch.bool)
        model.q(torch.randn(5, 8))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_percentiles_never_below_and_within_one_bin(scale, dtype):
    torch.manual_seed(0)
    parts = [(torch.randn(100, 33) * scale).to(dtype) for _ in range(3)]
    stats = InputStats(33)
    for part in parts:
        stats.merge(InputStats.of(part, 0))
    values = torch.cat(parts).float().abs().flatten().sort().values
    for percent in (0.0, 50.0, 99.0, 99.9, 100.0):
        exact = float(values[max(-(-len(values) * int(percent * 10) // 1000), 1) - 1])
        assert exact <= stats.percentile(percent) <= exact * (1 + 1 / 32)
    assert stats.percentile(100.0) == stats.amax


def test_histogram_counts_every_value():
    x = torch.tensor([0.0, -0.0, 1e-30, 1.0, -1.0, 1.01, 1e9, 3e38])
    counts = histogram(x)
    assert counts.sum() == len(x)
    assert counts[0] == 3 and counts[-1] == 2
    assert counts.max() == 3  # the zeros and the tiny one; 1.0, -1.0 and 1.01 share a bin too


def test_sampled_rows_are_spread_and_bounded():
    x = torch.arange(100.0)[:, None].expand(100, 4)
    assert InputStats.of(x, 2).sample()[:, 0].tolist() == [25.0, 75.0]
    assert InputStats.of(x[:1], 2).sample().shape == (1, 4)
    assert InputStats(4).sample().shape == (0, 4)


@pytest.mark.parametrize("transposed", [False, True], ids=["linear", "matmul"])
def test_stacked_experts_and_one_unseen(transposed):
    experts, x = Experts(transposed), torch.randn(1, 7, 8)
    model = nn.Sequential(experts)
    with torch.no_grad(), InputObserver(model, ["0.up", "0.down"]) as inputs:
        model(x)
    assert [inputs.stats[f"0.{e}.up"].tokens for e in range(3)] == [3, 4, 0]
    assert inputs.stats["0.0.up"].amax == x[0, :3].abs().max()
    with torch.no_grad():
        hidden = x[0, 3:] @ experts.up[1] if transposed else F.linear(x[0, 3:], experts.up[1])
    assert inputs.stats["0.1.down"].amax == pytest.approx(float(hidden.abs().max()))
    assert inputs.transposed == ({"0.up", "0.down"} if transposed else set())
    unseen = inputs.stats["0.2.down"]
    assert unseen.amax is None and unseen.percentile(99.0) is None and not unseen.rows


def test_all_experts_at_once():
    """One batched product for all experts, where the tokens that an expert does not get are zeros."""

    class Batched(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 8, 6))

        def forward(self, x):
            return torch.bmm(x * torch.tensor([[1.0, 0, 1], [0, 1, 0], [0, 0, 0]])[:, :, None], self.up)

    model, x = nn.Sequential(Batched()), torch.randn(3, 8)
    with torch.no_grad(), InputObserver(model, ["0.up"]) as inputs:
        model(x)
    assert [inputs.stats[f"0.{e}.up"].tokens for e in range(3)] == [2, 1, 0]
    assert inputs.stats["0.1.up"].amax == x[1].abs().max()
    assert inputs.transposed == {"0.up"}


def test_expert_watch_ends_even_when_the_model_fails():
    model = nn.Sequential(Experts())
    with InputObserver(model, ["0.up"]) as inputs:
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 9))
        F.linear(torch.randn(2, 8), model[0].up[2])
    assert inputs.stats["0.2.up"].tokens == 0


@pytest.mark.parametrize(("bad", "word"), [(float("nan"), "NaN"), (float("-inf"), "Inf")])
def test_broken_activations_name_the_layer(bad, word):
    model = Block()
    with torch.no_grad():
        model.k.bias[1] = bad
    with (
        torch.no_grad(),
        InputObserver(model, ["q", "k", "down"]),
        pytest.raises(CheckpointError, match=f"inputs of down; got {word}"),
    ):
        model(torch.rand(1, 3, 8))


class Cache:
    def __init__(self):
        self.calls = []

    def update(self, keys, values, layer, *args, **kwargs):
        self.calls.append((layer, args, kwargs))
        return keys, values


def test_cache_ranges_by_kv_head():
    kv = CacheObserver()
    first = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    second = torch.randn(1, 2, 3, 4) * 2, torch.randn(1, 2, 3, 4) * 2
    for keys, values in (first, second):
        cache = Cache()
        assert kv.watch(cache).update(keys, values, 7, "extra", word=1)[0] is keys
        assert cache.calls == [(7, ("extra",), {"word": 1})]
    for i in (0, 1):
        want = torch.cat([first[i], second[i]], dim=2).abs().amax((0, 2, 3))
        assert torch.equal(kv.ranges[7][i], want)


def test_cache_padding_and_nan():
    kv, keys = CacheObserver(), torch.randn(1, 2, 3, 4)
    keys[0, :, 2] = torch.nan
    with pytest.raises(CheckpointError, match="keys of layer 3; got NaN"):
        kv.observe(3, keys, torch.ones(1, 2, 3, 4))
    kv.mask = torch.tensor([[True, True, False]])
    kv.observe(3, keys, copy.copy(torch.ones(1, 2, 3, 4)))
    assert torch.equal(kv.ranges[3][0], keys[0, :, :2].abs().amax((1, 2)))
