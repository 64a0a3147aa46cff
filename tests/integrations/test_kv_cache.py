"""An FP8 KV cache in whole models, against the same models patched by hand where keys and values are made."""

import sys
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from octavo.base.errors import ConfigError, UnsupportedError
from octavo.formats.granularity import PerRow, PerTensor
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.spec import E4M3
from octavo.integrations.kv_cache import cached_logits
from octavo.integrations.layers import decoder
from octavo.integrations.measuring import load_base, logits
from octavo.modules.kv_cache import Float8KVWriter
from tests.conftest import TINY

TOKENS = torch.randint(4, 260, (48,), generator=torch.Generator().manual_seed(0))


def opened(folder):
    return load_base(folder, None, device="cpu", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def sliding(save_tiny):
    """Gemma 3: layers with a window of 16 tokens, then one that sees all; norms on keys and queries."""
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "sliding_window": 16, "layer_types": kinds}
    return save_tiny(Gemma3TextConfig(**{**TINY, **sizes}), "gemma3")


@pytest.fixture(scope="module")
def latent(save_tiny):
    from transformers import DeepseekV3Config

    mla = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "first_k_dense_replace": 2}
    tiny = {k: v for k, v in TINY.items() if k != "head_dim"} | {"num_key_value_heads": 4}
    return save_tiny(DeepseekV3Config(**tiny, **sizes, **mla, **experts), "deepseek")


def rounded(x, writer, scale):
    granularity = PerRow() if writer.granularity == "token-head" else PerTensor()
    return dequantize_ref(quantize_ref(x, E4M3, granularity, scale=None if scale is None else torch.tensor(scale)))


def patched_logits(model, writer, queries):
    """The rotary embedding hands out rounded keys and queries, v_proj gives rounded values: no cache anywhere."""
    module = sys.modules[type(decoder(model)).__module__]
    rotary, layers = module.apply_rotary_pos_emb, iter(range(99))
    tensor = writer.granularity == "tensor"

    def rotate(q, k, *args, **kwargs):
        layer = next(layers)
        q, k = rotary(q, k, *args, **kwargs)
        scale = writer.scales.get(layer, (1.0, 1.0))[0] if tensor else None
        return (rounded(q, Float8KVWriter(), 1.0) if queries else q), rounded(k, writer, scale)

    def value_hook(layer, width):
        scale = writer.scales.get(layer, (1.0, 1.0))[1] if tensor else None
        return lambda _, __, v: rounded(v.unflatten(-1, (-1, width)), writer, scale).flatten(-2)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, "apply_rotary_pos_emb", rotate))
        for i, layer in enumerate(decoder(model).layers):
            handle = layer.self_attn.v_proj.register_forward_hook(value_hook(i, layer.self_attn.head_dim))
            stack.callback(handle.remove)
        return logits(model, TOKENS)


WRITERS = {
    "one": (Float8KVWriter, False),
    "one, queries": (Float8KVWriter, True),
    "calibrated": (lambda: Float8KVWriter(scales={0: (0.01, 0.002), 1: (0.004, 0.001)}), False),
    "token-head": (lambda: Float8KVWriter("token-head"), False),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_moe", "sliding"])
def test_keys_after_rotary_and_values(request, name, kind):
    model = opened(request.getfixturevalue(name))
    make, queries = WRITERS[kind]
    plain = logits(model, TOKENS)
    got, want = cached_logits(model, TOKENS, make(), queries), patched_logits(model, make(), queries)
    effect = float((want - plain).norm())
    assert effect > 0 and float((got - want).norm()) < 1e-3 * effect
    assert torch.equal(logits(model, TOKENS), plain)  # nothing stays behind


def test_single_layers_alone(tiny_llama):
    model = opened(tiny_llama)
    plain, both = logits(model, TOKENS), cached_logits(model, TOKENS, Float8KVWriter(), True)
    alone = [cached_logits(model, TOKENS, Float8KVWriter(layers={i}), True) for i in range(2)]
    assert len({tuple(x.flatten().tolist()) for x in (plain, both, *alone)}) == 4
    assert torch.equal(cached_logits(model, TOKENS, Float8KVWriter(layers=()), True), plain)


def test_latent_attention_rounds_the_latent_vector(latent):
    """Keys and values are made of the latent vector: rounding it where its norm hands it out is the same thing."""
    model = opened(latent)
    writer = Float8KVWriter(scales={0: (0.01, 0.01), 1: (0.01, 0.01)}, latent=16)
    got = cached_logits(model, TOKENS, writer, False)
    module = sys.modules[type(decoder(model)).__module__]
    name = "apply_rotary_pos_emb_interleave" if model.config.rope_interleave else "apply_rotary_pos_emb"
    rotary = getattr(module, name)

    def rotate(q, k, *args, **kwargs):
        q, k = rotary(q, k, *args, **kwargs)
        return q, rounded(k, writer, 0.01)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, name, rotate))
        for layer in decoder(model).layers:
            norm = layer.self_attn.kv_a_layernorm
            stack.callback(norm.register_forward_hook(lambda _, __, y: rounded(y, writer, 0.01)).remove)
        want = logits(model, TOKENS)
    assert float((got - want).norm()) < 1e-3 * float((want - logits(model, TOKENS)).norm())
    assert sorted(writer.counts) == [0, 1]


def test_a_wrapper_around_a_text_model(tiny_vlm):
    model = opened(tiny_vlm)
    writer = Float8KVWriter()
    assert not torch.equal(cached_logits(model, TOKENS, writer, True), logits(model, TOKENS))
    assert sorted(writer.counts) == [0, 1]


def test_what_cannot_be(save_tiny, tiny_llama):
    from transformers import MambaConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 264, "state_size": 4}
    with pytest.raises(ConfigError, match="keeps no keys and values"):
        cached_logits(opened(save_tiny(MambaConfig(**sizes), "mamba")), TOKENS, Float8KVWriter(), False)
    model = opened(tiny_llama)
    with (
        mock.patch("octavo.integrations.kv_cache._register", lambda name, writer, seen: name),
        pytest.raises(UnsupportedError, match="attention of its own"),
    ):
        cached_logits(model, TOKENS, Float8KVWriter(), True)
