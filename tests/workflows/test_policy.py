"""One policy.json through every command that takes it."""

import pytest
import torch
from torch import nn

from octavo.base.errors import ConfigError, MismatchError
from octavo.formats.granularity import PerRow
from octavo.integrations.measuring import open_model
from octavo.integrations.transformers import load
from octavo.modules.frozen import FrozenFloat8Linear
from octavo.store.manifest import fingerprint
from octavo.store.policy import Policy, PolicyEntry
from octavo.store.run import RunFolder
from octavo.store.schema import parse_quantization_config
from octavo.store.tensors import Checkpoint
from octavo.workflows.export import ExportConfig, export
from octavo.workflows.finetune import FinetuneConfig, finetune
from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint
from octavo.workflows.verify import VerifyConfig, verify

KEPT = "model.layers.1.mlp.down_proj"
ROWS = "model.layers.0.self_attn.o_proj"
FP8 = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def policy(tiny_llama_128, tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "policy.json"
    modules = {
        KEPT: PolicyEntry(precision="16bit", reason="costs most"),
        ROWS: PolicyEntry(precision="fp8", scheme="channel", reason="costs less per channel"),
    }
    Policy(model_fingerprint=fingerprint(tiny_llama_128), scheme="block128", modules=modules).write(path)
    return path


def check(folder):
    """The files of a checkpoint do as the policy says."""
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.dtype(f"{KEPT}.weight") == torch.bfloat16
    assert checkpoint.dtype(f"{FP8}.weight") == torch.float8_e4m3fn
    scheme = parse_quantization_config(checkpoint.config)
    assert scheme.skips(KEPT) and scheme.group_of(ROWS).granularity == PerRow()
    assert str(scheme.group_of(FP8).granularity) == "block128x128"


def test_quantize_and_verify(tiny_llama_128, policy, tmp_path):
    out = tmp_path / "out"
    report = quantize_checkpoint(QuantizeConfig(model=str(tiny_llama_128), out=out, policy=policy))
    assert report.scheme == "block128", "the scheme it was tuned for, since none was named"
    check(out)
    found = verify(VerifyConfig(folder=out, policy=policy, gpu="sm90"))
    assert found.verdict == "ok", found.findings
    quantize_checkpoint(QuantizeConfig(model=str(tiny_llama_128), out=tmp_path / "plain"))
    broken = verify(VerifyConfig(folder=tmp_path / "plain", policy=policy, gpu="sm90", quick=True))
    assert [f.where for f in broken.findings if f.code == "policy-broken"] == [KEPT]


def test_verify_of_another_model(tiny_llama, policy, tmp_path):
    quantize_checkpoint(QuantizeConfig(model=str(tiny_llama), out=tmp_path / "out"))
    found = verify(VerifyConfig(folder=tmp_path / "out", policy=policy, gpu="sm90", quick=True))
    assert "policy-model" in {f.code for f in found.findings} and found.verdict == "error"
    (tmp_path / "out" / "octavo_manifest.json").unlink()
    found = verify(VerifyConfig(folder=tmp_path / "out", policy=policy, gpu="sm90", quick=True))
    assert "policy-model-unknown" in {f.code for f in found.findings}


def test_load(tiny_llama_128, policy):
    model = load(tiny_llama_128, policy=policy)
    assert type(model.get_submodule(KEPT)) is nn.Linear
    rows = model.get_submodule(ROWS)
    assert isinstance(rows, FrozenFloat8Linear) and rows.rule.granularity == PerRow()
    assert str(model.get_submodule(FP8).rule.granularity) == "block128x128"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scheme": "channel"}, MismatchError, "tuned for scheme block128"),
        ({"layout": "native"}, ConfigError, "one kind of scales"),
    ],
)
def test_what_does_not_go_with_it(tiny_llama_128, policy, tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        quantize_checkpoint(QuantizeConfig(model=str(tiny_llama_128), out=tmp_path / "out", policy=policy, **options))
    assert not (tmp_path / "out").exists()


def test_another_model_is_refused(tiny_llama, policy, tmp_path):
    with pytest.raises(MismatchError, match="of another model"):
        quantize_checkpoint(QuantizeConfig(model=str(tiny_llama), out=tmp_path / "out", policy=policy))
    with pytest.raises(MismatchError, match="of another model"):
        load(tiny_llama, policy=policy)


def test_finetune_trains_with_it_and_export_follows(tiny_llama_128, policy, tmp_path):
    (tmp_path / "train.txt").write_text("the quick brown fox jumps over the lazy dog. " * 80)
    settings = {
        "rank": 4,
        "max_steps": 2,
        "context": 32,
        "accumulation": 1,
        "save_every": 1,
        "target_modules": ("q_proj",),
    }
    settings |= {"model": str(tiny_llama_128), "data": str(tmp_path / "train.txt"), "out": tmp_path / "run"}
    finetune(FinetuneConfig(policy=policy, **settings))
    assert finetune(FinetuneConfig(policy=policy, resume="auto", **{**settings, "max_steps": 3})).resumed_from == 2
    kept = RunFolder(tmp_path / "run").read_policy().modules
    assert kept[KEPT].precision == "16bit" and kept[ROWS].scheme == "channel" and kept[FP8].precision == "fp8"
    base = open_model(tmp_path / "run").model.get_submodule(f"base_model.model.{KEPT}")
    assert type(base) is nn.Linear
    report = export(ExportConfig(run=tmp_path / "run", out=tmp_path / "out"))
    check(tmp_path / "out")
    assert KEPT in report.kept_16bit
    export(ExportConfig(run=tmp_path / "run", out=tmp_path / "again", policy=policy))
    check(tmp_path / "again")
    changed = Policy.read(policy)
    changed.modules[FP8] = PolicyEntry(precision="16bit")
    changed.write(tmp_path / "changed.json")
    with pytest.raises(MismatchError, match="other settings: policy"):
        finetune(FinetuneConfig(policy=tmp_path / "changed.json", resume="auto", **settings))
    kept = policy.read_bytes()
    policy.write_bytes((tmp_path / "changed.json").read_bytes())
    try:
        with pytest.raises(MismatchError, match=f"another policy: {FP8}"):
            finetune(FinetuneConfig(policy=policy, resume="auto", **settings))
    finally:
        policy.write_bytes(kept)
