import pytest
import torch

from octavo.base.errors import DataError
from octavo.formats.granularity import PerBlock, PerRow, PerTensor
from octavo.formats.rule import Rule
from octavo.ops.quantize import dequantize, quantize
from octavo.ops.rounding import KEPT, Compensator


class Source:
    """Moments in memory; counts how often each is read."""

    def __init__(self, **matrices):
        self.matrices, self.reads = matrices, []

    def __contains__(self, module):
        return True

    def key(self, module):
        return module.split(".")[0]

    def get(self, module):
        self.reads.append(self.key(module))
        return self.matrices[self.key(module)]


def moments(k, seed=0):
    x = torch.randn(3 * k, k, generator=torch.Generator().manual_seed(seed))
    x = x @ (torch.eye(k) + 0.5)
    return x.T @ x


@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(16, 16)], ids=str)
def test_same_scales_lower_output_error(granularity):
    h, weight = moments(64), torch.randn(48, 64)
    source = Source(a=h)
    solve = Compensator(source)
    rule = Rule(granularity=granularity, rounding="compensated")
    got, plain = solve(weight, rule, None, "a.q"), quantize(weight, Rule(granularity=granularity))
    assert torch.equal(got.scale, plain.scale)
    errors = [torch.trace((e := dequantize(q) - weight) @ h @ e.T) for q in (got, plain)]
    assert errors[0] < 0.5 * errors[1]
    assert solve.error == pytest.approx(float(errors[0]), rel=1e-3)
    assert solve.error_nearest == pytest.approx(float(errors[1]), rel=5e-3), "a product in BF16, on some CPUs"


@pytest.mark.parametrize("granularity", [PerRow(), PerBlock(16, 16)], ids=str)
def test_scales_by_the_hessian_lower_the_output_error(granularity):
    h, weight = moments(64), torch.randn(48, 64)
    errors = {}
    for method in ("absmax", "hessian"):
        solve = Compensator(Source(a=h))
        solve(weight, Rule(granularity=granularity, rounding="compensated", method=method), None, "a.q")
        errors[method] = solve.error
    assert errors["hessian"] < 0.97 * errors["absmax"]


def test_nearest_rules_pass_through():
    weight = torch.randn(8, 16)
    source = Source()
    got = Compensator(source)(weight, Rule(), None, "a.q")
    assert torch.equal(got.codes, quantize(weight).codes) and not source.reads


@pytest.mark.parametrize(("factor", "word"), [(-1.0, "negative diagonal"), (torch.nan, "NaN")])
def test_moments_that_no_tokens_add_up_to_name_the_module(factor, word):
    solve = Compensator(Source(a=moments(16) * factor))
    with pytest.raises(DataError, match=rf"^a\.q: .*{word}"):
        solve(torch.randn(4, 16), Rule(rounding="compensated"), None, "a.q")


def test_siblings_share_a_factorization():
    source = Source(**{name: moments(16, seed) for seed, name in enumerate("abc")})
    solve = Compensator(source)
    rule = Rule(rounding="compensated")
    for module in ("a.q", "a.k", "b.o", "a.v", "c.x", "a.q"):
        solve(torch.randn(4, 16), rule, None, module)
    assert KEPT == 2 and source.reads == ["a", "b", "c"]


@pytest.mark.parametrize("scale_format", ["fp32", "po2"])
@pytest.mark.parametrize("granularity", [PerTensor(), PerRow(), PerBlock(16, 16)], ids=str)
def test_no_matrix_is_worse_than_plain_rounding_with_its_own_scales(granularity, scale_format):
    """In e H e^T recomputed in float64, searched scales against absmax ones; few tokens, loud and dead inputs too."""
    generator = torch.Generator().manual_seed(0)
    for n, k, tokens, loud in [
        (1, 1, 1, 1.0),
        (3, 7, 2, 1.0),
        (33, 40, 20, 30.0),
        (16, 64, 200, 0.0),
        (48, 48, 500, 1.0),
    ]:
        weight = torch.randn(n, k, generator=generator)
        x = torch.randn(tokens, k, generator=generator)
        x[:, ::3] *= loud
        rule = Rule(granularity=granularity, scale_format=scale_format)
        got = Compensator(Source(a=x.T @ x))(weight, rule.rounded("compensated", None), None, "a.q")
        errors = [
            float((x.double() @ (dequantize(q) - weight).double().T).square().sum())
            for q in (got, quantize(weight, rule))
        ]
        assert errors[0] <= errors[1] * (1 + 1e-5), (n, k, tokens, loud)
