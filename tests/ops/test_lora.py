"""LoRA over FP8 with FP8 products: outputs and gradients against float64 autograd over the dequantized operands."""

import importlib
import pkgutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import octavo.ops
from octavo.formats.granularity import PerBlock, PerGroup, PerRow, PerTensor
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.spec import E4M3
from octavo.ops import native
from octavo.ops.dropout import draw, kept
from octavo.ops.lora import Norm, Projection, gated_mlp, project
from octavo.testing import FLOOR_DB, sqnr_db

QUANTIZED = FLOOR_DB["linear", "e4m3", "normal"]  # dB of a product with one operand in E4M3


def projection(n, k, seed, rank=4, bias=False, granularity=None):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator) / k**0.5
    a, b = (
        (torch.randn(shape, generator=generator) / size**0.5).requires_grad_()
        for shape, size in (((rank, k), k), ((n, rank), rank))
    )
    return Projection(
        quantize_ref(weight, E4M3, granularity or PerRow()),
        torch.randn(n, generator=generator).bfloat16() if bias else None,
        *((a, b) if rank else (None, None)),
        scaling=0.5,
    )


def rounded(x):
    """x through E4M3 per token, the gradient straight through: what the oracle multiplies."""
    flat = x.detach().float().flatten(0, -2)
    return x + (dequantize_ref(quantize_ref(flat, E4M3, PerRow())).reshape(x.shape).double() - x).detach()


def oracle(p, x, stays=1.0):
    """stays: which of x the adapter sees."""
    y = x @ dequantize_ref(p.weight).double().mT
    if p.bias is not None:
        y = y + p.bias.double()
    if p.a is not None:
        y = y + p.scaling / (1 - p.dropout) * (x * stays @ p.a.double().mT) @ p.b.double().mT
    return y


def dropping(rate, *widths):
    """What the next call will keep of inputs of these widths, [3, 5, width] each."""
    if not rate:
        return [1.0] * len(widths)
    torch.manual_seed(3)
    stays = [kept(15, k, draw(rate), torch.device("cpu")).view(3, 5, k).double() for k in widths]
    torch.manual_seed(3)
    return stays


def inputs(k, seed=0):
    """Fifteen tokens; the first is zeros."""
    x = torch.randn(3, 5, k, generator=torch.Generator().manual_seed(seed))
    x[0, 0] = 0
    return x.bfloat16()


def compare(outputs, wanted, x, wide, parameters, floor=QUANTIZED - 1, of_outputs=45):
    """of_outputs: with the same operands they lack the rounding to BF16 alone."""
    grads = [torch.randn(y.shape, generator=torch.Generator().manual_seed(7 + i)) for i, y in enumerate(outputs)]
    for found, want in zip(outputs, wanted, strict=True):
        assert found.dtype == torch.bfloat16
        assert sqnr_db(found, want) > of_outputs
    torch.autograd.backward(outputs, [g.bfloat16() for g in grads])
    found = [x.grad, *(p.grad for p in parameters)]
    for p in parameters:
        p.grad = None
    torch.autograd.backward(wanted, [g.bfloat16().double() for g in grads])
    for mine, theirs in zip(found, [wide.grad, *(p.grad for p in parameters)], strict=True):
        keep = slice(1, None) if mine.dim() == 3 else slice(None)  # the zero token's gradient through the norm
        assert sqnr_db(mine[keep], theirs[keep]) > floor


def compare_mlp(y, want, x, wide, projections):
    """h is rounded to E4M3 on the far side of a BF16 rounding; gate and up are read back from E4M3: their errors meet
    in every gradient but the last adapter's."""
    parameters = [part for p in projections for part in p.adapter]
    compare([y], [want], x, wide, parameters, QUANTIZED - 5, QUANTIZED)


KEPT = pytest.mark.parametrize("normed", ["", "x", "codes"], ids=["plain", "norm", "norm-from-codes"])


def norm_of(normed, k, dtype=torch.float32):
    weight = torch.rand(k, generator=torch.Generator().manual_seed(5)).to(dtype)
    return Norm(weight, 1e-5, from_codes=normed == "codes") if normed else None


