"""Whole decoding steps of a model whose kernels run on the host, against the same steps in plain torch."""

import pytest
import torch

from octavo.integrations import float8_cache
from octavo.integrations.decoding import Decoder
from octavo.integrations.float8_cache import Float8Cache
from octavo.integrations.measuring import cache_argument, load_base
from octavo.ops import attention, decode
from octavo.testing import assert_sqnr

pytestmark = pytest.mark.usefixtures("on_host")
TOKENS = torch.randint(4, 260, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def kernels(monkeypatch):
    def choose(wanted):
        for module in (attention, decode):
            monkeypatch.setattr(module, "on_kernels", lambda x: wanted)
        for module in (attention, float8_cache):
            monkeypatch.setattr(module, "why_not", lambda *problem: None if wanted else "not wanted")

    return choose


def opened(folder):
    return load_base(folder, None, device="cpu", dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("kv_cache", ["tensor", "token-head", "16bit"])
@torch.no_grad()
def test_steps(tiny_llama_128, kernels, kv_cache):
    """Four forced tokens of two rows, one padded at the left."""
    logits = []
    for wanted in (True, False):
        kernels(wanted)
        state = Decoder(opened(tiny_llama_128), capacity=16, kv_cache=kv_cache).warmup(2, padded=True).state
        seen = torch.ones_like(TOKENS)
        seen[0, :3] = 0
        state.prefill(TOKENS[:, :8], seen[:, :8])
        state.length.fill_(8)
        for place in range(8, 12):
            state.tokens.copy_(TOKENS[:, place])
            state.advance()
        logits.append(state.logits)
    assert_sqnr(logits[0], logits[1], 35.0)


@pytest.mark.parametrize("granularity", ["tensor", "token-head"])
@torch.no_grad()
def test_transformers_attention(tiny_llama_128, kernels, granularity):
    """The attention that Float8Cache brings: one token reads the codes, with a mask and without."""
    for seen in (None, torch.ones_like(TOKENS)):
        if seen is not None:
            seen[0, :3] = 0
        logits = []
        for wanted in (True, False):
            kernels(wanted)
            model = opened(tiny_llama_128)
            cache = Float8Cache(model, granularity=granularity)
            for first, last in ((0, 8), (8, 9), (9, 10)):
                mask = None if seen is None else seen[:, :last]
                options = {"use_cache": True, "attention_mask": mask, cache_argument(model): cache}
                found = model(input_ids=TOKENS[:, first:last], **options).logits
            logits.append(found)
        assert_sqnr(logits[0], logits[1], 35.0)
