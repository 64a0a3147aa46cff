"""The fused forward of a decoder layer against the same modules one by one; on the CPU, whose products run as well."""

import copy
import pickle

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import octavo
from octavo import Recipe, convert
from octavo.base.errors import UnsupportedError
from octavo.integrations import fused
from octavo.integrations.drop_in import fuse_in_training
from octavo.integrations.layers import GATED, decoder
from octavo.integrations.peft import register
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.testing import sqnr_db

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "tie_word_embeddings": False}
WHOLE_BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 4}
SPARSE = {"mixtral": {"num_local_experts": 4}, "qwen2_moe": {}, "qwen3_moe": {}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "ministral": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {"pad_token_id": 0},
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "gemma": {"pad_token_id": 0},
    "gemma2": {"pad_token_id": 0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"pad_token_id": 0, "query_pre_attn_scalar": 16},
    **{family: EXPERTS | own for family, own in SPARSE.items()},
}


PADDED = ("phi3", "cohere", "modernbert-decoder")
OTHERS = {"olmo2": {}, "gpt_neox": {}} | {family: {"pad_token_id": 0} for family in PADDED}


def build(family="llama", activation="token", dropout=0.0, scheme="channel", sizes=None, targets=None, ours=False):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | {**FAMILIES, **OTHERS}[family] | (sizes or {})))
    attention = "eager" if family == "gemma2" else "sdpa"  # Transformers has no SDPA for soft caps
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            if name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) / 50)
    model = convert(model, Recipe.named(scheme, activation=activation))
    targets = targets or ["q_proj", "k_proj", "v_proj", "o_proj", *([] if family in SPARSE else GATED)]
    return adapted(model, "all-linear" if family in OTHERS else targets, dropout, ours)


def adapted(model, targets, dropout=0.0, ours=False):
    """By PEFT's own get_peft_model, over a model as `octavo.load` leaves it. ours: with layers that can merge."""
    fuse_in_training(model)
    config = LoraConfig(r=4, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM")
    model = get_peft_model(model, register(config) if ours else config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) / 100)
    return model.train()


def bound(model):
    """As after a step of training."""
    assert fused.fuse(decoder(model)) == 2
    return model


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
        record = lambda *args, run=run, name=name, **options: calls.append(name) or run(*args, **options)  # noqa: E731
        monkeypatch.setattr(fused, name, record)
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


def unquantized(model):
    """A step whose linears take their inputs as they are: what both ways of rounding them are near to."""
    layers = [module for module in model.modules() if isinstance(module, FrozenFloat8Linear)]
    for layer in layers:
        layer.activation = "none"
    result = step(model)
    for layer in layers:
        layer.activation = "token"
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_step(everywhere, plain, family):
    """Nearly as near to the step without rounded inputs as the plain layers, which round no gradient, gate or up."""
    model = build(family)
    exact, exact_grads = plain(unquantized, model)
    want, want_grads = plain(step, model)
    assert not everywhere and fused.fuse(decoder(model)) == 0, "the hook did it"
    found, grads = step(model)
    assert everywhere == ["project", "project", *([] if family in SPARSE else ["gated_mlp"])] * 2
    assert sqnr_db(found, exact) > sqnr_db(want, exact) - 3
    assert grads.keys() == want_grads.keys() == exact_grads.keys()
    found, want, exact = (torch.cat([g[name].flatten() for name in grads]) for g in (grads, want_grads, exact_grads))
    assert sqnr_db(found, exact) > max(sqnr_db(want, exact) - 8, 10)


@pytest.mark.parametrize("family", OTHERS)
def test_other_decoders_take_the_layers_one_by_one(everywhere, plain, family):
    model = build(family)
    want, want_grads = plain(step, model)
    found, grads = step(model)
    assert not everywhere and len(grads) >= 8
    assert torch.equal(found, want) and all(torch.equal(grads[name], want_grads[name]) for name in want_grads)


def test_experts_in_fp8_beside_fused_attention(everywhere, plain, tiny_moe):
    """The router stays in 16 bit; the experts' layer is not fused."""
    model = octavo.load(tiny_moe, Recipe.named("channel", activation="token"), device="cpu")
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    assert all(router.weight.dtype == torch.bfloat16 for router in routers)
    assert sum(isinstance(module, FrozenFloat8Experts) for module in model.modules()) == len(routers) == 2
    model = adapted(model, ["q_proj", "k_proj", "v_proj", "o_proj"])
    exact, exact_grads = plain(unquantized, model)
    found, grads = step(model)
    assert everywhere == ["project", "project"] * 2
    assert sqnr_db(found, exact) > 20 and grads.keys() == exact_grads.keys()
    assert all(grad.isfinite().all() for grad in grads.values())


