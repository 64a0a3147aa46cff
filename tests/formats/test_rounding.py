"""Compensated rounding against brute force, and its promises: never worse, deterministic, odd inputs handled."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.base.errors import DataError, ShapeError
from octavo.formats.codec import decode, encode, nearest
from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.formats.reference import quantize_ref
from octavo.formats.rounding import Curvature, compensated
from octavo.formats.spec import E4M3, E5M2


def problem(n, k, tokens=64, seed=0):
    """Weights, and second moments of correlated inputs with loud channels."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * 0.05
    mix = torch.randn(k, k, generator=generator) / k**0.5
    loud = 1 + 9 * (torch.rand(k, generator=generator) > 0.9)
    x = torch.randn(tokens, k, generator=generator) @ mix * loud
    return weight, x.T @ x


def scale_of(weight, granularity, scale_format="fp32"):
    return quantize_ref(weight, E4M3, granularity, scale_format=scale_format).scale


@pytest.mark.parametrize("spec", [E4M3, E5M2], ids=str)
def test_nearest_is_decode_of_encode(spec):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat([x[torch.isfinite(x)], torch.randn(100_000) * 3, torch.randn(10_000) * spec.min_normal])
    assert torch.equal(nearest(x, spec), decode(encode(x, spec), spec))


def exact_best(weight, scale, h):
    """The lowest e H e^T over every choice of codes for one row: depth-first search with e H e^T as a bound.

    With H = R^T R, R upper, the error is a sum of squares, one per column from the last: each is a lower bound.
    """
    r = torch.linalg.cholesky(h.double(), upper=True).numpy()
    grid = torch.unique(decode(torch.arange(127, dtype=torch.uint8), E4M3)).double() * float(scale)
    values = torch.unique(torch.cat([-grid, grid])).numpy()
    w, k = weight.double().numpy(), len(weight)
    best, error = np.inf, np.zeros(k)

    def search(j, spent):
        nonlocal best
        if j < 0:
            best = min(best, spent)
            return
        rest = r[j, j + 1 :] @ error[j + 1 :]
        cost = (r[j, j] * (w[j] - values) + rest) ** 2
        for index in np.argsort(cost):
            if spent + cost[index] >= best:
                return
            error[j] = w[j] - values[index]
            search(j - 1, spent + cost[index])

    search(k - 1, 0.0)
    return best


def test_close_to_the_exact_optimum():
    """An 8 x 8 problem, with next to no damping: damped, it would look for the optimum of other tokens."""
    weight, h = problem(8, 8, tokens=16, seed=1)
    scale = scale_of(weight, PerRow())
    got = compensated(weight, Curvature.of(h, damping=1e-3), scale, PerRow(), E4M3, sweeps=8)
    best = torch.tensor([exact_best(weight[row], scale[row], h) for row in range(8)])
    assert (got.error >= best * (1 - 1e-3) - 1e-9).all(), "nothing beats an exact search"
    assert got.error.sum() < 2 * best.sum() < got.error_nearest.sum()


@pytest.mark.parametrize("scale_format", ["fp32", "po2"])
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(128, 128), PerBlock(16, 48)], ids=str)
def test_cuts_the_output_error_and_never_a_row_worse(granularity, scale_format):
    weight, h = problem(40, 200, tokens=150)
    scale = scale_of(weight, granularity, scale_format)
    got = compensated(weight, Curvature.of(h), scale, granularity, E4M3)
    assert (got.error <= got.error_nearest).all()
    assert got.error.sum() < 0.35 * got.error_nearest.sum()
    e = weight - decode(got.codes, E4M3) * granularity.expand(scale, (40, 200))
    torch.testing.assert_close(((e @ h) * e).sum(1), got.error, rtol=1e-3, atol=1e-6)


def test_coordinate_descent_only_helps():
    weight, h = problem(32, 160)
    scale = scale_of(weight, PerRow())
    curvature = Curvature.of(h, damping=1e-6)  # with more it descends on the damped error
    errors = [compensated(weight, curvature, scale, PerRow(), E4M3, sweeps=s).error.sum() for s in (0, 1, 3)]
    assert errors[2] <= errors[1] <= errors[0]


def test_deterministic():
    weight, h = problem(24, 130)
    scale = scale_of(weight, PerRow())
    runs = [compensated(weight, Curvature.of(h), scale, PerRow(), E4M3).codes for _ in range(2)]
    assert torch.equal(*runs)


