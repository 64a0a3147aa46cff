"""residual_norm.cu, gate.cu and the rotary form of kv_store.cu on the host, against plain torch."""

import pytest
import torch

from octavo.ops import decode
from octavo.ops.attention import CachedKV
from octavo.testing import assert_sqnr
from tests.kernels.test_attention import KINDS, empty, values

pytestmark = pytest.mark.usefixtures("on_host")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@DTYPES
@pytest.mark.parametrize("k", [8, 576, 4096, 16384])
@pytest.mark.parametrize("with_delta", [False, True])
def test_residual_norm(both, dtype, k, with_delta):
    """The residual bit for bit; the norm but where the order of a sum moves a rounding."""

    def run():
        residual = values(3, k, dtype=dtype)
        delta = values(3, k, dtype=dtype, seed=1) if with_delta else None
        return decode.residual_norm(delta, residual, values(k, dtype=dtype, seed=2), 1e-6), residual

    (found, residual), (want, want_residual) = both(run)
    assert torch.equal(residual, want_residual)
    assert (found != want).float().mean() < 2e-3
    assert_sqnr(found, want, 60.0)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("k", [8, 1032])
def test_gate(both, dtype, activation, k):
    found, want = both(lambda: decode.gate(values(3, 2 * k, dtype=dtype) * 4, activation))
    assert_sqnr(found, want, 60.0)
    if activation == "silu":  # torch's tanh is -1 where ours still has digits
        assert (found != want).float().mean() < 0.01


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "head, tokens, normed, padded",
    [(64, 1, False, False), (96, 3, True, True), (128, 1, True, False), (32, 1, False, True), (32, 4, False, False)],
)
def test_rotate_and_append(both, kind, dtype, head, tokens, normed, padded):
    """Queries, codes and scales: bit for bit without the norm, whose sum has another order."""
    batch, q_heads, heads = 2, 5, 2
    angle = torch.rand(40, head // 2, generator=torch.Generator().manual_seed(5)) * 6
    padding = torch.tensor([0, 11], dtype=torch.int32) if padded else None
    positions = decode.Positions(angle.cos().to(dtype), angle.sin().to(dtype), padding)
    norms = decode.HeadNorms(*(values(head, dtype=dtype, seed=s) for s in (3, 4)), 1e-6) if normed else None
    qkv = values(batch * tokens, (q_heads + 2 * heads) * head, dtype=dtype)

    def run():
        kv = empty(kind, batch, heads, 16, head, dtype)
        length = torch.tensor([9], dtype=torch.int32)
        return decode.rotate_and_append(qkv, kv, q_heads, positions, length, norms), kv

    (q, kv), (want_q, want_kv) = both(run)
    new = slice(9, 9 + tokens)
    assert kv.values[:, :, new].equal(want_kv.values[:, :, new]) and q.shape == (batch, tokens, q_heads, head)
    if not normed:
        assert torch.equal(q, want_q) and kv.keys[:, :, new].equal(want_kv.keys[:, :, new])
    assert_sqnr(q, want_q, 55.0)
    found, want = (CachedKV.between(x, 9, 9 + tokens).decoded(torch.float32)[0] for x in (kv, want_kv))
    assert_sqnr(found, want, 30.0)
    assert CachedKV.between(kv, 8, 9).decoded(torch.float32)[0].isnan().all()
