"""FrozenFloat8Linear: the codes and scales survive everything that is done to a model."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import E5M2, FrozenFloat8Linear, PerBlock, PerGroup, PerRow, PerTensor, Rule
from octavo.base.errors import ConfigError, ShapeError
from octavo.formats.reference import dequantize_ref
from octavo.testing import FLOOR_DB, assert_sqnr

GRANULARITIES = [PerTensor(), PerRow(), PerGroup(128), PerBlock(128, 128)]
granularities = pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)


def layer(granularity=None, activation="token", bias=True, dtype=torch.bfloat16):
    torch.manual_seed(0)
    source = nn.Linear(136, 200, bias=bias, dtype=dtype)
    input_scale = 0.01 if activation == "static" else None
    return FrozenFloat8Linear.from_linear(
        source, Rule(granularity=granularity or PerRow()), activation, input_scale=input_scale
    )


def contents(module):
    """The frozen bytes, as a comparable value."""
    names = ("weight", "weight_scale", "input_scale")
    tensors = {n: getattr(module, n) for n in names if getattr(module, n) is not None}
    return {
        n: (t.dtype, tuple(t.shape), t.detach().cpu().contiguous().view(torch.uint8).tolist())
        for n, t in tensors.items()
    }


@granularities
def test_forward_backward_and_views(granularity):
    module = layer(granularity, "none")
    x = torch.randn(2, 7, 136, requires_grad=True)
    w = dequantize_ref(module.scaled())
    y = module(x)
    y.backward(grad := torch.randn(2, 7, 200))
    want = x.detach() @ w.T + module.bias.float()
    assert_sqnr(y.detach(), want, FLOOR_DB["rounding", "float32"])
    assert_sqnr(x.grad, grad @ w, FLOOR_DB["rounding", "float32"])
    assert module.weight.grad is None and module.weight_scale.grad is None
    assert torch.equal(module.dequantize(torch.float32), w)
    assert module.dequantize().dtype == torch.bfloat16
    assert module.scaled().codes.data_ptr() == module.weight.data_ptr(), "scaled() must not copy"


@pytest.mark.parametrize("activation", ["none", "token"])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64), (64,)], ids=str)
def test_its_output_may_be_written_in_place(shape, activation):
    """As nn.Linear's may: some models, and adapters of PEFT, add to it."""
    layer = FrozenFloat8Linear.from_linear(nn.Linear(64, 48), activation=activation)
    x = torch.randn(shape, requires_grad=True)
    (want,) = torch.autograd.grad((layer(x) + 1).sum(), x)
    y = layer(x)
    y += 1
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, want) and not y._is_view()


def test_it_is_a_linear_to_peft():
    module = layer()
    assert isinstance(module, nn.Linear) and module.weight.dtype == torch.uint8
    assert (module.in_features, module.out_features) == (136, 200)
    assert module.compute_dtype == torch.bfloat16 == FrozenFloat8Linear.compute_dtype
    assert repr(module) == (
        "FrozenFloat8Linear(in_features=136, out_features=200, bias=True, rule=e4m3 row, activation=token)"
    )


def test_memory_is_half_of_16_bit():
    module = layer(bias=False)
    held = sum(p.numel() * p.element_size() for p in module.parameters())
    assert 200 * 136 * 2 / held > 1.9


MOVES = {
    "to(bfloat16)": lambda m: m.to(torch.bfloat16),
    "to(float16)": lambda m: m.to(torch.float16),
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "type(float16)": lambda m: m.type(torch.float16),
    "to(cpu)": lambda m: m.to("cpu"),
    "cpu": lambda m: m.cpu(),
    "to(like)": lambda m: m.to(torch.zeros(1, dtype=torch.float16)),
    "deepcopy": copy.deepcopy,
    "share_memory": lambda m: m.share_memory(),
    "requires_grad_": lambda m: m.requires_grad_(True),
    "train": lambda m: m.train(),
    "state_dict": lambda m: reloaded(m, assign=False),
    "state_dict, assign": lambda m: reloaded(m, assign=True),
    "meta and back": lambda m: back_from_meta(m),
}


def reloaded(module, assign):
    fresh = FrozenFloat8Linear(136, 200, True, rule=module.rule, activation=module.activation)
    fresh.load_state_dict(module.state_dict(), assign=assign)
    return fresh


def back_from_meta(module):
    state = {name: value.clone() for name, value in module.state_dict().items()}
    meta = copy.deepcopy(module).to("meta")
    assert all(p.is_meta for p in meta.parameters())
    empty = meta.to_empty(device="cpu")
    empty.load_state_dict(state)
    return empty


@pytest.mark.parametrize("activation", ["none", "static"])
@granularities
@pytest.mark.parametrize("move", MOVES)
def test_codes_and_scales_survive(move, granularity, activation):
    module = layer(granularity, activation)
    before, order = contents(module), list(module.state_dict())
    moved = MOVES[move](nn.Sequential(module))[0] if not move.startswith(("state", "meta")) else MOVES[move](module)
    assert contents(moved) == before
    assert list(moved.state_dict()) == order
    for name in ("weight", "weight_scale", "input_scale"):
        parameter = getattr(moved, name)
        assert parameter is None or (isinstance(parameter, nn.Parameter) and not parameter.requires_grad)
    assert moved.requires_grad_(True).weight_scale.requires_grad is False