@KEPT
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()], ids=str)
@pytest.mark.parametrize("width", [64, 96], ids=["added", "columns"])
def test_three_projections_of_one_input(width, granularity, rank, normed):
    k = width
    projections = [
        projection(n, k, seed, rank, bias=seed == 1, granularity=granularity) for seed, n in enumerate((48, 16, 32))
    ]
    norm = norm_of(normed, k, torch.bfloat16)
    x = inputs(k).requires_grad_()
    wide = x.detach().double().requires_grad_()
    seen = rounded(F.rms_norm(wide, (k,), norm.weight.double(), norm.epsilon) if norm else wide)
    parameters = [part for p in projections for part in p.adapter if part is not None]
    compare(project(x, projections, norm), [oracle(p, seen) for p in projections], x, wide, parameters)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@KEPT
def test_gated_mlp(normed, activation):
    k, n = 64, 96
    gate, up, down = projection(n, k, 0), projection(n, k, 1), projection(k, n, 2)
    norm = norm_of(normed, k)
    x = inputs(k).requires_grad_()
    wide = x.detach().double().requires_grad_()
    seen = rounded(F.rms_norm(wide, (k,), norm.weight.double(), norm.epsilon) if norm else wide)
    act = F.silu if activation == "silu" else lambda value: F.gelu(value, approximate="tanh")
    hidden = act(oracle(gate, seen)) * oracle(up, seen)
    want = oracle(down, rounded(hidden))
    compare_mlp(gated_mlp(x, gate, up, down, activation, norm), want, x, wide, (gate, up, down))


@pytest.mark.parametrize(
    ("normed", "x_stays", "codes", "sixteen"),
    [("", False, 1, 0), ("x", False, 1, 1), ("codes", False, 1, 0), ("", True, 0, 1)],
    ids=["plain", "norm", "norm-from-codes", "x-stays"],
)
def test_what_is_kept_for_backward(normed, x_stays, codes, sixteen):
    """Codes of the input or itself, both only where the norm needs it, the adapters' small products and codes of A."""
    kept = []
    p, x = projection(48, 64, 0), inputs(64).requires_grad_()

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        project(x, [p], norm_of(normed, 64), x_stays=x_stays)
    values = {dtype: sum(t.numel() for t in kept if t.dtype == dtype) for dtype in (torch.uint8, torch.bfloat16)}
    assert values == {torch.uint8: 15 * 64 * codes + 128 * 64, torch.bfloat16: 15 * (64 * sixteen + 4)}
    assert not x_stays or any(t.data_ptr() == x.data_ptr() for t in kept), "no copy of it"


def test_quantized_again_is_the_same():
    def gradients(x_stays):
        p, x = projection(48, 64, 0), inputs(64).requires_grad_()
        project(x, [p], x_stays=x_stays)[0].sum().backward()
        return x.grad, p.a.grad, p.b.grad

    assert all(torch.equal(again, kept) for again, kept in zip(gradients(True), gradients(False), strict=True))


def test_residuals_are_those_of_autograd():
    """x + block(x) in one function, or with x handed on: the bits of two additions."""
    gate, up, down, other = projection(96, 64, 0), projection(96, 64, 1), projection(64, 96, 2), projection(64, 64, 3)
    parts = [part for p in (gate, up, down, other) for part in p.adapter]
    grad = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(7)).bfloat16()
    for norm in (Norm(torch.rand(64, generator=torch.Generator().manual_seed(5)), 1e-5), None):
        x, found = inputs(64).requires_grad_(), []
        y, same = project(x, [other], norm, pass_on=True)
        for sum_of in ({"x": same + y}, {"x": same, "delta": y}):
            together = gated_mlp(gate=gate, up=up, down=down, activation="silu", norm=norm, residual=True, **sum_of)
            found.append((together, torch.autograd.grad(together, [x, *parts], grad, retain_graph=True)))
        middle = x + project(x, [other], norm)[0]
        apart = middle + gated_mlp(middle, gate, up, down, "silu", norm)
        want = torch.autograd.grad(apart, [x, *parts], grad)
        for together, grads in found:
            assert torch.equal(together, apart)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(grads, want, strict=True))


