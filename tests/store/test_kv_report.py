"""Reports on an FP8 KV cache that were edited by hand."""

import json

import pytest

from octavo.base.errors import ConfigError
from octavo.store.kv_report import KVCacheReport
from octavo.store.manifest import fingerprint
from octavo.store.tensors import Checkpoint

FIGURES = {
    "scale": "one",
    "query": "16bit",
    "tokens": 64,
    "windows": 2,
    "rise_percent": 0.0,
    "rise_percent_se": None,
    "kl": 0.001,
    "kl_se": None,
    "kl_p99": 0.01,
    "greedy_changed": 0.0,
    "greedy_changed_se": None,
    "clipped": 0.0,
    "limit": 0.01,
    "verdict": "safe",
    "reason": "",
}
LAYER = {"layer": 0, "name": "model.layers.0.self_attn", "k_scale": 1.0, "v_scale": 1.0, "clipped": 0.0}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"kl": 5.0}, "verdict safe with KL 5.0"),
        ({"kl": float("nan")}, "verdict safe with KL nan"),
        ({"limit": float("nan")}, "limit nan"),
        ({"limit": float("inf")}, "limit inf"),
        ({"keep_layers": [-1, 99]}, "keep_layers names"),
        ({"verdict": "keep-layers", "keep_layers": [0]}, "KL None"),
        ({"layers": [{**LAYER, "k_scale": float("nan")}]}, "no positive number"),
        ({"layers": [{**LAYER, "v_scale": -1.0}]}, "no positive number"),
    ],
)
def test_a_verdict_that_its_figures_do_not_bear_is_refused(tmp_path, tiny_llama, changed, words):
    model = Checkpoint.open(tiny_llama)
    path = tmp_path / "kv.json"
    block = {"model_fingerprint": fingerprint(model), **FIGURES, "layers": [LAYER], **changed}
    path.write_text(json.dumps({"kv_cache": block}))
    if not words:
        assert KVCacheReport.load(path, model).verdict == "safe"
        return
    with pytest.raises(ConfigError, match=f"no report on a KV cache; got .*{words}"):
        KVCacheReport.load(path, model)