def test_the_language_half_of_a_multimodal_model(everywhere):
    torch.manual_seed(0)
    text = SIZES | FAMILIES["gemma3_text"]
    text.pop("tie_word_embeddings")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = sizes | {"image_size": 16, "patch_size": 8}
    special = {"image_token_index": 127, "boi_token_index": 125, "eoi_token_index": 126, "mm_tokens_per_image": 4}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, **special)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model = adapted(convert(model, Recipe.named("channel", activation="token")), ["q_proj", "down_proj"])
    ids = torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids, token_type_ids=torch.zeros_like(ids)).loss.backward()
    assert everywhere == ["project", "project", "gated_mlp"] * 2


@pytest.mark.parametrize("case", ["norm trains", "bias trains", "norm is watched"])
def test_what_the_fused_layers_do_not_give_is_not_lost(everywhere, plain, case):
    """Gradients of norms and biases, and hooks on a norm, are those of the modules one by one."""
    model, seen = build("qwen2"), []
    ends = {"norm trains": "layernorm.weight", "bias trains": "q_proj.base_layer.bias"}
    for name, parameter in model.named_parameters():
        if name.endswith(ends.get(case, "no parameter")):
            parameter.requires_grad_(True)
    if case == "norm is watched":
        for module in model.modules():
            if type(module).__name__ == "Qwen2RMSNorm":
                module.register_forward_hook(lambda module, args, out: seen.append((args[0].detach(), out.detach())))
    _, want = plain(step, model)
    _, found = step(model)
    assert (
        want.keys() == found.keys() and everywhere == ["project", *(["gated_mlp"] if case == "bias trains" else [])] * 2
    )
    assert all(not torch.equal(x, y) for x, y in seen)


@pytest.mark.parametrize(
    "state",
    [
        *("dropout of all", "two rates", "dropout of channels", "dropout in evaluation"),
        *("weights only", "merged", "disabled", "two adapters", "evaluation"),
    ],
)
def test_what_is_not_fused_runs_as_before(everywhere, plain, state):
    model = bound(build(activation="none" if state == "weights only" else "token", ours=True))
    if state == "two adapters":
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        model.base_model.set_adapter(["default", "second"])
    if state == "merged":
        model.merge_adapter()
    if "dropout" in state or state == "two rates":
        for name, module in model.named_modules():
            if hasattr(module, "lora_dropout"):
                rate = 1.0 if state == "dropout of all" else 0.25 if name.endswith(("q_proj", "up_proj")) else 0.5
                kind = torch.nn.Dropout1d if state == "dropout of channels" else torch.nn.Dropout
                module.lora_dropout["default"] = kind(rate).train(state != "dropout in evaluation")
    if state == "evaluation":
        model.eval()

    def logits():
        torch.manual_seed(0)
        with model.disable_adapter() if state == "disabled" else torch.enable_grad(), torch.no_grad():
            return model(input_ids=tokens()).logits

    want, found = plain(logits), logits()
    fuses = {"two rates": 2, "two adapters": 2}.get(state, 6)
    fuses = 0 if state in ("dropout of all", "dropout of channels", "weights only") else fuses
    assert len(everywhere) == fuses
    assert torch.equal(found, want) if not fuses else sqnr_db(found, want) > (12 if state == "two rates" else 20)


def test_dropout_of_the_adapters(everywhere, plain):
    """Fused, other values in every step, none in evaluation; on the average the step without."""
    model = build(dropout=0.25)
    torch.manual_seed(2)
    logits, grads = zip(*(step(model) for _ in range(64)), strict=True)
    assert len(everywhere) == 64 * 6 and not torch.equal(logits[0], logits[1])
    mean = {name: torch.stack([grad[name] for grad in grads]).mean(0) for name in grads[0]}
    model.eval()
    torch.manual_seed(2)
    found = model(input_ids=tokens()).logits
    assert torch.equal(found, model(input_ids=tokens()).logits)
    assert sqnr_db(torch.stack(logits).mean(0), found) > 30 > sqnr_db(logits[0], found)
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout.train()
    assert not torch.equal(found, model(input_ids=tokens()).logits), "dropout in a model in evaluation"
    for module in model.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = torch.nn.Identity()
    _, want = step(model.train())
    found, want = (torch.cat([g[name].flatten() for name in want]) for g in (mean, want))
    assert sqnr_db(found, want) > 10


