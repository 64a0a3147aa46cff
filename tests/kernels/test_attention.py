"""attention.cu, attention_combine.cu and kv_store.cu on the host, against the same functions in plain torch."""

import pytest
import torch

from octavo.kernels.splits import MOST_SPLITS, attention_block, most_splits
from octavo.ops import attention
from octavo.ops.attention import CachedKV
from octavo.testing import assert_sqnr, fake_caps
from tests.ops.cases import same

pytestmark = pytest.mark.usefixtures("on_host")
KINDS = ["layer", "token-head", "16 bit"]
# Weights are rounded to 16 bit before they multiply the values, as in every fused attention, and the result is once.
FLOOR_DB = {torch.bfloat16: 50.0, torch.float16: 60.0}


@pytest.fixture
def kernels(monkeypatch):
    """kernels(True): functions of `attention` run on kernels; False: plain torch."""

    def choose(wanted):
        monkeypatch.setattr(attention, "on_kernels", lambda x: wanted)
        monkeypatch.setattr(attention, "why_not", lambda *problem: None)

    return choose


def empty(kind, batch, heads, capacity, head, dtype=torch.bfloat16):
    """A cache whose unwritten places are NaN."""
    shape = batch, heads, capacity, head
    if kind == "16 bit":
        return CachedKV(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
    scales = torch.full((2, batch, heads, capacity), torch.nan) if kind == "token-head" else torch.tensor([0.02, 0.007])
    return CachedKV(
        *(torch.full(shape, 0x7F, dtype=torch.uint8) for _ in range(2)), *scales, torch.zeros(1, dtype=torch.int32)
    )


def values(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(kernels, kind, batch, heads, tokens, head, dtype=torch.bfloat16, capacity=None):
    kv = empty(kind, batch, heads, capacity or tokens, head, dtype)
    kernels(False)
    k, v = (values(batch, heads, tokens, head, dtype=dtype, seed=seed) for seed in (1, 2))
    attention.append(kv, k, v)
    return kv


def exact(q, kv, scaling, first, last, mask=None):
    keys, v = (x.double() for x in kv.between(first, last).decoded(torch.float32))
    group = q.shape[1] // keys.shape[1]
    keys, v = keys.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("bhd,bhtd->bht", q.double(), keys) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, first:last], -torch.inf)
    return torch.einsum("bht,bhtd->bhd", scores.softmax(-1), v)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head, tokens, group", [(32, 1, 1), (32, 300, 8), (64, 17, 3), (128, 130, 9)])
def test_attention(kernels, kind, head, tokens, group):
    """One token and many, one split and several, odd groups, more query heads than a block takes."""
    kv = filled(kernels, kind, 2, 2, tokens, head)
    q = values(2, 2 * group, head, seed=3)
    kernels(True)
    found = attention.attend(q, kv, head**-0.5, tokens)
    assert_sqnr(found, exact(q, kv, head**-0.5, 0, tokens), FLOOR_DB[torch.bfloat16])
    kernels(False)
    assert_sqnr(attention.attend(q, kv, head**-0.5, tokens), found, FLOOR_DB[torch.bfloat16] - 3)


@pytest.mark.parametrize("kind, head", [("layer", 256), ("token-head", 96)])
def test_other_heads(kernels, kind, head):
    kv, q = filled(kernels, kind, 1, 1, 70, head), values(1, 4, head, seed=3)
    kernels(True)
    assert_sqnr(attention.attend(q, kv, 0.06, 70), exact(q, kv, 0.06, 0, 70), FLOOR_DB[torch.bfloat16])


@pytest.mark.parametrize("kind", ["layer", "16 bit"])
def test_fp16(kernels, kind):
    kv, q = filled(kernels, kind, 1, 2, 200, 64, torch.float16), values(1, 8, 64, dtype=torch.float16, seed=3)
    kernels(True)
    found = attention.attend(q, kv, 0.125, 200)
    assert_sqnr(found, exact(q, kv, 0.125, 0, 200), FLOOR_DB[torch.float16])


