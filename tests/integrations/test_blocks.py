"""Block by block against the whole model at once: the same Fisher weights and moments, and what `sequential` means."""

import pytest
import torch

from octavo.base.errors import CheckpointError, DataError
from octavo.integrations.blocks import BlockWalk, blocks_of
from octavo.integrations.moments import observe, token_weights, watched_groups
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


def test_the_whole_model_at_once_gives_the_same(model):
    before = {name: p.clone() for name, p in model.named_parameters()}
    walk = BlockWalk(model, samples(), watched_groups(model), CPU)
    weights = walk.token_weights(nothing)
    with fast_products():
        want = token_weights(model, watched_groups(model), samples(), nothing)
    assert weights.keys() == want.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(weight, want[key], rtol=1e-4, atol=1e-6)
    found = moments_of(walk, weights)
    with fast_products():
        wanted = observe(model, watched_groups(model), samples(), weights, nothing).matrices
    for key, matrix in wanted.items():
        torch.testing.assert_close(found[key], matrix, rtol=1e-4, atol=1e-6)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


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
        halved = observe(model, watched_groups(model), samples(), None, nothing).matrices
    for key in walk.groups[last]:
        torch.testing.assert_close(found[key], halved[key], rtol=1e-4, atol=1e-6)
    key = next(key for key in walk.groups[last])
    assert not torch.allclose(found[key], untouched[key], rtol=0.05), "there is something to see"


def test_nan_names_the_linear(model):
    walk = BlockWalk(model, samples(), watched_groups(model), CPU)
    blocks_of(model)[next(iter(walk.blocks))].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj holds NaN"):
        moments_of(walk)


def test_linears_outside_of_blocks_are_refused(model):
    with pytest.raises(DataError, match=r"other\.proj is in no block"):
        BlockWalk(model, samples(), {"other.proj": ["other.proj"]}, CPU)
