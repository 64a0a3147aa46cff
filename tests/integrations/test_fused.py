"""The fused forward of a decoder layer against the same modules one by one; on the CPU, whose products run as well."""

import copy

import pytest
import torch
from peft import LoraConfig
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from octavo import Recipe, convert
from octavo.integrations import fused
from octavo.integrations.peft import get_peft_model
from octavo.testing import sqnr_db

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "tie_word_embeddings": False}
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]


def build(family="llama", activation="token", dropout=0.0):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            if name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) / 50)
    model = convert(model, Recipe.named("channel", activation=activation))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_dropout=dropout))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) / 100)
    return model.train()


class Calls(list):
    """What was fused; nothing is while `on` is False."""

    on = True


@pytest.fixture
def everywhere(monkeypatch):
    """FP8 products here, as on a GPU that has them."""
    calls = Calls()
    monkeypatch.setattr(fused, "products_run", lambda shape, device: calls.on)
    for name in ("project", "gated_mlp"):
        run = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *args, run=run, name=name: calls.append(name) or run(*args))
    return calls


@pytest.fixture
def plain(everywhere):
    """The result of a call in which nothing is fused."""

    def run(function, *args, **options):
        everywhere.on = False
        result = function(*args, **options)
        everywhere.on = True
        return result

    return run


def tokens():
    return torch.randint(128, (2, 9), generator=torch.Generator().manual_seed(1))


def step(model):
    """Loss, logits and adapter gradients of one step."""
    model.zero_grad()
    out = model(input_ids=tokens(), labels=tokens())
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_step(everywhere, plain, family):
    model = build(family)
    want, want_grads = plain(step, model)
    assert not everywhere and fused.fuse(model) == 0, "get_peft_model did it"
    found, grads = step(model)
    assert everywhere == ["project", "project", "gated_mlp"] * 2
    assert sqnr_db(found, want) > 20  # the plain path rounds to BF16 before every E4M3
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        cosine = torch.nn.functional.cosine_similarity(grad.flatten(), want_grads[name].flatten(), dim=0)
        assert cosine > 0.995, f"{name}: {cosine:.4f}"


def test_checkpointing_changes_nothing(everywhere):
    model = build()
    want, want_grads = step(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    found, grads = step(model)
    assert torch.equal(found, want) and all(torch.equal(grads[name], want_grads[name]) for name in want_grads)
    assert len(everywhere) == 6 + 12


def plainly(model):
    """Logits of the modules as they are without `fuse`."""
    with torch.no_grad():
        return model(input_ids=tokens()).logits


@pytest.mark.parametrize("state", ["dropout", "weights only", "merged", "disabled", "two adapters", "evaluation"])
def test_what_is_not_fused_runs_as_before(everywhere, plain, state):
    model = build(activation="none" if state == "weights only" else "token")
    if state == "two adapters":
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        model.base_model.set_adapter(["default", "second"])
    if state == "merged":
        model.merge_adapter()
    if state == "dropout":
        for module in model.modules():
            if hasattr(module, "lora_dropout"):
                module.lora_dropout["default"] = torch.nn.Dropout(0.5)
    if state == "evaluation":
        model.eval()

    def logits():
        torch.manual_seed(0)
        with model.disable_adapter() if state == "disabled" else torch.enable_grad(), torch.no_grad():
            return model(input_ids=tokens()).logits

    want, found = plain(logits), logits()
    fuses = {"dropout": 0, "weights only": 0, "two adapters": 2}.get(state, 6)
    assert len(everywhere) == fuses
    assert torch.equal(found, want) if not fuses else sqnr_db(found, want) > 20


def test_named_adapters_per_row_are_peft_s(plain):
    """PEFT passes adapter_names to each layer, after the norm has passed its input on."""
    model = build().eval()
    names = ["default", "__base__"]
    with torch.no_grad():
        want = plain(model, input_ids=tokens(), adapter_names=names).logits
        assert sqnr_db(model(input_ids=tokens(), adapter_names=names).logits, want) > 20


def test_a_copy_stands_alone(everywhere):
    model = build()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.is_floating_point():
                parameter.zero_()
        assert model(input_ids=tokens()).logits.any() and not other(input_ids=tokens()).logits.any()


def test_hooks_see_what_they_always_saw(plain):
    """An observer of a projection's input gets the normalized values, not what the fused norm passed on."""
    model, seen = build(), []
    layer = model.base_model.model.model.layers[1]
    for module in (layer.self_attn.k_proj, layer.mlp.up_proj):
        module.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    with torch.no_grad():
        plain(model, input_ids=tokens())
        model(input_ids=tokens())
    assert len(seen) == 4 and all(sqnr_db(mine, want) > 20 for mine, want in zip(seen[2:], seen[:2], strict=True))


def test_a_compiled_model_is_one_graph(everywhere, plain):
    model = build()
    want = plain(model, input_ids=tokens()).logits
    found = torch.compile(model, backend="eager", fullgraph=True)(input_ids=tokens()).logits
    assert not everywhere and torch.equal(found, want)


def test_not_known_not_touched(everywhere):
    assert fused.fuse(torch.nn.Linear(4, 4)) == 0
    model = build().base_model.model
    for layer in model.model.layers:
        del layer.__dict__[fused.FUSED]
    model.config.model_type = "unheard-of"
    assert fused.fuse(model) == 0


def test_checkpointed_group_frees_what_it_hands_out(everywhere):
    """The group keeps neither its input nor its outputs."""
    model = build()
    layer = model.base_model.model.model.layers[0]
    x = torch.randn(1, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    attention = layer.self_attn

    def run(x):
        return attention.q_proj(x).sum() + attention.k_proj(x).sum() + attention.v_proj(x).sum()

    checkpoint(run, layer.input_layernorm(x), use_reentrant=False).backward()
    group = layer.__dict__[fused.FUSED][0]
    assert x.grad.any() and not group.outputs
