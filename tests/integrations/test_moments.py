"""Moments of a real decoder: what is watched, in which batches, and that the Fisher weights reach the matrices."""

import pytest
import torch

from octavo.base.errors import CheckpointError
from octavo.integrations import measuring
from octavo.integrations.moments import gather_moments, split_groups, watched_groups

L = "model.layers.0"


@pytest.fixture
def opened(tiny_llama):
    return measuring.open_model(tiny_llama, dtype=torch.float32)


@pytest.fixture
def samples():
    return list(torch.randint(0, 100, (3, 16), generator=torch.Generator().manual_seed(0)))


def inputs_of(model, name, samples):
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda m, x: seen.append(x[0][0].detach()))
    for sample in samples:
        measuring.run_layers(model, sample)
    hook.remove()
    return torch.cat(seen)


def test_groups_share_inputs_and_leave_the_head_out(opened):
    groups = watched_groups(opened.model)
    assert groups[f"{L}.self_attn.qkv_proj"] == [f"{L}.self_attn.{p}_proj" for p in "qkv"]
    assert not any("lm_head" in name for names in groups.values() for name in names)


@pytest.mark.parametrize("memory", [1, 1 << 30], ids=["one matrix at a time", "all at once"])
def test_matrices_are_the_inputs_second_moments(opened, samples, tmp_path, memory):
    moments = gather_moments(opened, "d", samples, tmp_path / "m", "none", memory)
    for name in (f"{L}.self_attn.k_proj", f"{L}.mlp.down_proj", "model.layers.1.mlp.up_proj"):
        x = inputs_of(opened.model, name, samples)
        expected = x.T @ x  # BF16 products where the CPU has units for them
        torch.testing.assert_close(moments.get(name), expected, rtol=0.01, atol=0.01 * float(expected.diagonal().max()))
    assert moments.index.tokens == 48 and moments.index.weighting == "none"


def test_batches_fit_in_memory(opened):
    groups = watched_groups(opened.model)
    batches = list(split_groups(opened.model, groups, 3 * 4 * 64**2))
    assert [key for batch in batches for key in batch] == list(groups) and len(batches) > 1


def test_fisher_weights_change_the_matrices_and_are_reproducible(opened, samples, tmp_path):
    plain = gather_moments(opened, "d", samples, tmp_path / "a", "none")
    first = gather_moments(opened, "d", samples, tmp_path / "b", "fisher")
    again = gather_moments(opened, "d", samples, tmp_path / "c", "fisher")
    name = f"{L}.self_attn.q_proj"
    assert torch.equal(first.get(name), again.get(name))
    assert not torch.allclose(first.get(name), plain.get(name), rtol=0.05)
    assert all(parameter.grad is None for parameter in opened.model.parameters())


def test_nan_activations_name_the_linear(opened, samples, tmp_path):
    opened.model.get_submodule(f"{L}.mlp.gate_proj").weight.data[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj"):
        gather_moments(opened, "d", samples, tmp_path / "m", "none")
