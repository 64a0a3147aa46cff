"""Float8Cache in whole models, against the 16-bit cache whose updates round (Float8KVWriter)."""

import pytest
import torch

from octavo.base.errors import ConfigError, MismatchError, UnsupportedError
from octavo.integrations.float8_cache import CodedStates, Float8Cache, attention
from octavo.integrations.measuring import cache_argument, load_base, logits, new_cache
from octavo.modules.kv_cache import Float8KVWriter
from octavo.store.scales import KVScales, Scales
from tests.conftest import TINY
from tests.integrations.test_kv_cache import TOKENS, latent, sliding  # noqa: F401

SCALES = {0: (0.01, 0.002), 1: (0.004, 0.001)}
KINDS = {"one": ("tensor", None), "calibrated": ("tensor", SCALES), "token-head": ("token-head", None)}
PROMPTS = TOKENS[:40].view(2, 20)


def opened(folder, dtype=torch.float32):
    return load_base(folder, None, device="cpu", dtype=dtype).eval()


def both(model, kind):
    """Our cache, and Transformers' own that rounds what it is given."""
    granularity, scales = KINDS[kind]
    ours = Float8Cache(model, scales=scales, granularity=granularity)
    return ours, Float8KVWriter(granularity, scales or {}).watch(new_cache(model))


def generated(model, cache=None, **options):
    torch.manual_seed(0)
    prompts = {
        "input_ids": PROMPTS,
        "attention_mask": torch.ones_like(PROMPTS),
        "max_new_tokens": 12,
        "pad_token_id": 3,
    }
    given = {} if cache is None else {cache_argument(model): cache}
    return model.generate(**{**prompts, "do_sample": False, "eos_token_id": None, **given, **options})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_moe", "sliding", "latent", "tiny_vlm"])
@torch.no_grad()
def test_same_bits_as_a_cache_that_rounds(request, name, kind):
    model = opened(request.getfixturevalue(name))
    ours, rounding = both(model, kind)
    found, want = logits(model, TOKENS, ours), logits(model, TOKENS, rounding)
    assert torch.equal(found, want) and not torch.equal(found, logits(model, TOKENS))
    assert ours.get_seq_length() == len(TOKENS)


@pytest.mark.parametrize("name", ["tiny_llama", "sliding"])
@torch.no_grad()
def test_token_by_token(request, name):
    """Beyond the window and back at the same logits: single tokens, then several at once."""
    model = opened(request.getfixturevalue(name))
    want = logits(model, TOKENS, Float8Cache(model))
    cache, found = Float8Cache(model), []
    for part in TOKENS.split([10, 1, 1, 9, 1, 20, 1, 5]):
        found.append(model(input_ids=part[None], use_cache=True, **{cache_argument(model): cache}).logits[0])
    torch.testing.assert_close(torch.cat(found), want, rtol=1e-3, atol=1e-4)


PADDED = torch.ones_like(PROMPTS)
PADDED[0, :7] = 0
GENERATIONS = {
    "greedy": {},
    "padded": {"attention_mask": PADDED},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("how", GENERATIONS)
@pytest.mark.parametrize("name", ["tiny_llama", "sliding"])
def test_generate(request, name, how):
    model = opened(request.getfixturevalue(name))
    ours, rounding = both(model, "token-head")
    assert torch.equal(generated(model, ours, **GENERATIONS[how]), generated(model, rounding, **GENERATIONS[how]))


@pytest.mark.parametrize("name", ["tiny_llama", "sliding"])
def test_guesses_that_are_taken_back(request, name):
    """Prompt lookup crops the cache where a guess was wrong."""
    model = opened(request.getfixturevalue(name))
    one = {"input_ids": PROMPTS[:1], "attention_mask": torch.ones_like(PROMPTS[:1])}
    want = generated(model, Float8Cache(model), **one)
    assert torch.equal(generated(model, Float8Cache(model), prompt_lookup_num_tokens=3, **one), want)


def test_capacity_made_once(tiny_llama):
    model = opened(tiny_llama)
    cache = Float8Cache(model, capacity=31)
    assert torch.equal(generated(model, cache), generated(model, Float8Cache(model)))
    assert cache.layers[0].storage.kv.keys.shape[2] == 31 and cache.nbytes == 2 * (2 * 2 * 31 * 2 * (16 + 4))


def test_another_batch_after_reset(tiny_llama):
    """Beams make the rows more; a shorter batch follows. What is not yet filled has nothing to take back."""
    model = opened(tiny_llama)
    cache = Float8Cache(model, capacity=40)
    generated(model, cache, num_beams=3)
    for rows in (PROMPTS[:1], PROMPTS):
        cache.reset()
        cache.crop(-3)
        given = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        assert torch.equal(generated(model, cache, **given), generated(model, Float8Cache(model), **given))


@pytest.mark.parametrize("how", ["octavo", "eager"])
def test_a_gradient_is_an_error(tiny_llama, how):
    """It would be zero: codes know nothing of what they were rounded from."""
    model = opened(tiny_llama)
    cache = Float8Cache(model)
    model.set_attn_implementation(how)
    loss = model(input_ids=PROMPTS, labels=PROMPTS, use_cache=True, **{cache_argument(model): cache}).loss
    with pytest.raises(UnsupportedError, match="a gradient through keys or values that were rounded"):
        loss.backward()


def test_a_model_without_attention():
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=4))
    with pytest.raises(UnsupportedError, match=r"nothing of this model; got LinearAttentionLayer; need layers of att"):
        Float8Cache(model)


