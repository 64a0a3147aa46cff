"""octavo::linear: forward and backward of every granularity, ragged shapes, dtypes, and what it keeps."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import octavo
from octavo.base.errors import ConfigError, ShapeError, UnsupportedError
from octavo.formats.granularity import PerGroup, PerRow, PerTensor
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.rule import Rule
from octavo.formats.spec import E4M3
from octavo.ops import cpu, dequant, library, reference
from octavo.ops.linear import linear
from octavo.testing import FLOOR_DB, assert_sqnr
from tests.ops.cases import GRANULARITIES, MATRICES

BACKENDS = [cpu, dequant, reference]
MODES = {"static": PerTensor(), "token": PerRow(), "group128": PerGroup(128)}


def weight(shape, granularity=None, spec=E4M3):
    generator = torch.Generator().manual_seed(3)
    return octavo.quantize(torch.randn(shape, generator=generator), Rule(spec, granularity or PerRow()))


@pytest.mark.parametrize("shape", MATRICES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_forward_and_gradient(granularity, shape):
    (n, k), q = shape, weight(shape, granularity)
    w = dequantize_ref(q)
    x, grad = torch.randn(2, 3, k, requires_grad=True), torch.randn(2, 3, n)
    y = linear(x, q)
    y.backward(grad)
    assert_sqnr(y.detach(), x.detach() @ w.T, FLOOR_DB["rounding", "float32"])
    assert_sqnr(x.grad, grad @ w, FLOOR_DB["rounding", "float32"])


@pytest.mark.parametrize("kernels", BACKENDS, ids=lambda m: m.__name__.split(".")[-1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ["none", *MODES])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_backends_agree(granularity, activation, dtype, kernels):
    q = weight((200, 136), granularity)
    generator = torch.Generator().manual_seed(4)
    x, grad = torch.randn(11, 136, generator=generator), torch.randn(11, 200, generator=generator)
    x, grad, bias = x.to(dtype), grad.to(dtype), torch.randn(200, generator=generator)
    input_scale = torch.tensor(0.008) if activation == "static" else None
    y = kernels.linear(x, q, bias, activation, input_scale)
    fake = x.float()
    if activation != "none":
        fake = dequantize_ref(quantize_ref(x, E4M3, MODES[activation], scale=input_scale))
    floor = FLOOR_DB["rounding", str(dtype).removeprefix("torch.")]
    if kernels is dequant:
        floor = FLOOR_DB["dequant", str(dtype).removeprefix("torch.")]
    assert y.dtype == dtype
    assert_sqnr(y, F.linear(fake, dequantize_ref(q), bias), floor, "forward")
    assert_sqnr(kernels.linear_dx(grad, q), grad.float() @ dequantize_ref(q), floor, "backward")


@pytest.mark.parametrize("activation", MODES)
def test_activation_modes_and_their_straight_through_gradient(activation):
    q = weight((72, 200))
    x = (torch.randn(5, 200) * 3).requires_grad_()
    input_scale = torch.tensor(2.0 / 448) if activation == "static" else None
    y = linear(x, q, activation=activation, input_scale=input_scale)
    grad = torch.randn(5, 72)
    y.backward(grad)
    fake = dequantize_ref(quantize_ref(x.detach(), E4M3, MODES[activation], scale=input_scale))
    assert not torch.equal(fake, x.detach())
    assert_sqnr(y.detach(), fake @ dequantize_ref(q).T, FLOOR_DB["rounding", "float32"])
    assert_sqnr(x.grad, grad @ dequantize_ref(q), FLOOR_DB["rounding", "float32"])


def test_weight_only_error_is_the_cast_error_of_the_weight():
    torch.manual_seed(0)
    w, x = torch.randn(256, 512), torch.randn(64, 512)
    for spec in (octavo.E4M3, octavo.E5M2):
        y = linear(x, octavo.quantize(w, Rule(spec)))
        assert_sqnr(y, x @ w.T, FLOOR_DB["linear", spec.name, "normal"])


def test_gradient_against_finite_differences():
    q, bias = weight((5, 9)), torch.randn(5, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: linear(a, q, b), (x, bias))


def test_only_codes_and_scales_are_kept_for_backward():
    q, kept = weight((64, 48)), []
    x = torch.randn(128, 48, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = linear(x, q, torch.randn(64, requires_grad=True), activation="token")
    assert {(t.dtype, tuple(t.shape)) for t in kept} == {(torch.uint8, (64, 48)), (torch.float32, (64, 1))}
    y.sum().backward()
    assert x.grad is not None


def test_codes_and_scale_get_no_gradient():
    q = weight((8, 16))
    scale = q.scale.clone().requires_grad_()
    x = torch.randn(3, 16, requires_grad=True)
    args = (None, None, "e4m3", 1, 0, "none", "auto")
    torch.ops.octavo.linear(x, q.codes, scale, *args).sum().backward()
    assert scale.grad is None and x.grad is not None
    y = torch.ops.octavo.linear(x.detach(), q.codes, q.scale, *args)
    assert not y.requires_grad


def test_bias_gets_its_gradient_in_its_own_dtype():
    q, bias = weight((8, 16)), torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    linear(torch.randn(2, 3, 16), q, bias).sum().backward()
    assert bias.grad.dtype == torch.bfloat16 and torch.equal(bias.grad, torch.full((8,), 6.0, dtype=torch.bfloat16))


def test_second_derivative_is_refused():
    x = torch.randn(3, 16, requires_grad=True)
    (first,) = torch.autograd.grad(linear(x, weight((8, 16))).square().sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        first.sum().backward()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(16),
        lambda: torch.randn(0, 16),
        lambda: torch.randn(2, 0, 16),
        lambda: torch.randn(16, 5).t(),
        lambda: torch.randn(4, 6, 32)[:, ::2, ::2],
        lambda: torch.randn(1, 16).expand(7, 16),
    ],
    ids=["1-D", "no rows", "empty batch", "transposed", "strided", "expanded"],
)
@pytest.mark.parametrize("activation", ["none", "token", "group128"])
def test_awkward_inputs(make, activation):
    q, x = weight((8, 16)), make().requires_grad_()
    y = linear(x, q, activation=activation)
    assert y.shape == (*x.shape[:-1], 8) and y.is_contiguous()
    y.sum().backward()
    assert_sqnr(x.grad, torch.ones(y.shape) @ dequantize_ref(q), FLOOR_DB["rounding", "float32"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_autocast_decides_the_dtype_as_for_torch(dtype):
    q, x = weight((64, 128)), torch.randn(99, 128, dtype=dtype, requires_grad=True)
    plain = torch.randn(64, 128, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x, q, activation="token")
        assert y.dtype == F.linear(x, plain).dtype == torch.bfloat16
        assert torch.ops.octavo.linear(x, q.codes, q.scale, None, None, "e4m3", 1, 0, "none", "auto").dtype == dtype
    y.sum().backward()
    assert x.grad.dtype == dtype
    assert_sqnr(
        y.detach(), linear(x.detach().bfloat16().float(), q, activation="token"), FLOOR_DB["rounding", "bfloat16"]
    )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"x": torch.ones(3, 17)}, ShapeError, r"x \[3, 17\], weight \[8, 16\]"),
        ({"x": torch.ones(3, 16, dtype=torch.int64)}, ShapeError, "float values"),
        ({"activation": "tokn"}, ConfigError, "Did you mean 'token'"),
        ({"activation": "static"}, ConfigError, "no input_scale"),
        ({"activation": "token", "input_scale": torch.tensor(1.0)}, ConfigError, "an input_scale"),
        ({"backend": "dequant"}, UnsupportedError, "made for GPUs"),
    ],
    ids=["shape", "int", "mode", "no scale", "needless scale", "backend"],
)
def test_refusals(arguments, error, text):
    with pytest.raises(error, match=text):
        linear(**{"x": torch.ones(3, 16), "q": weight((8, 16)), **arguments})


def test_without_the_op_where_nobody_watches(monkeypatch):
    """The same bits; tensors without values, and compilers, still see the op."""
    q, x = octavo.quantize(torch.randn(24, 16)), torch.randn(3, 16)
    want = linear(x, q)
    compiled = torch.compile(lambda x: linear(x, q), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert linear(x.to("meta"), octavo.ScaledTensor(q.codes.to("meta"), q.scale.to("meta"))).shape == (3, 24)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert linear(mode.from_tensor(x), q).shape == (3, 24)
        assert torch.equal(compiled(x), want)
        monkeypatch.setattr(library, "linear", None)
        assert torch.equal(linear(x, q), want)
    with pytest.raises(TypeError):
        linear(x, q)