@pytest.mark.parametrize(
    "window, tokens", [(0, 150), (1, 150), (16, 150), (149, 150), (150, 150), (400, 150), (129, 300)]
)
def test_window_edges_with_the_length_on_the_device(kernels, window, tokens):
    """Capacity beyond the length holds NaN: it is not read."""
    kv, q = filled(kernels, "token-head", 1, 2, tokens, 32, capacity=tokens), values(1, 4, 32, seed=3)
    room = empty("token-head", 1, 2, 512, 32)
    for name in ("keys", "values", "k_scale", "v_scale"):
        getattr(room, name)[:, :, :tokens] = getattr(kv, name)
    length = torch.tensor([tokens - 1], dtype=torch.int32)
    first = max(0, tokens - window) if window else 0
    for wanted in (True, False):
        kernels(wanted)
        found = attention.attend(q, room, 0.2, 1, length=length, window=window)
        assert_sqnr(found, exact(q, kv, 0.2, first, tokens), 48.0)


def test_masked_tokens_are_not_read(kernels):
    """Padding at the left holds NaN; a row that sees nothing gets zeros."""
    kv, q = filled(kernels, "layer", 3, 1, 140, 64), values(3, 4, 64, seed=3)
    mask = torch.ones(3, 140, dtype=torch.bool)
    mask[0, :130], mask[2] = False, False
    for x in (kv.keys, kv.values):
        x[0, :, :130] = 0x7F
    kernels(True)
    kv.nans[0] = 1
    found = attention.attend(q, kv, 0.1, 140, mask=mask)
    kv.nans[0] = 0
    assert torch.equal(attention.attend(q, kv, 0.1, 140, mask=mask), found)
    clean = filled(kernels, "layer", 3, 1, 140, 64)
    assert_sqnr(found[:2], exact(q, clean, 0.1, 0, 140, mask)[:2], FLOOR_DB[torch.bfloat16])
    assert not found[2].any()
    kernels(False)
    again = attention.attend(q, clean, 0.1, 140, mask=mask)
    assert_sqnr(again, found, FLOOR_DB[torch.bfloat16] - 3)


def test_an_empty_cache_gives_zeros(kernels):
    kv, q = empty("layer", 1, 1, 8, 32), values(1, 2, 32)
    for wanted in (True, False):
        kernels(wanted)
        for length in (None, torch.zeros(1, dtype=torch.int32)):
            assert not attention.attend(q, kv, 1.0, 0, length=length).any()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_nan_stays_nan(kernels, kind, code):
    """A NaN key makes its heads NaN, a NaN value its own column; other heads and rows keep their bits."""
    kv, q = filled(kernels, kind, 2, 2, 40, 64), values(2, 4, 64, seed=3)
    kernels(True)
    clean = attention.attend(q, kv, 0.125, 40)
    kv.keys[0, 1, 39, 63], kv.nans[0] = code, 1
    found = attention.attend(q, kv, 0.125, 40)
    assert found[0, 2:].isnan().all() and torch.equal(found[0, :2], clean[0, :2]) and torch.equal(found[1], clean[1])
    kv.keys[0, 1, 39, 63] = 0
    kv.values[1, 0, 5, 17] = code
    found = attention.attend(q, kv, 0.125, 40)
    assert found[1, :2, 17].isnan().all() and found.isnan().sum() == 2


@pytest.mark.parametrize("kind", KINDS)
def test_views_into_a_longer_cache(kernels, kind):
    kv, q = filled(kernels, kind, 2, 2, 200, 64), values(2, 4, 64, seed=3)
    kernels(True)
    view = kv.between(37, 180)
    own = CachedKV(*(None if x is None else x.clone() for x in vars(view).values()))
    assert torch.equal(attention.attend(q, view, 0.125, 143), attention.attend(q, own, 0.125, 143))


