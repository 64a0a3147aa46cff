"""Moments of a real decoder: what is watched, in which batches, and that the Fisher weights reach the matrices."""

import pytest
import torch

from octavo.base.errors import CheckpointError, ConfigError
from octavo.formats.recipe import Recipe
from octavo.integrations import measuring
from octavo.integrations.moments import _stacked, gather_moments, split_groups, watched_groups
from octavo.integrations.transformers import load

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
        expected, found = x.T @ x, moments.get(name)  # BF16 products where the CPU has units for them
        off = ~torch.eye(len(found), dtype=torch.bool)
        expected[off] *= (found[off] @ expected[off]) / (expected[off] @ expected[off])  # all shrunk by one share
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01 * float(expected.diagonal().max()))
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


def test_samples_of_one_length_pass_together(samples):
    given = [samples[0], samples[1], samples[0][:8], samples[2]]
    found = list(_stacked(given, 40))
    assert [list(x.shape) for x in found] == [[2, 16], [1, 8], [1, 16]]
    assert torch.equal(torch.cat([x.flatten() for x in found]), torch.cat(given))


def test_nan_activations_name_the_linear(opened, samples, tmp_path):
    opened.model.get_submodule(f"{L}.mlp.gate_proj").weight.data[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj"):
        gather_moments(opened, "d", samples, tmp_path / "m", "none")


@pytest.mark.parametrize("options", [{"device": torch.device("cpu")}, {"memory": 1}], ids=["a device", "little memory"])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_moe"])
def test_block_by_block_is_the_same(family, options, samples, tmp_path, request, monkeypatch):
    """What a GPU does: one block at a time, the others in host memory; experts in stacks too."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # the whole model would be in BF16
    opened = measuring.open_model(request.getfixturevalue(family), dtype=torch.float32)
    whole = gather_moments(opened, "d", samples, tmp_path / "w", "fisher")
    walked = gather_moments(opened, "d", samples, tmp_path / "b", "fisher", **options)
    assert walked.index.modules == whole.index.modules and walked.index.few == whole.index.few
    for module in whole.index.modules:
        torch.testing.assert_close(walked.get(module), whole.get(module), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scheme", ["block128", "tensor"])
def test_sequential_moments_are_those_of_the_model_rounded_so_far(opened, samples, tmp_path, scheme, monkeypatch):
    """Rounding by them is a fixed point: the last block's inputs in the rounded model have these moments."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # no BF16: the difference is small
    recipe = Recipe.named(scheme, rounding="compensated")
    before = {name: p.clone() for name, p in opened.model.named_parameters()}
    moments = gather_moments(opened, "d", samples, tmp_path / "m", "none", sequential=recipe)
    assert all(torch.equal(p, before[name]) for name, p in opened.model.named_parameters())
    rounded = load(opened.folder, recipe, dtype=torch.float32, moments=moments, activation="none")
    name = "model.layers.1.self_attn.q_proj"
    found = moments.get(name).diagonal()
    here, plain = (found - inputs_of(model, name, samples).square().sum(0) for model in (rounded, opened.model))
    assert here.norm() < 0.2 * plain.norm()


def test_sequential_needs_linears(tiny_moe, samples, tmp_path):
    opened = measuring.open_model(tiny_moe, dtype=torch.float32)
    with pytest.raises(ConfigError, match="an expert in a stack"):
        gather_moments(opened, "d", samples, tmp_path / "m", "none", sequential=Recipe())
