"""Mixtures of experts and wrappers around a vision tower: loaded in FP8, generating with an FP8 cache."""

import pytest
import torch

from octavo.integrations.float8_cache import Float8Cache
from octavo.integrations.measuring import cache_argument, new_cache
from octavo.integrations.transformers import load
from octavo.modules.experts import FrozenFloat8Experts
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.modules.kv_cache import Float8KVWriter

IMAGE_TOKEN, PATCHES = 263, 4


def opened(folder):
    return load(folder, "channel", activation="none", dtype="float32", device="cpu").eval()


def generated(model, cache, **inputs):
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 3, cache_argument(model): cache}
    return model.generate(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]), **options)


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts(tiny_moe, tokens):
    """One token reaches 2 of 8 experts: the others get none."""
    model = opened(tiny_moe)
    assert any(isinstance(module, FrozenFloat8Experts) for module in model.modules())
    ids = torch.randint(4, 260, (1, tokens), generator=torch.Generator().manual_seed(0))
    found = generated(model, Float8Cache(model), input_ids=ids)
    rounding = Float8KVWriter("token-head").watch(new_cache(model))
    assert torch.equal(found, generated(model, rounding, input_ids=ids)) and found.shape == (1, tokens + 6)


def test_a_vision_tower(tiny_vlm):
    """The tower and its projector stay in 16 bit or wider; the image reaches the answer."""
    model = opened(tiny_vlm)
    frozen = [name for name, module in model.named_modules() if isinstance(module, FrozenFloat8Linear)]
    assert frozen and not any("vision" in name or "projector" in name for name in frozen)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 260, (1, 8), generator=generator)
    ids[0, 1 : 1 + PATCHES] = IMAGE_TOKEN
    images = torch.randn(2, 1, 3, 16, 16, generator=generator)
    logits = []
    with torch.no_grad():
        for image in images:
            options = {"use_cache": True, cache_argument(model): Float8Cache(model)}
            logits.append(model(input_ids=ids, pixel_values=image, **options).logits[0, -1])
    assert all(torch.isfinite(found).all() for found in logits) and not torch.equal(*logits)
    found = generated(model, Float8Cache(model), input_ids=ids, pixel_values=images[0])
    rounding = Float8KVWriter("token-head").watch(new_cache(model))
    assert torch.equal(found, generated(model, rounding, input_ids=ids, pixel_values=images[0]))
