"""Every custom op: torch's own checks, and torch.compile without a graph break."""

import pytest
import torch

import octavo
from octavo.formats.rule import Rule
from octavo.formats.spec import E5M2
from octavo.ops.linear import linear
from octavo.ops.quantize import fake_quantize
from tests.ops.cases import GRANULARITIES

OPS = torch.ops.octavo
ids = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)


def rule_args(granularity, spec="e4m3", method="absmax"):
    return (spec, *granularity.tile, method, "fp32", "auto")


@ids
def test_opcheck_casts(granularity):
    x = torch.randn(3, 50, 90, requires_grad=True)
    scale = torch.rand(granularity.scale_shape((3, 50, 90))) + 0.1
    for given in (None, scale):
        torch.library.opcheck(OPS.quantize.default, (x.detach(), given, *rule_args(granularity)))
        torch.library.opcheck(OPS.fake_quantize.default, (x, given, *rule_args(granularity)))
    q = octavo.quantize(x.detach(), Rule(granularity=granularity))
    args = (q.codes, q.scale, "e4m3", *granularity.tile, torch.bfloat16, "auto")
    torch.library.opcheck(OPS.dequantize.default, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ids
def test_opcheck_linear(granularity, dtype):
    q = octavo.quantize(torch.randn(50, 90), Rule(E5M2, granularity))
    bias = torch.randn(50, dtype=dtype, requires_grad=True)
    tail = ("e5m2", *granularity.tile)
    for x in (torch.randn(2, 3, 90, dtype=dtype, requires_grad=True), torch.randn(90, dtype=dtype)):
        torch.library.opcheck(OPS.linear.default, (x, q.codes, q.scale, None, None, *tail, "none", "auto"))
        torch.library.opcheck(OPS.linear.default, (x, q.codes, q.scale, bias, None, *tail, "token", "auto"))
    scale = torch.tensor(0.01)
    torch.library.opcheck(OPS.linear.default, (x, q.codes, q.scale, bias, scale, *tail, "static", "auto"))
    grad = torch.randn(2, 3, 50, dtype=dtype)
    torch.library.opcheck(OPS.linear_dx.default, (grad, q.codes, q.scale, *tail, "auto"))


def test_opcheck_scaled_mm():
    a, b = octavo.quantize(torch.randn(2, 5, 40)), octavo.quantize(torch.randn(9, 40))
    args = (a.codes, a.scale, b.codes, b.scale, "e4m3", 1, 0, "e4m3", 1, 0, torch.bfloat16, "auto")
    torch.library.opcheck(OPS.scaled_mm.default, args)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static shapes", "dynamic shapes"])
@pytest.mark.parametrize("granularity", [GRANULARITIES[1], GRANULARITIES[4]], ids=str)
def test_compiles_without_a_break(granularity, dynamic, backend):
    torch._dynamo.reset()
    q = octavo.quantize(torch.randn(50, 90), Rule(granularity=granularity))
    rule = Rule(granularity=granularity)

    def step(x, bias):
        y = linear(torch.nn.functional.silu(x), q, bias, activation="token")
        return fake_quantize(y, rule).sum() + octavo.dequantize(octavo.quantize(x, rule)).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (3, 3, 7, 12) if dynamic else (3, 3):
        bias = torch.randn(50, requires_grad=True)
        x = torch.randn(rows, 90, requires_grad=True)
        found = torch.autograd.grad(compiled(x, bias), (x, bias))
        want = torch.autograd.grad(step(x, bias), (x, bias))
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_compiles_under_autocast():
    torch._dynamo.reset()
    q = octavo.quantize(torch.randn(50, 90))

    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear(x, q) * 2

    x = torch.randn(3, 90)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert compiled.dtype == step(x).dtype == torch.bfloat16
    assert torch.equal(compiled, step(x))


def test_meta_tensors_have_the_real_shapes():
    for granularity in GRANULARITIES:
        q = octavo.quantize(torch.empty(50, 90, device="meta"), Rule(granularity=granularity))
        assert q.codes.is_meta and q.scale.shape == granularity.scale_shape((50, 90))
        assert linear(torch.empty(3, 90, device="meta"), q).shape == (3, 50)
