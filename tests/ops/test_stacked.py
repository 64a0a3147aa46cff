"""Matrices side by side against the oracle one by one: its codes, alone or together, and never a row worse."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from octavo.formats.codec import decode, encode
from octavo.formats.granularity import PerBlock, PerRow
from octavo.formats.reference import quantize_ref
from octavo.formats.rounding import Curvature, compensated
from octavo.formats.spec import E4M3, E5M2
from octavo.ops.stacked import Matrix, compensated_stack

DIFFER = 0.01  # of the codes, at most: a float32 sum that differs in its last bit changes what follows in its row


def problem(n, k, granularity, spec=E4M3, seed=0):
    """Correlated inputs, a loud one, two dead ones; a row of zeros."""
    generator = torch.Generator().manual_seed(k + seed)
    x = torch.randn(2 * k, k, generator=generator) @ torch.randn(k, k, generator=generator) / k**0.5
    x[:, 3] *= 30
    x[:, [1, k - 2]] = 0
    weight = torch.randn(n, k, generator=generator) * 0.05
    weight[1:2] = 0
    return weight, Curvature.of(x.T @ x), quantize_ref(weight, spec, granularity).scale, granularity, spec


def matrix(weight, curvature, scale, granularity, spec):
    return Matrix(weight, granularity.expand(scale, tuple(weight.shape)), curvature)


@pytest.mark.parametrize("spec", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    "n, k, granularity",
    [(40, 300, PerRow()), (40, 128, PerBlock(16, 48)), (1, 20, PerRow())],
    ids=lambda value: str(value),
)
def test_codes_of_the_oracle(n, k, granularity, spec):
    problems = [problem(n, k, granularity, spec, seed) for seed in range(3)]
    zero = encode(torch.tensor([0.0, -0.0]), spec)
    for given, got in zip(problems, compensated_stack([matrix(*p) for p in problems], spec), strict=True):
        want = compensated(*given)
        same = (got.codes == want.codes) | (torch.isin(got.codes, zero) & torch.isin(want.codes, zero))
        assert (~same).float().mean() <= DIFFER
        torch.testing.assert_close(got.error_nearest, want.error_nearest, rtol=2e-2, atol=1e-9)
        assert float(got.error.sum()) == pytest.approx(float(want.error.sum()), rel=0.01)


@pytest.mark.parametrize("granularity", [PerRow(), PerBlock(16, 48)], ids=str)
def test_the_error_is_that_of_the_codes_and_no_row_is_worse(granularity):
    """In float64, from the codes: the solver adds up what each step changes instead of measuring the result."""
    weight, curvature, scale, _, spec = problem(48, 200, granularity)
    got = compensated_stack([matrix(weight, curvature, scale, granularity, spec)], spec)[0]
    s = granularity.expand(scale, (48, 200)).double()
    h = torch.empty(200, 200, dtype=torch.float64)
    h[curvature.order[:, None], curvature.order] = curvature.moments.double()
    plain = quantize_ref(weight, spec, granularity, scale=scale).codes
    errors = []
    for codes in (got.codes, plain):
        e = weight.double() - decode(codes, spec).double() * s
        errors.append(((e @ h) * e).sum(1))
    torch.testing.assert_close(got.error.double(), errors[0], rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(got.error_nearest.double(), errors[1], rtol=2e-2, atol=1e-9)
    assert (errors[0] <= errors[1] * (1 + 1e-5) + 1e-12).all()
    assert errors[0].sum() < 0.35 * errors[1].sum()


def test_alone_together_and_in_threads_the_same_codes():
    problems = [problem(32, 160, PerRow(), seed=seed) for seed in range(4)]
    alone = [compensated_stack([matrix(*p)], E4M3)[0].codes for p in problems]
    together = [found.codes for found in compensated_stack([matrix(*p) for p in problems], E4M3)]
    with ThreadPoolExecutor(3) as pool:
        threads = list(pool.map(lambda p: compensated_stack([matrix(*p)], E4M3)[0].codes, problems))
    for codes in (together, threads):
        assert all(torch.equal(a, b) for a, b in zip(alone, codes, strict=True))
