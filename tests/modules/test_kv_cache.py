"""What an FP8 cache holds, against the formats' own arithmetic."""

import pytest
import torch

from octavo.base.errors import UnsupportedError
from octavo.formats.granularity import PerRow, PerTensor
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.spec import E4M3
from octavo.modules.kv_cache import Float8KVWriter


class Cache:
    """Hands back what it was given."""

    def update(self, keys, values, layer, *args, **kwargs):
        return keys, values


def written(writer, keys, values, layer=0):
    return writer.watch(Cache()).update(keys, values, layer, "extra", word=1)


@pytest.fixture
def kv():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 5, 16, generator=generator) * 20, torch.randn(2, 3, 5, 16, generator=generator)


def test_one_scale_for_the_keys_and_one_for_the_values_of_a_layer(kv):
    got = written(Float8KVWriter(scales={7: (0.25, 0.003)}), *kv, layer=7)
    for x, y, scale in zip(kv, got, (0.25, 0.003), strict=True):
        assert torch.equal(y, dequantize_ref(quantize_ref(x, E4M3, PerTensor(), scale=torch.tensor(scale))))


def test_a_scale_for_every_token_and_head(kv):
    for x, y in zip(kv, written(Float8KVWriter("token-head"), *kv), strict=True):
        assert torch.equal(y, dequantize_ref(quantize_ref(x, E4M3, PerRow())))


def test_values_beyond_the_range_saturate_and_are_counted(kv):
    keys, values = kv[0].clone(), kv[1]
    keys[0, 0, 0, :3] = torch.tensor([448.0, 449.0, -1000.0])
    writer = Float8KVWriter()
    got = written(writer, keys, values)[0]
    assert got[0, 0, 0, :3].tolist() == [448, 448, -448]
    assert (writer.counts[0].clipped, writer.counts[0].values) == (2, 2 * 480)


def test_other_layers_keep_16_bit(kv):
    writer = Float8KVWriter(layers={1})
    assert all(a is b for a, b in zip(kv, written(writer, *kv, layer=0), strict=True))
    assert not torch.equal(written(writer, *kv, layer=1)[0], kv[0]) and list(writer.counts) == [1]


def test_bfloat16_stays_bfloat16(kv):
    got = written(Float8KVWriter("token-head"), *(x.bfloat16() for x in kv))
    assert all(x.dtype == torch.bfloat16 for x in got)


def test_expanded_keys_of_latent_attention_are_refused(kv):
    assert written(Float8KVWriter(latent=16), *kv)
    with pytest.raises(UnsupportedError, match="layer 0 shows expanded keys"):
        written(Float8KVWriter(latent=8), *kv)