@pytest.mark.parametrize("residual", [False, True])
def test_the_last_product_is_not_run_again(monkeypatch, residual):
    """Under checkpointing, with the same bits."""
    gate, up, down = projection(96, 64, 0), projection(96, 64, 1), projection(64, 96, 2)
    x, widths, run = inputs(64).requires_grad_(), [], native.scaled_mm

    def record(a, b, *options):
        widths.append(b.shape[0])
        return run(a, b, *options)

    def block(x):
        return gated_mlp(x, gate, up, down, "silu", Norm(torch.ones(64), 1e-5), residual=residual)

    parts = [x, *(part for p in (gate, up, down) for part in p.adapter)]
    want = torch.autograd.grad(block(x).sum(), parts)
    monkeypatch.setattr(native, "scaled_mm", record)
    y = checkpoint(block, x, use_reentrant=False)
    assert widths == [96, 96, 64]
    found = torch.autograd.grad(y.sum(), parts)
    assert widths[3:] == [96, 96, 96, 64], "gate and up again, then the gradients of both inputs"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, want, strict=True))


@pytest.mark.parametrize("power", [-24, 24])
def test_gradients_scale_with_the_loss(power):
    """2**24 times the loss: 2**24 times the gradients, bit for bit."""

    def gradients(factor):
        gate, up, down = projection(96, 64, 0), projection(96, 64, 1), projection(64, 96, 2)
        x = inputs(64).requires_grad_()
        y = gated_mlp(x, gate, up, down, "silu", Norm(torch.ones(64), 1e-5))
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).bfloat16() * factor)
        return [x.grad, *(part.grad for p in (gate, up, down) for part in p.adapter)]

    for mine, plain in zip(gradients(2.0**power), gradients(1.0), strict=True):
        assert torch.equal(mine.float(), plain.float() * 2.0**power)


def test_a_gradient_of_zeros():
    """What LoRA's zero-initialised B makes of the gradients below: zeros, not NaN."""
    p, x = projection(48, 64, 0), inputs(64).requires_grad_()
    (y,) = project(x, [p], Norm(torch.ones(64), 1e-5))
    y.backward(torch.zeros_like(y))
    assert not x.grad.any() and not p.a.grad.any() and not p.b.grad.any()


def test_no_tokens():
    p, x = projection(48, 64, 0), inputs(64)[:0].requires_grad_()
    (y,) = project(x, [p])
    y.sum().backward()
    assert y.shape == (0, 5, 48) and x.grad.shape == (0, 5, 64) and not p.a.grad.any()


def in_groups(x):
    """`rounded` as weights per block take it: through E4M3 per group of 128."""
    flat = x.detach().float().flatten(0, -2)
    return x + (dequantize_ref(quantize_ref(flat, E4M3, PerGroup(128))).reshape(x.shape).double() - x).detach()


@pytest.mark.parametrize("granularity", [PerRow(), PerBlock(128, 128)], ids=str)
def test_adapters_on_some_of_a_group(granularity):
    """Of different ranks and scalings; the one without takes the codes without the columns of the others."""
    ranks = (4, 0, 9)
    projections = [projection(128, 256, i, rank, granularity=granularity) for i, rank in enumerate(ranks)]
    projections[2] = replace(projections[2], scaling=3.0)
    x = inputs(256).requires_grad_()
    wide = x.detach().double().requires_grad_()
    seen = (rounded if granularity == PerRow() else in_groups)(wide)
    parameters = [part for p in projections for part in p.adapter if part is not None]
    compare(project(x, projections), [oracle(p, seen) for p in projections], x, wide, parameters)


@pytest.mark.parametrize("rank", [0, 4, 60])
def test_projections_per_block(rank):
    k, block = 256, PerBlock(128, 128)
    projections = [projection(n, k, seed, rank, granularity=block) for seed, n in enumerate((256, 128))]
    norm = Norm(torch.rand(k, generator=torch.Generator().manual_seed(5)).bfloat16(), 1e-5, from_codes=True)
    x = inputs(k).requires_grad_()
    wide = x.detach().double().requires_grad_()
    seen = in_groups(F.rms_norm(wide, (k,), norm.weight.double(), norm.epsilon))
    parameters = [part for p in projections for part in p.adapter if part is not None]
    compare(project(x, projections, norm), [oracle(p, seen) for p in projections], x, wide, parameters)


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("granularity", [PerRow(), PerBlock(128, 128)], ids=str)
def test_gated_mlp_whose_adapters_drop(granularity, rate):
    """Its two inputs drop different values."""
    k, n = 128, 256
    parts = (projection(*shape, i, granularity=granularity) for i, shape in enumerate(((n, k), (n, k), (k, n))))
    gate, up, down = (replace(p, dropout=rate) for p in parts)
    round_input = rounded if granularity == PerRow() else in_groups
    x = inputs(k).requires_grad_()
    wide = x.detach().double().requires_grad_()
    first, last = dropping(rate, k, n)
    seen = round_input(wide)
    want = oracle(down, round_input(F.silu(oracle(gate, seen, first)) * oracle(up, seen, first)), last)
    compare_mlp(gated_mlp(x, gate, up, down, "silu"), want, x, wide, (gate, up, down))


