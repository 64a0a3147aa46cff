"""Decoder against Transformers' own generate with the same kind of cache, on the CPU."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from octavo.base.errors import ConfigError, ShapeError, UnsupportedError
from octavo.integrations import decoder_step, decoding
from octavo.integrations.decoding import Decoder
from octavo.integrations.float8_cache import Float8Cache
from octavo.integrations.measuring import cache_argument, load_base, new_cache
from octavo.integrations.transformers import load
from octavo.modules.frozen import FrozenFloat8Linear
from tests.conftest import TINY
from tests.integrations.test_float8_cache import GENERATIONS, generated

SIZES = {"hidden_size": 64, "intermediate_size": 176, **TINY}


@pytest.fixture(scope="module")
def models(save_tiny, tiny_llama):
    """Name -> folder: biases on q, k, v; norms on queries and keys; a window."""
    from transformers import MistralConfig, Qwen2Config, Qwen3Config

    return {
        "llama": tiny_llama,
        "qwen2": save_tiny(Qwen2Config(**SIZES), "qwen2"),
        "qwen3": save_tiny(Qwen3Config(**SIZES), "qwen3"),
        "mistral": save_tiny(MistralConfig(sliding_window=16, **SIZES), "mistral"),
    }


def opened(folder, weights="16bit"):
    if weights == "fp8":
        return load(folder, "channel", activation="none", dtype="float32", device="cpu").eval()
    return load_base(folder, None, device="cpu", dtype=torch.float32).eval()


def cached(model, kv_cache):
    cache = new_cache(model) if kv_cache == "16bit" else Float8Cache(model, granularity=kv_cache)
    return {cache_argument(model): cache}


KINDS = [("16bit", "16bit"), ("tensor", "16bit"), ("token-head", "16bit"), ("token-head", "fp8")]


@pytest.mark.parametrize(("kv_cache", "weights"), KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_same_tokens(models, name, kv_cache, weights):
    model = opened(models[name], weights)
    want = generated(model, **cached(model, kv_cache))
    assert torch.equal(generated(model, custom_generate=Decoder(model, capacity=40, kv_cache=kv_cache)), want)


@pytest.mark.parametrize("how", ["padded", "sampled"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_other_ways(models, name, how):
    model = opened(models[name])
    want = generated(model, **cached(model, "token-head"), **GENERATIONS[how])
    decoder = Decoder(model, capacity=32)
    assert torch.equal(generated(model, custom_generate=decoder, **GENERATIONS[how]), want)
    plain = generated(
        model, custom_generate=decoder
    )  # another call, without padding: nothing is left of the one before
    assert torch.equal(plain, generated(model, **cached(model, "token-head")))


def test_rows_end(models):
    """Each row ends at its first end token and goes on with the pad token; the longest decides the width."""
    model = opened(models["llama"])
    free = generated(model, **cached(model, "token-head"))[:, 20:]
    for ends in (int(free[0, 3]), [int(free[0, 2]), int(free[1, 6])], int(free[1, 0]), 263):
        want = generated(model, eos_token_id=ends, **cached(model, "token-head"))
        decoder = Decoder(model, capacity=64)
        assert torch.equal(generated(model, eos_token_id=ends, custom_generate=decoder), want)
        processed = generated(model, eos_token_id=ends, custom_generate=decoder, repetition_penalty=1.0000001)
        assert torch.equal(processed, want)


ENDS = list(range(4, 20))
CHOICES = {
    "sampled": {"do_sample": True, "eos_token_id": ENDS, "max_new_tokens": 16},
    "least": {"min_new_tokens": 8, "eos_token_id": ENDS, "max_new_tokens": 16},
    "criterion": {"stopping_criteria": [lambda tokens, scores, **_: tokens[:, -1] % 7 == 0], "max_new_tokens": 16},
}


@pytest.mark.parametrize("how", CHOICES)
def test_rows_end_by_what_was_chosen(models, how):
    """Not by the most likely token, which a sampler or processor did not take."""
    from transformers import StoppingCriteriaList

    model, options = opened(models["qwen3"]), dict(CHOICES[how])
    if "stopping_criteria" in options:
        options["stopping_criteria"] = StoppingCriteriaList(options["stopping_criteria"])
    decoder = Decoder(model, capacity=64)
    ids = torch.randint(4, 260, (8, 9), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}
    want = generated(model, **given, **cached(model, "token-head"))
    assert torch.equal(generated(model, **given, custom_generate=decoder), want)


@pytest.mark.parametrize("new", [1, 2])
def test_few_tokens(models, new):
    model = opened(models["llama"])
    want = generated(model, max_new_tokens=new, **cached(model, "token-head"))
    assert torch.equal(generated(model, max_new_tokens=new, custom_generate=Decoder(model, capacity=32)), want)


@pytest.mark.parametrize("how", ["plain", "padded"])
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_long_prompts(models, monkeypatch, name, how):
    """Prompts that come in parts, some of them beyond the window."""
    model = opened(models[name])
    want = generated(model, **cached(model, "token-head"), **GENERATIONS.get(how, {}))
    monkeypatch.setattr(decoder_step, "TOKENS_AT_ONCE", 6)
    found = generated(model, custom_generate=Decoder(model, capacity=40), **GENERATIONS.get(how, {}))
    assert torch.equal(found, want)


def test_prompts_in_graphs(models, monkeypatch):
    """With a graph that runs its function again: any length up to that of the graph, which the second prompt brings."""
    captured = []

    def capture(run, device, warm=2, beside=None):
        captured.append(run)
        run()
        return SimpleNamespace(replay=run)

    monkeypatch.setattr(decoding, "capture", capture)
    monkeypatch.setattr(decoding, "GRAPH_STEP", 8)
    model = opened(models["llama"])
    decoder = Decoder(model, capacity=40, graph=True).warmup(2)
    for count, graphs in ((20, 1), (18, 2), (24, 2), (20, 2), (25, 2), (7, 2)):
        ids = torch.randint(4, 260, (2, count), generator=torch.Generator().manual_seed(count))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        want = generated(model, **given, **cached(model, "token-head"))
        assert torch.equal(generated(model, **given, custom_generate=decoder), want)
        assert len(captured) == graphs
    decoder.warmup(2, prompt=7)
    assert len(captured) == 3
    padded = generated(model, custom_generate=decoder, **GENERATIONS["padded"])
    assert torch.equal(padded, generated(model, **cached(model, "token-head"), **GENERATIONS["padded"]))


def test_weights_are_not_kept_twice(models):
    model = opened(models["llama"], "fp8")
    Decoder(model, capacity=8)
    frozen = [module for module in model.modules() if isinstance(module, FrozenFloat8Linear)]
    storages = {m.weight.untyped_storage().data_ptr(): m.weight.untyped_storage().nbytes() for m in frozen}
    assert len(storages) == 2 * 4 and sum(storages.values()) == sum(m.weight.numel() for m in frozen)


def test_what_cannot_be(models, tiny_moe, save_tiny):
    from transformers import LlamaConfig

    model = opened(models["llama"])
    decoder = Decoder(model, capacity=24)
    with pytest.raises(ShapeError, match="up to 32 tokens; need 24, its capacity"):
        generated(model, custom_generate=decoder)
    with pytest.raises(UnsupportedError, match="beams"):
        generated(model, custom_generate=decoder, num_beams=2)
    with pytest.raises(ConfigError, match="another model"):
        generated(opened(models["llama"]), custom_generate=decoder)
    with pytest.raises(ConfigError, match="kv_cache"):
        Decoder(model, capacity=24, kv_cache="fp8")
    with pytest.raises(ConfigError, match="capacity"):
        Decoder(model, capacity=0)
    with pytest.raises(UnsupportedError, match="model type 'qwen3_moe'"):
        Decoder(opened(tiny_moe), capacity=24)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedError, match="rotary embedding 'dynamic'"):
        Decoder(opened(save_tiny(LlamaConfig(rope_parameters=rope, **SIZES), "dynamic")), capacity=24)
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="a hook on 'lm_head'"):
        Decoder(model, capacity=24)


@pytest.mark.slow
def test_smollm2_says_the_same(demo_model):
    """A real model, prompts of two lengths, FP8 weights: the tokens of Transformers' own loop."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model, padding_side="left")
    model = load(demo_model, "channel", activation="none", dtype="float32", device="cpu").eval()
    turns = [[{"role": "user", "content": text}] for text in ("What is the capital of France?", "Name two colours.")]
    options = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
    inputs = dict(tokenizer.apply_chat_template(turns, **options))
    inputs |= {"max_new_tokens": 10, "do_sample": False}
    want = model.generate(**inputs, **cached(model, "token-head"))
    found = model.generate(**inputs, custom_generate=Decoder(model, capacity=80))
    assert torch.equal(found, want)
    assert "Paris" in tokenizer.decode(found[0], skip_special_tokens=True)


def test_another_batch_size_frees_the_first(models):
    """Without the collector: a graph that it freed later could end the capture of the next."""
    decoder = Decoder(opened(models["llama"]), capacity=8).warmup()
    first = weakref.ref(decoder.state)
    gc.disable()
    try:
        decoder.warmup(2)
        assert first() is None
    finally:
        gc.enable()
