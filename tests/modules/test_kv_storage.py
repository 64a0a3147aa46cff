"""KVStorage against a list of what was written."""

import pytest
import torch

from octavo.base.errors import ConfigError, ShapeError
from octavo.modules import kv_storage
from octavo.modules.kv_storage import KVStorage
from octavo.ops.attention import CachedKV

GRANULARITIES = pytest.mark.parametrize("granularity", ["tensor", "token-head", "16bit"])


def tokens(count, seed, batch=2):
    return torch.randn(batch, 3, count, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()


def as_stored(granularity, x):
    """What the cache gives back for x."""
    storage = KVStorage(granularity, (0.02, 0.02))
    return storage.append(x, x).decoded(torch.bfloat16)[0]


@GRANULARITIES
@pytest.mark.parametrize("window", [0, 1, 5, 64])
@pytest.mark.parametrize("capacity", [0, 200])
def test_what_new_tokens_see(granularity, window, capacity, monkeypatch):
    """Prompts and single tokens over many growths and moves of the window."""
    monkeypatch.setattr(kv_storage, "STEP", 16)
    storage, whole = KVStorage(granularity, (0.02, 0.02), capacity, window), []
    for step, count in enumerate([30, 1, 1, 17, *[1] * 40, 40, 1, 0, 2]):
        x = tokens(count, step)
        kept = storage.kept
        seen = storage.append(x, x * 2).decoded(torch.bfloat16)
        whole.append(as_stored(granularity, x) if count else x)
        want = torch.cat(whole, dim=2)[:, :, -(kept + count) :] if kept + count else x
        assert torch.equal(seen[0], want)
        assert kept == (min(window - 1, storage.total - count) if window else storage.total - count)
    assert storage.total == 132
    if window and not capacity:
        assert storage.kv.keys.shape[2] <= window + 3 * 16 + 8


@GRANULARITIES
def test_memory(granularity):
    """Half of 16 bit, plus 4 bytes a token and head with scales of their own: 0.516 for heads of 128."""
    x = torch.zeros(1, 8, 4096, 128, dtype=torch.bfloat16)
    storage = KVStorage(granularity)
    storage.append(x, x)
    assert storage.nbytes <= {"tensor": 0.5001, "token-head": 0.52, "16bit": 1}[granularity] * 2 * x.nbytes


@GRANULARITIES
def test_rows_of_the_batch(granularity):
    storage, x = KVStorage(granularity, (0.02, 0.02)), tokens(9, 0, batch=3)
    storage.append(x, x)
    storage.select(torch.tensor([2, 0, 0, 1]))
    more = tokens(1, 1, batch=4)
    seen = storage.append(more, more).decoded(torch.bfloat16)[0]
    assert torch.equal(seen[:, :, :9], as_stored(granularity, x)[[2, 0, 0, 1]])


def test_taking_back():
    storage, x = KVStorage("16bit"), tokens(9, 0)
    storage.append(x, x)
    storage.crop(4)
    seen = storage.append(x[:, :, :1], x[:, :, :1]).keys
    assert torch.equal(seen, torch.cat((x[:, :, :5], x[:, :, :1]), dim=2)) and storage.total == 6
    with pytest.raises(ConfigError, match="taking back 7 of 6"):
        storage.crop(7)


def test_taking_back_behind_a_window():
    x = tokens(20, 0)
    plain, recording = KVStorage("16bit", window=4), KVStorage("16bit", window=4, recording=True)
    for storage in (plain, recording):
        storage.append(x, x)
    with pytest.raises(ConfigError, match="only while recording"):
        plain.crop(1)
    recording.crop(5)
    seen = recording.append(x[:, :, :1], x[:, :, :1]).keys
    assert torch.equal(seen, torch.cat((x[:, :, 12:15], x[:, :, :1]), dim=2))


def test_a_full_cache_is_an_error():
    storage = KVStorage("tensor", capacity=8)
    storage.append(tokens(8, 0), tokens(8, 0))
    with pytest.raises(ShapeError, match="KV cache is full; got 9 tokens; need 8"):
        storage.append(tokens(1, 0), tokens(1, 0))
    storage.reset()
    assert isinstance(storage.kv, CachedKV) and storage.append(tokens(8, 1), tokens(8, 1)).keys.shape[2] == 8


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_cannot_be(scale):
    with pytest.raises(ConfigError, match="scale of the values"):
        KVStorage("tensor", (1.0, scale))


def test_another_batch_is_an_error():
    storage = KVStorage()
    storage.append(tokens(3, 0), tokens(3, 0))
    with pytest.raises(ShapeError, match="as before"):
        storage.append(tokens(1, 0, batch=1), tokens(1, 0, batch=1))
