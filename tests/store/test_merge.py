"""What survives a merge, on numbers worked out by hand and on random layers."""

import pytest
import torch

from octavo.formats.granularity import PerRow
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.spec import E4M3
from octavo.store.merge import Survival


@pytest.mark.parametrize(("share", "noise"), [(1.0, 0.0), (0.5, 0.0), (0.0, 0.0), (1.0, 3.0)], ids=str)
def test_kept_is_the_projection_on_the_change(share, noise):
    torch.manual_seed(0)
    base, delta = torch.randn(64, 128), 0.01 * torch.randn(64, 128)
    across = torch.randn(64, 128)
    across -= delta * (across * delta).sum() / (delta * delta).sum()
    survival = Survival()
    survival.add("a", base + delta, base + share * delta + noise * across, delta)
    assert survival.total().kept == pytest.approx(share, abs=1e-3)
    assert survival.layers()[0].change == pytest.approx(0.01, rel=0.05)


def test_slices_add_up_to_the_layer():
    torch.manual_seed(0)
    base, delta = torch.randn(64, 96), 0.05 * torch.randn(64, 96)
    exported = dequantize_ref(quantize_ref(base + delta, E4M3, PerRow()))
    whole, parts = Survival(), Survival()
    x = torch.randn(200, 96) * torch.rand(96)
    whole.add("a", base + delta, exported, delta, x.T @ x)
    for rows in (slice(0, 7), slice(7, 64)):
        parts.add("a", (base + delta)[rows], exported[rows], delta[rows], x.T @ x)
    one, other = whole.layers()[0], parts.layers()[0]
    for name in ("kept", "output_kept", "output_error", "output_cosine", "change"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-5)


def test_outputs_are_measured_on_the_inputs():
    """The moments stand for the inputs: the same figures as from the outputs themselves."""
    torch.manual_seed(0)
    base, delta = torch.randn(64, 96), 0.05 * torch.randn(64, 96)
    exported = dequantize_ref(quantize_ref(base + delta, E4M3, PerRow()))
    x = torch.randn(200, 96) * torch.rand(96)
    survival = Survival()
    survival.add("a", base + delta, exported, delta, x.T @ x)
    wanted, change = x @ (base + delta).T, x @ delta.T
    got = survival.total()
    assert got.output_kept == pytest.approx(float(((x @ (exported - base).T) * change).sum() / change.square().sum()))
    assert got.output_error == pytest.approx(float((x @ exported.T - wanted).norm() / change.norm()), rel=1e-4)
    cosine = torch.nn.functional.cosine_similarity(wanted.flatten(), (x @ exported.T).flatten(), dim=0)
    assert got.output_cosine == pytest.approx(float(cosine), abs=1e-6)


def test_total_weighs_layers_by_their_change():
    survival = Survival()
    zero, one = torch.zeros(4, 4), torch.ones(4, 4)
    survival.add("big", 3 * one, 3 * one, 3 * one)
    survival.add("small", one, zero, one)
    assert survival.total().kept == pytest.approx(9 / 10) and survival.total().output_kept is None
    assert Survival().total().kept is None


def test_on_grid_base_loses_a_small_change_and_the_original_does_not():
    torch.manual_seed(0)
    original, delta = torch.randn(256, 512), 0.01 * torch.randn(256, 512)
    on_grid = dequantize_ref(quantize_ref(original, E4M3, PerRow()))
    kept = {}
    for name, base in (("original", original), ("dequantized", on_grid)):
        survival = Survival()
        survival.add("a", base + delta, dequantize_ref(quantize_ref(base + delta, E4M3, PerRow())), delta)
        kept[name] = survival.total().kept
    assert kept["original"] == pytest.approx(1, abs=0.05)
    assert 0.3 < kept["dequantized"] < 0.5