def test_one_row_gets_the_same_bits_alone(kernels):
    kv, q = filled(kernels, "layer", 3, 1, 64, 64), values(3, 4, 64, seed=3)
    kernels(True)
    together = attention.attend(q, kv, 0.125, 64)
    alone = CachedKV(kv.keys[1:2], kv.values[1:2], kv.k_scale, kv.v_scale, kv.nans)
    assert torch.equal(attention.attend(q[1:2], alone, 0.125, 64)[0], together[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("head", [2, 40, 128])
def test_append(kernels, kind, dtype, head):
    """Codes and scales bit for bit, to the given place and nowhere else; Inf, NaN, zeros, a transposed view."""
    k = values(2, 3, 5, head, dtype=dtype) * 30
    v = values(2, 5, 3, head, dtype=dtype, seed=1).transpose(1, 2)
    k[0, 0, 0] = 0
    k[0, 1, 1, 0], k[1, 2, 2, 1], v[1, 0, 0, 0] = torch.inf, torch.nan, -torch.inf
    caches = [empty(kind, 2, 3, 16, head, dtype) for _ in range(2)]
    for wanted, kv in zip((True, False), caches, strict=True):
        kernels(wanted)
        attention.append(kv, k, v, 2, length=torch.tensor([4], dtype=torch.int32))
    for name in ("keys", "values") + (("k_scale", "v_scale") if kind == "token-head" else ()):
        found, want = (getattr(kv, name) for kv in caches)
        assert torch.equal(found, want) if found.dtype == torch.uint8 else same(found, want), name
        assert (found[:, :, 6:11] != found[:, :, :1]).any()
    assert kind == "16 bit" or all(kv.nans[0] == 1 for kv in caches)
    if kind != "16 bit":
        kv = empty(kind, 2, 3, 16, head, dtype)
        kernels(True)
        attention.append(kv, v, v)
        assert kv.nans[0] == 0


def test_offsets_beyond_32_bits(kernels):
    """The second row begins behind 2^31 bytes, most of which nothing touches."""
    capacity = (1 << 24) + 1000
    wide = CachedKV(
        *(torch.empty((2, 1, capacity, 128), dtype=torch.uint8) for _ in range(2)),
        *torch.tensor([0.02, 0.007]),
        torch.zeros(1, dtype=torch.int32),
    )
    k, v, q = values(2, 1, 40, 128, seed=1), values(2, 1, 40, 128, seed=2), values(2, 4, 128, seed=3)
    kernels(True)
    attention.append(wide, k, v, capacity - 40)
    found = attention.attend(q, wide, 0.09, capacity, window=40)
    small = filled(kernels, "layer", 2, 1, 40, 128)
    assert torch.equal(wide.keys[:, :, -40:], small.keys) and torch.equal(wide.values[:, :, -40:], small.values)
    kernels(True)
    assert torch.equal(found, attention.attend(q, small, 0.09, 40))


def test_splits_fill_the_gpu():
    assert most_splits(8, 132, 3) == 49 and most_splits(1, 132, 3) == MOST_SPLITS and most_splits(1000, 132, 2) == 1
    for rows in range(1, 400):
        assert rows * most_splits(rows, 132, 3) <= max(rows, 3 * 132)
    assert attention_block(128, 0, False).tokens == 128 and attention_block(128, 0, True).tokens == 64
    assert attention_block(128, 1, False).resident == 2 and attention_block(64, 1, False).resident == 3


@pytest.mark.parametrize(
    "head, dtype, kind, gpu, word",
    [
        (128, torch.bfloat16, attention.LAYER, "sm75", "sm80 or later"),
        (80, torch.bfloat16, attention.LAYER, "h100", "multiple of 32"),
        (256, torch.bfloat16, attention.SIXTEEN_BIT, "h100", "128 at most"),
        (128, torch.float32, attention.TOKEN_HEAD, "rtx3090", "16-bit inputs"),
    ],
)
def test_reasons(head, dtype, kind, gpu, word):
    assert word in attention.refused(head, dtype, kind, fake_caps(gpu))
