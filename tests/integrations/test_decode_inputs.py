"""What would end a process on a GPU is an error before anything runs."""

import pytest
import torch

from octavo.base.errors import ConfigError, MismatchError, RefusedError, ShapeError, UnsupportedError
from octavo.integrations.decode_inputs import is_padded
from octavo.integrations.decoding import Decoder
from octavo.integrations.float8_cache import Float8Cache
from tests.integrations.test_decoding import opened
from tests.integrations.test_float8_cache import PADDED, PROMPTS, generated


@pytest.mark.parametrize("token", [-1, 264, 1 << 40])
def test_tokens_without_an_embedding(tiny_llama, token):
    model, ids = opened(tiny_llama), PROMPTS.clone()
    ids[1, 3] = token
    with pytest.raises(MismatchError, match=f"got token {token}; need 0 to 263, its embeddings"):
        generated(model, input_ids=ids, custom_generate=Decoder(model, capacity=40))


def test_padding():
    assert not is_padded(PROMPTS, None, 264) and not is_padded(PROMPTS, torch.ones_like(PROMPTS), 264)
    assert is_padded(PROMPTS, PADDED, 264)
    for mask in (PADDED.flip(1), PADDED.roll(3, 1), PADDED * 0):
        with pytest.raises(UnsupportedError, match=r"need padding at the left. Tokenize with padding_side='left'"):
            is_padded(PROMPTS, mask, 264)
    for ids, mask in ((PROMPTS, PADDED[:, 1:]), (PROMPTS, PADDED[:1]), (PROMPTS[:, :0], None), (PROMPTS[0], None)):
        with pytest.raises(ShapeError, match=r"Decoder: (input_ids|attention_mask)"):
            is_padded(ids, mask, 264)


def test_a_pad_token_without_an_embedding(tiny_llama):
    model = opened(tiny_llama)
    with pytest.raises(ConfigError, match="pad_token_id; got 264; need 0 to 263"):
        generated(model, pad_token_id=264, eos_token_id=5, custom_generate=Decoder(model, capacity=40))


@pytest.mark.parametrize("how", [{}, {"do_sample": True}, {"repetition_penalty": 1.5}], ids=str)
def test_logits_that_are_nan(tiny_llama, how):
    model = opened(tiny_llama)
    decoder = Decoder(model, capacity=40)
    generated(model, custom_generate=decoder, **how)
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(RefusedError, match=r"scores of the next token; got NaN or infinity in row 0"):
        generated(model, custom_generate=decoder, **how)


@pytest.mark.parametrize("how", ["moved", "exchanged"])
def test_weights_that_were_changed(tiny_llama, how):
    model = opened(tiny_llama)
    decoder = Decoder(model, capacity=40)
    if how == "moved":
        model.to(torch.bfloat16)
    else:
        model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(64, 176))
    with pytest.raises(ConfigError, match="weight was moved or exchanged since it was made"):
        generated(model, custom_generate=decoder)


def test_a_warmup_that_does_not_fit(tiny_llama):
    decoder = Decoder(opened(tiny_llama), capacity=40)
    for options in ({"batch": 0}, {"prompt": 41}):
        with pytest.raises(ShapeError, match="need 1 row or more, 40 tokens at most"):
            decoder.warmup(**options)
    with pytest.raises(ConfigError, match="4 tokens or more"):
        Decoder(opened(tiny_llama), capacity=3)


def test_more_logits_than_embeddings(tiny_llama):
    model = opened(tiny_llama)
    model.lm_head = torch.nn.Linear(64, 300, bias=False)
    with pytest.raises(UnsupportedError, match="logits of 300 tokens, embeddings of 264"):
        Decoder(model, capacity=40)


def test_in_and_out_of_inference_mode(tiny_llama):
    """What was made in it is written to outside: buffers of a decoder, a cache made once and one that beams reorder."""
    model = opened(tiny_llama)
    decoder, cache, grows = Decoder(model, capacity=40), Float8Cache(model, capacity=40), Float8Cache(model)
    for inside in (True, False):
        with torch.inference_mode(inside):
            found = generated(model, custom_generate=decoder)
            assert torch.equal(generated(model, cache), found)
            if inside:
                grows.update(*torch.randn(2, 2, 2, 5, 16), 0)
                grows.reorder_cache(torch.tensor([1, 0]))
            cache.reset()
    assert grows.update(*torch.ones(2, 2, 2, 1, 16), 0)[0].shape == (2, 2, 6, 16)