def test_a_graph_would_drop_the_same_for_ever(everywhere, monkeypatch):
    """While one is captured, layers with dropout are not fused."""
    model, other = build(dropout=0.25), build()
    monkeypatch.setattr(fused, "_captured", lambda x: True)
    step(model)
    assert not everywhere
    step(other)
    assert len(everywhere) == 6


def test_layers_run_again_drop_the_same(everywhere):
    model = build(dropout=0.25)
    torch.manual_seed(2)
    want, want_grads = step(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    torch.manual_seed(2)
    found, grads = step(model)
    assert len(everywhere) == 6 + 12
    assert torch.equal(found, want) and all(torch.equal(grads[name], want_grads[name]) for name in want_grads)


def test_named_adapters_per_row_are_peft_s(plain):
    """PEFT passes adapter_names to each layer, after the norm has passed its input on."""
    model = bound(build()).eval()
    names = ["default", "__base__"]
    with torch.no_grad():
        want = plain(model, input_ids=tokens(), adapter_names=names).logits
        assert sqnr_db(model(input_ids=tokens(), adapter_names=names).logits, want) > 20


def as_exchanged(model, how):
    """The model after PEFT exchanged modules of layers that are bound."""
    if how == "merged and unloaded":
        return model.merge_and_unload()
    if how == "unloaded, adapted again":
        return adapted(model.unload(), ["k_proj", "up_proj"])
    config = LoraConfig(r=2, target_modules=["k_proj", "up_proj"], task_type="CAUSAL_LM")
    if how == "another norm trains":
        config.target_modules, config.modules_to_save = ["q_proj"], ["post_attention_layernorm", "input_layernorm"]
    model.add_adapter("second", config)
    model.set_adapter("second")
    for name, parameter in model.named_parameters():
        if "lora_B.second" in name or "modules_to_save.second" in name:
            parameter.data.add_(torch.randn_like(parameter) / 100)
    return model


@pytest.mark.parametrize(
    "how", ["merged and unloaded", "unloaded, adapted again", "another adapter", "another norm trains"]
)
def test_modules_that_peft_exchanges(everywhere, plain, how):
    """Whoever skips a norm knows who does its work now, and every adapter has its gradient."""
    torch.manual_seed(0)
    model = build(targets=["q_proj", "down_proj"], ours=True)
    step(model)
    model = as_exchanged(model, how)
    everywhere.clear()
    if how == "merged and unloaded":
        model.get_input_embeddings().requires_grad_(True)
    found, grads = step(model)
    assert everywhere == (["project"] * 2 if how == "another norm trains" else ["project", "project", "gated_mlp"] * 2)
    want, want_grads = plain(step, model)
    assert sqnr_db(found, want) > 20 and grads.keys() == want_grads.keys()
    near = {name: sqnr_db(grads[name], want_grads[name]) for name in want_grads if want_grads[name].any()}
    assert min(near.values()) > 12, near
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(step(again)[0], found)


def test_a_projection_called_by_itself(everywhere):
    """Its input has not come through the norm, which nobody skips then."""
    model = bound(build())
    layer = model.base_model.model.model.layers[0]
    x = torch.randn(1, 3, 64, dtype=torch.bfloat16)
    want = type(layer.self_attn.k_proj).forward(layer.self_attn.k_proj, x)
    assert torch.equal(layer.self_attn.k_proj(x), want) and not everywhere


def test_a_copy_stands_alone(everywhere):
    model = bound(build())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.is_floating_point():
                parameter.zero_()
        assert model(input_ids=tokens()).logits.any() and not other(input_ids=tokens()).logits.any()


def test_hooks_see_what_they_always_saw(plain):
    """An observer of a projection's input gets the normalized values, not what the fused norm passed on."""
    model, seen = bound(build()), []
    layer = model.base_model.model.model.layers[1]
    for module in (layer.self_attn.k_proj, layer.mlp.up_proj):
        module.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    with torch.no_grad():
        plain(model, input_ids=tokens())
        model(input_ids=tokens())
    assert len(seen) == 4 and all(sqnr_db(mine, want) > 20 for mine, want in zip(seen[2:], seen[:2], strict=True))


def test_what_accelerate_wraps_stays_wrapped(everywhere):
    """A model on several devices: its hooks move the inputs of layers and linears."""
    model, seen = build().unload(), []

    class Hook(ModelHook):
        def pre_forward(self, module, *args, **options):
            seen.append(module)
            return args, options

    first, second = model.model.layers
    hooked = [first, second.self_attn.k_proj, second.post_attention_layernorm]
    for module in hooked:
        add_hook_to_module(module, Hook())
    model.get_input_embeddings().requires_grad_(True)
    everywhere.clear()
    step(model.train())
    assert all(module in seen for module in hooked) and everywhere == ["project", "project", "gated_mlp", "project"]


def test_a_compiled_model_is_one_graph(everywhere, plain):
    model = bound(build())
    want = plain(model, input_ids=tokens()).logits
    found = torch.compile(model, backend="eager", fullgraph=True)(input_ids=tokens()).logits
    assert not everywhere and torch.equal(found, want)


def test_not_known_not_touched(everywhere):
    assert fused.fuse(torch.nn.Linear(4, 4)) == 0
    model = build()
    model.config.model_type = "unheard-of"
    step(model)
    assert not everywhere and fused.fuse(decoder(model)) == 0


def test_checkpointed_group_frees_what_it_hands_out(everywhere):
    """The group keeps neither its input nor its outputs."""
    model = bound(build())
    layer = model.base_model.model.model.layers[0]
    x = torch.randn(1, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    attention = layer.self_attn

    def run(x):
        return attention.q_proj(x).sum() + attention.k_proj(x).sum() + attention.v_proj(x).sum()

    checkpoint(run, layer.input_layernorm(x), use_reentrant=False).backward()
    group = layer.__dict__[fused.FUSED].groups[0]
    assert x.grad.any() and not group.outputs


def test_a_model_made_in_inference_mode(everywhere, plain):
    with torch.inference_mode():
        model = bound(build()).eval()
        assert sqnr_db(model(input_ids=tokens()).logits, plain(model, input_ids=tokens()).logits) > 20
    assert len(everywhere) == 6


def test_inputs_on_another_device(everywhere):
    """As nn.DataParallel makes them: its copies of modules share what was bound to the first."""
    layer = decoder(bound(build())).layers[0].self_attn.o_proj
    layer.base_layer.to("meta")
    with pytest.raises(UnsupportedError, match=r"inputs on cpu, weights on meta.*start it with torchrun"):
        layer(torch.zeros(2, 64, dtype=torch.bfloat16))


def test_a_norms_weight_is_asked_once(monkeypatch):
    """Whether its codes suffice: again only when it is another one, or changed."""
    asked = []
    monkeypatch.setattr(fused, "codes_suffice", lambda weight: asked.append(weight) or not weight[:16].eq(0).all())
    norm = torch.nn.RMSNorm(64, eps=1e-6)
    assert fused.norm_of(norm).from_codes and fused.norm_of(norm).from_codes and len(asked) == 1
    assert fused.norm_of(copy.deepcopy(norm)).from_codes and len(asked) == 2
    with torch.no_grad():
        norm.weight[:16] = 0
    assert not fused.norm_of(norm).from_codes and len(asked) == 3


def test_weights_per_block(everywhere, plain, monkeypatch):
    """Blocks of 128 x 128 with inputs per group; a number of tokens that cuBLAS does not take goes layer by layer."""
    monkeypatch.setattr(fused, "blocks_run", lambda shape, device: everywhere.on)
    model = build(scheme="block128", activation="group128", sizes=WHOLE_BLOCKS)
    ids = tokens()[:, :8]
    want = plain(model, input_ids=ids).logits
    assert not everywhere
    found = model(input_ids=ids)
    found.logits.sum().backward()
    assert everywhere == ["project", "project", "gated_mlp"] * 2
    assert sqnr_db(found.logits.detach(), want) > 20
    model(input_ids=tokens()[:1])
    assert len(everywhere) == 6, "nine tokens"


def test_residuals_inside_the_blocks(everywhere, monkeypatch):
    """In training the layers hand their input on: the same bits as layers that do not."""
    model, passed, run = build().train(), [], fused.gated_mlp

    def record(*args, residual=False, **options):
        passed.append(residual)
        return run(*args, residual=residual, **options)

    monkeypatch.setattr(fused, "gated_mlp", record)
    found, grads = step(model)
    with monkeypatch.context() as patch:
        patch.setattr(fused._PlainLayer, "__call__", lambda self, x, *args, **options: self.plain(x, *args, **options))
        want, want_grads = step(model)
    model.eval()
    step(model)
    assert passed == [True, True, False, False, False, False]
    assert torch.equal(found, want) and all(torch.equal(grads[name], want_grads[name]) for name in want_grads)


def test_a_hook_on_a_block_sees_its_own_result(everywhere):
    model, seen = build().train(), []
    mlp = model.base_model.model.model.layers[0].mlp
    handle = mlp.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    want, _ = step(model)
    assert len(seen) == 1 and sqnr_db(seen[0][1], seen[0][0]) < 3, "not with the residual in it"
    handle.remove()
    assert torch.equal(step(model)[0], want)