def test_dead_inputs_are_rounded_to_nearest():
    weight, h = problem(16, 64)
    h[5, :] = h[:, 5] = h[63, :] = h[:, 63] = 0
    scale = scale_of(weight, PerRow())
    got = compensated(weight, Curvature.of(h), scale, PerRow(), E4M3)
    plain = quantize_ref(weight, E4M3, PerRow()).codes
    assert torch.equal(got.codes[:, [5, 63]], plain[:, [5, 63]])
    nothing = compensated(weight, Curvature.of(torch.zeros(64, 64)), scale, PerRow(), E4M3)
    assert torch.equal(nothing.codes, plain)


def test_ill_conditioned_moments_raise_the_damping():
    weight, _ = problem(16, 64)
    x = torch.ones(3, 64) * 1e4
    curvature = Curvature.of(x.T @ x - torch.eye(64) * 1e3, damping=1e-9)
    got = compensated(weight, curvature, scale_of(weight, PerRow()), PerRow(), E4M3)
    assert curvature.damping > 1e-9 and (got.error <= got.error_nearest).all()


def test_rows_do_not_depend_on_each_other():
    """A conversion works in slices of rows: the same codes come out."""
    weight, h = problem(32, 96)
    scale, curvature = scale_of(weight, PerRow()), Curvature.of(h)
    whole = compensated(weight, curvature, scale, PerRow(), E4M3).codes
    parts = [compensated(weight[i : i + 16], curvature, scale[i : i + 16], PerRow(), E4M3).codes for i in (0, 16)]
    assert (whole != torch.cat(parts)).float().mean() < 1e-3, "but for the order of float32 sums"


def test_special_values_keep_their_codes():
    weight, h = problem(4, 16)
    weight[0, 0], weight[1, 1] = torch.inf, torch.nan
    scale = torch.full((4, 1), 0.001)
    got = compensated(weight, Curvature.of(h), scale, PerRow(), E4M3)
    assert got.codes[0, 0] == 0x7E and got.codes[1, 1] in E4M3.nan_codes


def test_bad_moments_are_refused():
    weight, h = problem(4, 16)
    with pytest.raises(ShapeError, match=r"need \[16, 16\]"):
        compensated(weight, Curvature.of(h[:8, :8]), torch.ones(4, 1), PerRow(), E4M3)
    with pytest.raises(ShapeError, match="square"):
        Curvature.of(h[:8])
    with pytest.raises(DataError, match="NaN"):
        Curvature.of(h * torch.nan)
    with pytest.raises(DataError, match="negative diagonal"):
        Curvature.of(-h)
    indefinite = -h
    indefinite.fill_diagonal_(1e-3 * float(h.diagonal().mean()))
    with pytest.raises(DataError, match="positive semidefinite"):
        Curvature.of(indefinite)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 12),
    k=st.integers(1, 40),
    tokens=st.integers(0, 60),
    loud=st.sampled_from([0.0, 1.0, 1e3]),
    tile=st.sampled_from([PerTensor(), PerRow(), PerBlock(8, 16)]),
    scale_format=st.sampled_from(["fp32", "po2"]),
    sweeps=st.integers(0, 2),
    seed=st.integers(0, 2**16),
)
def test_no_matrix_is_ever_worse_than_nearest(n, k, tokens, loud, tile, scale_format, sweeps, seed):
    """In e H e^T recomputed from the codes in float64: any shape, rank, dead and loud inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator)
    x = torch.randn(tokens, k, generator=generator)
    x[:, ::5] *= loud
    scale = scale_of(weight, tile, scale_format)
    codes = compensated(weight, Curvature.of(x.T @ x), scale, tile, E4M3, sweeps=sweeps).codes
    plain = quantize_ref(weight, E4M3, tile, scale=scale).codes
    errors = []
    for c in (codes, plain):
        e = (weight - decode(c, E4M3) * tile.expand(scale, (n, k))).double()
        errors.append(float((x.double() @ e.T).square().sum()))
    slack = 1e-5 * float((x.double() @ weight.double().T).square().sum())  # float32 sums of the solver's own comparison
    assert errors[0] <= errors[1] * (1 + 1e-4) + slack * 1e-3
