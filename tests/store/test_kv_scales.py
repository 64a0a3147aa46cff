"""Scales of the KV cache in a checkpoint: names, shapes and declaration, judged by compressed_tensors and by verify."""

import json

import pytest
import torch

from octavo.base.errors import ConfigError, MismatchError
from octavo.formats.recipe import Recipe
from octavo.store.conversion import convert_checkpoint
from octavo.store.kv_scales import kv_tensors, stored_kv_scales
from octavo.store.manifest import fingerprint
from octavo.store.scales import KVScales, Scales
from octavo.store.schema import validate_ct
from octavo.store.tensors import Checkpoint

LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")


def scales_of(folder, layers=LAYERS):
    kv = {
        name: KVScales(k_amax=448 * (i + 1) / 8, v_amax=7.0, k_scale=(i + 1) / 8, v_scale=7 / 448)
        for i, name in enumerate(layers)
    }
    values = {"data_fingerprint": "", "samples": 1, "tokens": 1, "modules": {}}
    return Scales(model_fingerprint=fingerprint(folder), kv=kv, **values)


def convert(source, out, scheme="channel", layout="ct", **settings):
    recipe = Recipe.named(scheme)
    convert_checkpoint(Checkpoint.open(source), out, recipe, layout=layout, kv_cache="fp8", **settings)
    return Checkpoint.open(out)


@pytest.mark.parametrize(("scheme", "layout", "shape"), [("channel", "ct", (1,)), ("block128", "native", ())])
def test_scales_are_stored_beside_the_attention(tiny_llama_128, tmp_path, scheme, layout, shape):
    out = convert(tiny_llama_128, tmp_path / "out", scheme, layout, scales=scales_of(tiny_llama_128))
    found = {name: out.get(name) for name in out.names() if name.endswith(("k_scale", "v_scale"))}
    assert sorted(found) == sorted(f"{layer}.{letter}_scale" for layer in LAYERS for letter in "kv")
    assert all(tensor.dtype == torch.float32 and tuple(tensor.shape) == shape for tensor in found.values())
    assert [stored_kv_scales(out, layer) for layer in LAYERS] == [(1 / 8, 7 / 448), (2 / 8, 7 / 448)]
    assert stored_kv_scales(Checkpoint.open(tiny_llama_128), LAYERS[0]) is None


def test_the_declaration_is_one_that_compressed_tensors_accepts(tiny_llama_128, tmp_path):
    from compressed_tensors.quantization import QuantizationConfig

    out = convert(tiny_llama_128, tmp_path / "out", scales=scales_of(tiny_llama_128))
    quantization = out.config["quantization_config"]
    validate_ct(quantization)
    scheme = QuantizationConfig.model_validate(quantization).kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.strategy, scheme.dynamic) == (8, "float", "tensor", False)
    plain = tmp_path / "plain"
    convert_checkpoint(Checkpoint.open(tiny_llama_128), plain, Recipe.named("channel"))
    assert json.loads((plain / "config.json").read_text())["quantization_config"]["kv_cache_scheme"] is None
    for name in Checkpoint.open(plain).names():  # nothing else changes
        assert torch.equal(Checkpoint.open(plain).get(name).view(torch.uint8), out.get(name).view(torch.uint8)), name


def test_scales_that_the_source_holds_are_replaced(tiny_llama_128, tmp_path):
    first = convert(tiny_llama_128, tmp_path / "first", scales=scales_of(tiny_llama_128))
    again = scales_of(first.folder)
    again = again.model_copy(update={"kv": {k: v.model_copy(update={"k_scale": 0.5}) for k, v in again.kv.items()}})
    second = convert(first.folder, tmp_path / "second", scales=again, dequantize=True)
    assert stored_kv_scales(second, LAYERS[0]) == (0.5, 7 / 448)


def test_latent_attention_has_a_spelling_of_its_own(tiny_llama_128):
    source = Checkpoint.open(tiny_llama_128)
    source.config["kv_lora_rank"] = 16
    assert sorted(kv_tensors(scales_of(tiny_llama_128, LAYERS[:1]), source, "ct")) == [
        f"{LAYERS[0]}.k_proj.k_scale",
        f"{LAYERS[0]}.v_proj.v_scale",
    ]


def test_what_cannot_be(tiny_llama_128, tmp_path):
    with pytest.raises(ConfigError, match=r"FP8 KV cache; got no scales\.json"):
        convert(tiny_llama_128, tmp_path / "out")
    with pytest.raises(MismatchError, match="without KV ranges"):
        convert(tiny_llama_128, tmp_path / "out", scales=scales_of(tiny_llama_128, ()))
    with pytest.raises(MismatchError, match=r"lacks; got model\.layers\.7\.self_attn"):
        convert(tiny_llama_128, tmp_path / "out", scales=scales_of(tiny_llama_128, ("model.layers.7.self_attn",)))
    with pytest.raises(ConfigError, match="'fp4' is unknown"):
        convert_checkpoint(Checkpoint.open(tiny_llama_128), tmp_path / "out", Recipe(), kv_cache="fp4")
    assert not (tmp_path / "out").exists()
