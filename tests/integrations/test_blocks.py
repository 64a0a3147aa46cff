"""Block by block against the whole model at once: the same Fisher weights and moments, and what `sequential` means."""

from contextlib import contextmanager

import pytest
import torch

from octavo.base.errors import CheckpointError, DataError
from octavo.integrations import blocks
from octavo.integrations.blocks import BlockWalk, blocks_of
from octavo.integrations.moments import fisher_moments, observe, watched_groups
from octavo.modules.moments import fast_products

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **SHAPE)).eval()


def gemma3():
    """Blocks that are called differently: sliding and full attention."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        head_dim=8, sliding_window=4, layer_types=kinds, num_key_value_heads=2, **SHAPE
    )
    return transformers.Gemma3ForCausalLM(config).eval()


SHAPE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}


def nothing(amount):
    pass


def samples(count=3, length=12):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(96, (length,), generator=generator) for _ in range(count)]


@pytest.fixture(params=[llama, gemma3], ids=lambda make: make.__name__)
def model(request):
    torch.manual_seed(0)
    return request.param()


def moments_of(walk, weights=None, change=lambda name, weight: None, sequential=False):
    found = {}

    def visit(groups, seen):
        found.update(seen.matrices)
        for names in groups.values():
            for name in names:
                change(name, dict(walk.model.named_modules())[name].weight.data)

    walk.moments(weights, visit, nothing, sequential=sequential)
    return found


@pytest.mark.parametrize("weighed", [1, 2], ids=["all samples weighed", "every other one"])
def test_the_whole_model_at_once_gives_the_same(model, monkeypatch, weighed):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # BF16 rounds other shapes otherwise
    before = {name: p.clone() for name, p in model.named_parameters()}
    groups = watched_groups(model)
    walk = BlockWalk(model, samples(), groups, CPU)
    wanted = fisher_moments(model, groups, samples(), nothing, weighed)
    in_one_go = {}
    walk.fisher_moments(lambda _, seen: in_one_go.update(seen.matrices), nothing, weighed)
    later = [moments_of(walk, walk.token_weights(nothing))] if weighed == 1 else []
    for found in (in_one_go, *later):
        assert found.keys() == wanted.matrices.keys()
        for key, matrix in wanted.matrices.items():
            torch.testing.assert_close(found[key], matrix, rtol=1e-3, atol=1e-4 * float(matrix.diagonal().max()))
    plain = moments_of(walk)
    for key, matrix in observe(model, groups, samples(), nothing).matrices.items():
        torch.testing.assert_close(plain[key], matrix, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_head_in_parts_gives_the_same_gradients(model, monkeypatch):
    """Parts of 5 of 12 tokens: the same tokens are drawn, and the same moments come out."""
    groups = watched_groups(model)
    whole = fisher_moments(model, groups, samples(), nothing).matrices
    monkeypatch.setattr(blocks, "HEAD_TOKENS", 5)
    for key, matrix in fisher_moments(model, groups, samples(), nothing).matrices.items():
        torch.testing.assert_close(matrix, whole[key], rtol=1e-3, atol=1e-5 * float(whole[key].diagonal().max()))


def test_sequential_blocks_see_what_was_done_to_those_before(model):
    """Every weight halved as its block is visited: the moments of the last block are those of a model whose first
    blocks have been halved, and its weights are back when the walk is over."""
    walk = BlockWalk(model, samples(), watched_groups(model), CPU)
    last = list(walk.blocks)[-1]
    found = moments_of(walk, change=lambda name, weight: weight.mul_(0.5), sequential=True)
    untouched = moments_of(walk)
    with torch.no_grad():
        for names in watched_groups(model).values():
            for name in names:
                if not name.startswith(last):
                    model.get_submodule(name).weight.mul_(0.5)
    with fast_products():
        halved = observe(model, watched_groups(model), samples(), nothing).matrices
    for key in walk.groups[last]:
        torch.testing.assert_close(found[key], halved[key], rtol=1e-4, atol=1e-6)
    key = next(key for key in walk.groups[last])
    assert not torch.allclose(found[key], untouched[key], rtol=0.05), "there is something to see"


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "sequential"])
def test_what_visits_a_block_rounds_where_it_is(model, monkeypatch, weighted):
    """While a block is visited its weights are on the device, or rounding would run on the host; and products there are
    exact again."""
    there, seen = [], []

    @contextmanager
    def resident(module, device, **settings):
        with original(module, device, **settings):
            there.append(module)
            yield
            there.pop()

    def visit(groups, moments):
        owner = next(block for name, block in walk.blocks.items() if next(iter(groups)).startswith(f"{name}."))
        seen.append(owner in there and torch.backends.mkldnn.matmul.fp32_precision == before)

    original, before = blocks.resident, torch.backends.mkldnn.matmul.fp32_precision
    monkeypatch.setattr(blocks, "resident", resident)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    walk = BlockWalk(model, samples(), watched_groups(model), CPU)
    if weighted:
        walk.fisher_moments(visit, nothing)
    else:
        walk.moments(None, visit, nothing, sequential=True)
    assert seen == [True] * len(walk.blocks)


def test_nan_names_the_linear(model):
    walk = BlockWalk(model, samples(), watched_groups(model), CPU)
    blocks_of(model)[next(iter(walk.blocks))].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj holds NaN"):
        moments_of(walk)


def test_linears_outside_of_blocks_are_refused(model):
    with pytest.raises(DataError, match=r"other\.proj is in no block"):
        BlockWalk(model, samples(), {"other.proj": ["other.proj"]}, CPU)