def test_dtype_reaches_the_bias_and_the_compute_dtype():
    module = layer().half()
    assert module.bias.dtype == torch.float16 == module.compute_dtype
    assert module.to("cpu").compute_dtype == torch.float16
    assert FrozenFloat8Linear.compute_dtype == torch.bfloat16


def test_thawing_the_whole_model_trains_what_is_float():
    """requires_grad_(True) on a model is legal: embeddings, norms and biases train, codes and scales stay frozen."""
    model = nn.Sequential(nn.Linear(16, 136), layer(dtype=torch.float32)).requires_grad_(True)
    before = contents(model[1])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()
    assert contents(model[1]) == before
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {"0.weight", "0.bias", "1.bias"}


@granularities
def test_saves_through_safetensors(granularity, tmp_path):
    module = layer(granularity, "static")
    save_file(module.state_dict(), tmp_path / "m.safetensors")
    fresh = FrozenFloat8Linear(136, 200, True, rule=module.rule, activation="static")
    fresh.load_state_dict(load_file(tmp_path / "m.safetensors"))
    assert contents(fresh) == contents(module)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_of_a_file_holds_float8(assign):
    module = layer()
    state = module.state_dict()
    state["weight"] = state["weight"].view(torch.float8_e4m3fn)
    fresh = FrozenFloat8Linear(136, 200, True, activation="token")
    fresh.load_state_dict(state, assign=assign)
    assert contents(fresh) == contents(module)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["weight", "weight_scale"])
def test_wrong_dtypes_are_refused_and_nothing_is_lost(name, assign):
    module = layer()
    before = contents(module)
    state = {**module.state_dict(), name: torch.ones(200, 136 if name == "weight" else 1, dtype=torch.bfloat16)}
    with pytest.raises(RuntimeError, match=f"{name}: got torch.bfloat16; need torch"):
        module.load_state_dict(state, assign=assign)
    assert contents(module) == before
    e5m2 = {**module.state_dict(), "weight": module.weight.detach().view(torch.float8_e5m2)}
    with pytest.raises(RuntimeError, match=r"float8_e5m2; need torch\.uint8"):
        module.load_state_dict(e5m2)


def test_scale_of_one_tensor_loads_from_any_spelling():
    module = layer(PerTensor())
    for shape in ((), (1,)):
        state = {**module.state_dict(), "weight_scale": torch.full(shape, 0.5)}
        module.load_state_dict(state)
        assert module.scaled().scale.shape == () and float(module.weight_scale) == 0.5


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant):
    module = layer(dtype=torch.float32)
    x = torch.randn(5, 136, requires_grad=True)
    module(x).square().sum().backward()
    want, x.grad = x.grad, None
    checkpoint(module, x, use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(x.grad, want)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("activation", ["none", "token", "static"])
@granularities
def test_compiles_without_a_break(granularity, activation, backend):
    torch._dynamo.reset()
    module = layer(granularity, activation, dtype=torch.float32)
    model = nn.Sequential(module, nn.SiLU(), FrozenFloat8Linear.from_linear(nn.Linear(200, 24)))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = torch.randn(3, 136, requires_grad=True)
    want = torch.autograd.grad(model(x).square().sum(), x)[0]
    found = torch.autograd.grad(compiled(x).square().sum(), x)[0]
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_autocast_and_mixed_dtypes():
    module = layer()
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert module(torch.randn(2, 136, dtype=dtype)).dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.randn(2, 136)).dtype == torch.bfloat16


def test_a_cast_scale_is_an_error_and_not_a_small_loss():
    """What FSDP2's mixed precision does to float32 parameters, 0.4 % at most, and unnoticed."""
    module = layer()
    module.weight_scale = nn.Parameter(module.weight_scale.detach().bfloat16(), requires_grad=False)
    with pytest.raises(ConfigError, match="ignored_params"):
        module(torch.randn(2, 136))


def test_from_scaled_holds_the_tensors_it_is_given():
    q = octavo.quantize(torch.randn(24, 40), Rule(E5M2, PerBlock(16, 16)))
    module = FrozenFloat8Linear.from_scaled(q, dtype=torch.float16)
    assert module.weight.data_ptr() == q.codes.data_ptr() and module.compute_dtype == torch.float16
    assert module.rule == Rule(E5M2, PerBlock(16, 16)) and module.activation == "none"
    module.reset_parameters()
    assert not module.dequantize().any()


def test_static_scale_reaches_the_input():
    module = layer(activation="static", bias=False)
    x = torch.full((1, 136), 100.0)
    assert_sqnr(
        module(x), module(torch.full((1, 136), 4.48)), FLOOR_DB["rounding", "float32"], "saturates at 448 * 0.01"
    )


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: FrozenFloat8Linear(4, 4, activation="dynamic"), ConfigError, "activation mode 'dynamic' is unknown"),
        (lambda: FrozenFloat8Linear.from_linear(nn.Linear(4, 4), activation="static"), ConfigError, "Calibrate"),
        (lambda: FrozenFloat8Linear.from_linear(nn.Linear(4, 4), input_scale=1.0), ConfigError, "an input_scale"),
        (lambda: FrozenFloat8Linear.from_scaled(octavo.quantize(torch.ones(2, 3, 4))), ShapeError, r"\[2, 3, 4\]"),
    ],
    ids=["mode", "no scale", "needless scale", "3-D"],
)
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()