def test_every_attention_reads_it(tiny_llama):
    """Eager attention knows nothing of codes: they are decoded for it."""
    model = opened(tiny_llama)
    want = generated(model, Float8Cache(model))
    model.set_attn_implementation("eager")
    assert torch.equal(generated(model, Float8Cache(model)), want) and model.config._attn_implementation == "eager"


def test_a_16_bit_cache_is_as_before(tiny_llama):
    model = opened(tiny_llama)
    want = generated(model, new_cache(model))
    Float8Cache(model)
    assert model.config._attn_implementation == "octavo"
    assert torch.equal(generated(model, new_cache(model)), want)


def test_half_the_memory(save_tiny):
    from transformers import LlamaConfig

    sizes = {**TINY, "head_dim": 128, "num_hidden_layers": 1}
    model = opened(save_tiny(LlamaConfig(hidden_size=64, intermediate_size=64, **sizes), "wide"), torch.bfloat16)
    prompt = torch.randint(4, 260, (1, 256))
    for cache, most in ((Float8Cache(model), 0.52), (Float8Cache(model, granularity="tensor"), 0.501)):
        model(input_ids=prompt, use_cache=True, **{cache_argument(model): cache})
        assert cache.nbytes <= most * 2 * 256 * 2 * 128 * 2


def test_scales_json(tiny_llama, tmp_path):
    model = opened(tiny_llama)
    kv = {
        f"model.layers.{i}.self_attn": KVScales(k_scale=k, v_scale=v, k_amax=1, v_amax=1)
        for i, (k, v) in SCALES.items()
    }
    scales = Scales(model_fingerprint="x", data_fingerprint="y", samples=1, tokens=1, modules={}, kv=kv)
    scales.write(tmp_path / "scales.json")
    want = logits(model, TOKENS, Float8Cache(model, scales=SCALES))
    for given in (scales, tmp_path / "scales.json", str(tmp_path / "scales.json")):
        assert torch.equal(logits(model, TOKENS, Float8Cache(model, scales=given)), want)


def test_values_beyond_the_range(tiny_llama):
    """One scale of 1 cuts at 448; a scale for each token and head does not."""
    model = opened(tiny_llama)
    x = torch.linspace(-2000, 2000, 2 * 3 * 16).view(1, 2, 3, 16)
    for granularity, largest in (("tensor", 448.0), ("token-head", 2000.0)):
        _, values = Float8Cache(model, granularity=granularity).update(x, x, 0)
        assert values.abs().max() == pytest.approx(largest, rel=1e-6)


def test_what_cannot_be(tiny_llama):
    model = opened(tiny_llama)
    with pytest.raises(MismatchError, match="scales of other layers"):
        Float8Cache(model, scales={0: (1.0, 1.0)})
    with pytest.raises(ConfigError, match="scale of the keys"):
        Float8Cache(model, scales={0: (0.0, 1.0), 1: (1.0, 1.0)})
    for options in ({"granularity": "channel"}, {"granularity": "token-head", "scales": SCALES}):
        with pytest.raises(ConfigError, match="granularity"):
            Float8Cache(model, **options)
    x = torch.zeros(1, 1, 1, 16)
    with pytest.raises(UnsupportedError, match="attention sinks"):
        attention(model, x, x, x, None, s_aux=x)
    with pytest.raises(UnsupportedError, match="offloading"):
        Float8Cache(model).layers[0].offload()
    with pytest.raises(ConfigError, match="crop"):
        Float8Cache(model).crop(3)


def test_where_it_is_found():
    import octavo
    from octavo.integrations import transformers

    assert octavo.Float8Cache is transformers.Float8Cache is Float8Cache
    with pytest.raises(AttributeError, match="Float4Cache"):
        transformers.Float4Cache  # noqa: B018


def test_coded_states_are_tensors(tiny_llama):
    cache = Float8Cache(opened(tiny_llama))
    keys, values = cache.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16) * 2, 0)
    assert isinstance(keys, CodedStates) and keys.shape == (1, 2, 3, 16) and keys.dtype == torch.float32
    assert (keys + values).eq(3).all() and type(keys + 1) is torch.Tensor
