"""verify survives any folder: 1,000 mutated checkpoints here, 100,000 in `make soak`."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.base.errors import CheckpointError
from octavo.workflows.verify import VerifyConfig, verify
from tests.workflows.broken import decoder, quantize

ROOT = Path(__file__).parents[2]


def good_folders(root: Path) -> Path:
    """Small enough that verify is done with one in milliseconds, of every layout, with and without an index."""
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    shape = {"heads": 2, "kv": 1, "dim": 16, "inter": 48, "hidden": 32, "expert_inter": 16}
    folders = {
        kind: quantize(decoder(family, layers=2, experts=experts, **shape), kind, block=16)
        for kind, family, experts in (
            ("block", "qwen3", 0),
            ("ct-channel", "llama", 0),
            ("ct-static", "qwen2", 0),
            ("tensor", "llama", 0),
            ("modelopt", "llama", 0),
            ("ct-block", "mixtral", 2),
        )
    }
    folders["moe"] = quantize(decoder("qwen3_moe", experts=2, **shape), "block", block=16)
    folders["ct-channel"].quant["kv_cache_scheme"] = kv
    for layer in range(2):
        folders["ct-channel"].tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([0.05])
    for name, folder in folders.items():
        if name in ("block", "ct-static", "ct-block"):
            folder.two_shards(lambda n: "layers.1" in n)
        folder.files = {"generation_config.json": {"eos_token_id": 2}}
        if name == "modelopt":
            body = {"quant_algo": "FP8", "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
            folder.files["hf_quant_config.json"] = {"producer": {"name": "modelopt"}, "quantization": body}
            del folder.config["quantization_config"]
        folder.write(root / name)
    return root


def fuzz(root: Path, first: int, count: int) -> dict:
    good = good_folders(root / "good")
    work = root / "work"
    shutil.copytree(good / "block", work / "reference")
    command = [sys.executable, "-m", "tests.workflows.fuzz", str(good), str(work)]
    command += ["--first", str(first), "--count", str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def check(answer: dict) -> None:
    assert answer["failures"] == []
    assert answer["rss_rise_mb"] < 300, answer
    verdicts = answer["verdicts"]
    assert {"ok", "warn", "error"} <= set(verdicts), "mutations that all end alike test little"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mutated_checkpoints_get_a_verdict(tmp_path):
    check(fuzz(tmp_path, 0, 1000))


JSON_FILES = ["config.json", "model.safetensors.index.json", "generation_config.json", "tokenizer_config.json"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [*JSON_FILES, "chat_template.json", "hf_quant_config.json"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    """In the folder or in its reference, in place of any JSON file that verify reads."""
    folder = good_folders(tmp_path / "good") / "ct-static"
    piped = tmp_path / "piped"
    shutil.copytree(folder, piped)
    (piped / name).unlink(missing_ok=True)
    os.mkfifo(piped / name)
    verdict = verify(VerifyConfig(folder=piped, reference=folder)).verdict
    assert verdict == "error" or name not in JSON_FILES[:2]
    with contextlib.suppress(CheckpointError):
        verify(VerifyConfig(folder=folder, reference=piped))


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(4))
def test_a_hundred_thousand_mutated_checkpoints(part, tmp_path):
    check(fuzz(tmp_path, part * 25_000, 25_000))


def test_the_fuzzer_notices(tmp_path, monkeypatch):
    """A verify that crashes, reads elsewhere or calls damaged files good would be reported."""
    from octavo.workflows import verify as module
    from tests.workflows import fuzz as script

    files = script.pristine(good_folders(tmp_path / "good") / "ct-static")
    work = tmp_path / "work"
    work.mkdir()
    opened = script.Opened()
    seed = next(s for s in range(99) if any("data_end" in text for text in script.mutate(files, s).log))

    def crash(config):
        raise KeyError("x")

    def elsewhere(config):
        (tmp_path / "good" / "block" / "config.json").read_text()
        return module.verify(config)

    class Fine:
        verdict = "ok"

    for broken_verify, said in ((crash, "KeyError"), (elsewhere, "opened"), (lambda config: Fine, "refuses")):
        monkeypatch.setattr(script, "verify", broken_verify)
        assert said in script.one(seed, files, work, opened)[1]
