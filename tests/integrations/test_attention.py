"""A failing attention is named in one warning, and the next one runs."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from octavo.base.errors import UnsupportedError
from octavo.integrations import attention
from octavo.integrations.attention import choose_attention, unpacked_heads
from octavo.integrations.fused import fuse
from octavo.testing import fake_caps
from tests.integrations.test_fused import build, tokens


def broken(module, query, *args, **options):
    raise RuntimeError("no kernel image is available for execution\non this device")


def not_a_number(module, query, *args, **options):
    return torch.full_like(query.transpose(1, 2), float("nan")), None


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """What is registered here is gone afterwards."""
    monkeypatch.setattr(AttentionInterface, "_global_mapping", dict(AttentionInterface._global_mapping))


@pytest.fixture
def model():
    for name, function in (("broken", broken), ("nan", not_a_number)):
        AttentionInterface.register(name, function)
    return build(activation="none")


@pytest.mark.parametrize("wanted", ["broken", "nan", "flash_attention_2"])
def test_the_next_one_runs(model, wanted, caplog):
    before, state = model(input_ids=tokens()).logits, torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "octavo"):
        assert choose_attention(model, wanted) == "sdpa"
    (record,) = caplog.records
    assert record.getMessage().startswith(f"attention {wanted} does not run: ")
    assert record.getMessage().endswith("; sdpa instead") and "\n" not in record.getMessage()
    assert torch.equal(model(input_ids=tokens()).logits, before) and torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_runs_is_taken_without_a_word(model, caplog):
    assert choose_attention(model, "eager") == "eager" == model.config._attn_implementation
    assert choose_attention(model, "auto") == "eager"
    assert not caplog.records


@pytest.mark.parametrize("own", ["sdpa", "eager"])
@pytest.mark.parametrize("installed", [True, False], ids=["installed", "absent"])
@pytest.mark.parametrize("sm", ["sm80", "sm90"])
def test_auto_takes_the_newest_where_it_is_installed(model, monkeypatch, caplog, sm, installed, own):
    """Here it cannot run, which is said once."""
    monkeypatch.setattr(attention, "version_of", lambda package: "4.0.0b36" if installed else None)
    monkeypatch.setattr(attention, "caps_of", lambda device: fake_caps(sm))
    choose_attention(model, own)
    assert choose_attention(model, "auto") == own
    tried = installed and (sm, own) == ("sm90", "sdpa")
    assert [r.getMessage()[:42] for r in caplog.records] == ["attention flash_attention_4 does not run: "] * tried


def test_soft_caps_have_no_sdpa(caplog):
    """Gemma 2: refused by Transformers before anything runs."""
    assert choose_attention(build("gemma2"), "sdpa") == "eager"
    assert "attention sdpa does not run" in caplog.text


def test_none_is_an_error_with_every_reason(model, monkeypatch):
    monkeypatch.setattr(attention, "ORDER", ("broken", "nan"))
    with pytest.raises(UnsupportedError, match=r"attention broken does not run.*attention nan does not run"):
        choose_attention(model, "broken")


@pytest.fixture
def flash(monkeypatch):
    """FlashAttention 4 and Transformers' call of it, for the CPU; who was called, with what."""
    calls = []

    def flash_attn_func(q, k, v, softmax_scale, causal, pack_gqa):
        calls.append(pack_gqa)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
        return y.transpose(1, 2), None

    package = ModuleType("flash_attn.cute")
    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)

    def transformers(module, query, key, value, attention_mask, **options):
        calls.append("transformers")
        return query.transpose(1, 2), None

    monkeypatch.setattr(attention, "flash_attention_forward", transformers)
    return calls


def heads(batch=2, tokens=1024, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, n, tokens, 8, generator=generator).to(dtype) for n in (4, 2, 2)]


def test_whole_causal_sequences_have_a_tile_for_each_query_head(flash):
    q, k, v = heads()
    options = {"scaling": 0.3, "dropout": 0.0, "position_ids": torch.arange(1024), "sliding_window": None}
    y, weights = unpacked_heads(SimpleNamespace(is_causal=True), q, k, v, None, **options)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
    assert flash == [False] and weights is None and torch.equal(y, want)


def test_one_row_is_asked_once_whether_it_is_packed(flash, monkeypatch):
    asked, diff = [], torch.Tensor.diff
    monkeypatch.setattr(torch.Tensor, "diff", lambda x: asked.append(x) or diff(x))
    q, k, v = heads(batch=1)
    for positions, layers in ((torch.arange(1024)[None], 3), (torch.arange(7, 1031)[None], 2)):
        for _ in range(layers):
            unpacked_heads(SimpleNamespace(is_causal=True), q, k, v, None, position_ids=positions)
    assert flash == [False] * 5 and len(asked) == 2
    positions.remainder_(512)
    unpacked_heads(SimpleNamespace(is_causal=True), q, k, v, None, position_ids=positions)
    assert flash[5:] == ["transformers"]


OTHERS = {
    "mask": {"mask": torch.ones(2, 1024)},
    "window": {"sliding_window": 512},
    "softcap": {"softcap": 50.0},
    "sink": {"s_aux": torch.zeros(4)},
    "packed": {"cu_seq_lens_q": torch.tensor([0, 5, 1024])},
    "packed in one row": {"batch": 1, "position_ids": torch.arange(1024)[None] % 512},
    "dropout": {"dropout": 0.1},
    "deterministic": {"deterministic": True},
    "weights asked for": {"output_attentions": True},
    "both ways": {"is_causal": False},
    "short": {"tokens": 1023},
    "float32": {"dtype": torch.float32},
}


@pytest.mark.parametrize("given", OTHERS.values(), ids=OTHERS)
def test_everything_else_is_transformers_own(flash, given):
    shape = {name: given[name] for name in ("batch", "tokens", "dtype") if name in given}
    options = {name: value for name, value in given.items() if name not in (*shape, "mask")}
    unpacked_heads(SimpleNamespace(is_causal=True), *heads(**shape), given.get("mask"), **options)
    assert flash == ["transformers"]


@pytest.mark.parametrize(
    "sm, installed, deterministic", [("sm90", 1, 0), ("sm90", 1, 1), ("sm90", 0, 0), ("sm100", 1, 0)]
)
def test_fused_layers_bring_it_where_it_pays(monkeypatch, sm, installed, deterministic):
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", str(deterministic))
    monkeypatch.setattr(attention, "version_of", lambda package: "4.0.0b36" if installed else None)
    monkeypatch.setattr(attention, "caps_of", lambda device: fake_caps(sm))
    assert fuse(build().get_base_model().model)
    taken = AttentionInterface._global_mapping["flash_attention_4"] is unpacked_heads
    assert taken == (sm == "sm90" and installed and not deterministic)
