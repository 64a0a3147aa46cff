"""A failing attention is named in one warning, and the next one runs."""

import logging

import pytest
import torch
from transformers import AttentionInterface

from octavo.base.errors import UnsupportedError
from octavo.integrations import attention
from octavo.integrations.attention import choose_attention
from octavo.testing import fake_caps
from tests.integrations.test_fused import build, tokens


def broken(module, query, *args, **options):
    raise RuntimeError("no kernel image is available for execution\non this device")


def not_a_number(module, query, *args, **options):
    return torch.full_like(query.transpose(1, 2), float("nan")), None


@pytest.fixture
def model():
    for name, function in (("broken", broken), ("nan", not_a_number)):
        AttentionInterface.register(name, function)
    yield build(activation="none")
    for name in ("broken", "nan"):
        AttentionInterface._global_mapping.pop(name)


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
