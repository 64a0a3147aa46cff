"""verify with real engines: Transformers in this process, and the protocol of the vLLM probe."""

import json

import pytest
import torch

from octavo.base.errors import ConfigError
from octavo.workflows.rules import running
from octavo.workflows.rules.findings import Findings, verdict
from octavo.workflows.verify import VerifyConfig, verify
from tests.workflows.broken import decoder, quantize

LOADABLE = {"ct-channel": "ok", "ct-block": "ok", "ct-static": "ok", "block": "ok", "tensor": "error"}


def logits(folder, path):
    config = VerifyConfig(folder=folder.write(path / "ckpt"), engine="transformers", gpu="cpu", logits=True)
    return verify(config)


@pytest.mark.parametrize("kind", LOADABLE)
def test_static_verdict_is_what_transformers_does(kind, tmp_path):
    report = logits(quantize(decoder(layers=2), kind), tmp_path)
    codes = {f.code for f in report.findings}
    assert report.engines["transformers"].verdict == LOADABLE[kind] == report.verdict
    assert ("logits-agree" in codes) == (LOADABLE[kind] == "ok"), report.findings


def test_lost_scale_shows_in_the_logits(tmp_path):
    folder = quantize(decoder(), "ct-channel")
    del folder.tensors["model.layers.0.mlp.down_proj.weight_scale"]
    codes = {f.code for f in logits(folder, tmp_path).findings if f.severity == "error"}
    assert {"scale-missing", "transformers-missing"} <= codes


def test_a_folder_transformers_refuses(tmp_path):
    folder = quantize(decoder(), "ct-channel")
    name = "model.layers.0.mlp.down_proj.weight"
    folder.tensors[name] = folder.tensors[name].view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)
    assert "transformers-load" in {f.code for f in logits(folder, tmp_path).findings}


GOOD = {"loads": True, "error": "", "text": " Paris", "logprobs": [-0.1], "prompt_logprobs": [-2.0], "kernels": ["K"]}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, "vllm-runs"),
        ({"loads": False, "error": "ValueError: x"}, "vllm-load"),
        ({"error": "AssertionError: y"}, "vllm-run"),
        ({"logprobs": [None]}, "vllm-nan"),
    ],
    ids=["good", "refused", "crashed", "nan"],
)
def test_answers_of_the_probe(change, code, tmp_path, monkeypatch):
    class Done:
        returncode, stderr = 0, ""
        stdout = "noise\n" + json.dumps(GOOD | change)

    commands = []
    monkeypatch.setattr(running.subprocess, "run", lambda command, **more: commands.append(command) or Done)
    python = tmp_path / "python"
    python.touch()
    out = Findings()
    answer = running.run_vllm(tmp_path, python, 2, out)
    assert answer == GOOD | change
    assert [f.code for f in out.all()] == [code]
    assert verdict(out.all()) == ("ok" if not change else "error")
    assert "--token-ids" in commands[0] and "--engine" in commands[0]


def test_an_interpreter_without_vllm_is_a_wrong_setting(tmp_path):
    with pytest.raises(ConfigError):
        running.run_vllm(tmp_path, tmp_path / "none", 1, Findings())
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no vllm >&2; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="no vllm"):
        running.run_vllm(tmp_path, python, 1, Findings())