@pytest.mark.parametrize(
    ("granularity", "k"),
    [(PerRow(), 64), (PerRow(), 256), (PerBlock(128, 128), 256)],
    ids=["added", "columns", "blocks"],
)
@pytest.mark.parametrize("normed", ["", "codes"], ids=["plain", "norm-from-codes"])
def test_dropout_of_projections(normed, granularity, k):
    """One projection without an adapter; what is dropped is dropped in dX and dA, too, and only of the adapters."""
    block = granularity != PerRow()
    projections = [projection(128, k, i, rank, granularity=granularity) for i, rank in enumerate((4, 0, 9))]
    projections = [replace(p, dropout=0.25 if p.a is not None else 0.0) for p in projections]
    norm = norm_of(normed, k)
    x = inputs(k).requires_grad_()
    wide = x.detach().double().requires_grad_()
    seen = (in_groups if block else rounded)(F.rms_norm(wide, (k,), norm.weight.double(), 1e-5) if norm else wide)
    parameters = [part for p in projections for part in p.adapter if part is not None]
    (stays,) = dropping(0.25, k)
    assert 0.2 < 1 - stays.mean() < 0.3
    compare(project(x, projections, norm), [oracle(p, seen, stays) for p in projections], x, wide, parameters)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_codes_of_a_are_kept_for_columns_of_dx(dropout):
    """Which it has no more with dropout."""
    kept, p = [], replace(projection(256, 128, 0), dropout=dropout)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        project(inputs(128).requires_grad_(), [p])
    codes = [tuple(tensor.shape) for tensor in kept if tensor.dtype == torch.uint8]
    assert codes == [(15, 128)] + ([] if dropout else [(128, 128)])


def test_dropout_under_checkpointing():
    """What is dropped comes from the generator that checkpointing sets back, the same when it is run again."""
    p = replace(projection(48, 64, 0), dropout=0.25)
    x, results = inputs(64).requires_grad_(), []
    for run in (lambda: project(x, [p])[0], lambda: checkpoint(lambda x: project(x, [p])[0], x, use_reentrant=False)):
        torch.manual_seed(11)
        y = run()
        torch.rand(1)  # what follows in the forward pass
        y.float().square().sum().backward()
        results.append((y, x.grad, p.a.grad, p.b.grad))
        x.grad = p.a.grad = p.b.grad = None
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*results, strict=True))
    assert not torch.equal(project(x, [p])[0], results[0][0]), "the next call drops others"


def test_rates_of_one_input_must_agree():
    parts = [replace(projection(48, 64, i), dropout=rate) for i, rate in enumerate((0.25, 0.5))]
    with pytest.raises(ValueError, match=r"rates \[0.25, 0.5\]"):
        project(inputs(64), parts)


def test_second_derivatives_are_an_error():
    """A gradient of a gradient would lack what the functions' own backward rounds away: every one of them refuses."""
    for module in pkgutil.iter_modules(octavo.ops.__path__, "octavo.ops."):
        importlib.import_module(module.name)
    ours = [kind for kind in torch.autograd.Function.__subclasses__() if kind.__module__.startswith("octavo.ops.")]
    assert {"_Project", "_GatedMlp"} < {kind.__name__ for kind in ours}
    assert all(hasattr(kind.backward, "__wrapped__") for kind in ours), "once_differentiable"
    x, parts = inputs(32).requires_grad_(), [projection(48, 32, 1), projection(48, 32, 2), projection(32, 48, 3)]
    for y in (*project(x, parts[:2]), gated_mlp(x, *parts, "silu")):
        (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            dx.float().square().sum().backward()
