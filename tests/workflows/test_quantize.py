"""The quantize job: settings, bad input, reports, real kills and a real full disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from octavo.base.errors import CheckpointError, ConfigError, InputError, MismatchError, OctavoError, RefusedError
from octavo.cli import main
from octavo.formats.granularity import PerRow
from octavo.formats.reference import quantize_ref
from octavo.formats.spec import E4M3
from octavo.store.manifest import fingerprint
from octavo.store.raw_header import INDEX
from octavo.store.schema import read_scaled
from octavo.store.tensors import Checkpoint
from octavo.workflows.quantize import QuantizeConfig, parse_size, quantize_checkpoint
from octavo.workflows.rules import planned
from tests.store.conftest import gaussian, write_checkpoint

AT = "model.layers.0"
SHAPES = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "mlp.down_proj": (256, 320)}


@pytest.fixture
def model(tmp_path):
    every = {f"{AT}.{name}.weight": gaussian(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}
    every |= {"lm_head.weight": gaussian(32, 256), f"{AT}.input_layernorm.weight": gaussian(256)}
    folder = write_checkpoint(tmp_path / "model", [dict(list(every.items())[:2]), dict(list(every.items())[2:])])
    (folder / "tokenizer.json").write_text("{}")
    return folder


def config(model, **options):
    return QuantizeConfig(model=str(model), out=model.parent / "out", **options)


def test_report_says_what_became_of_each_module(model):
    report = quantize_checkpoint(config(model, scheme="block128"))
    found = {m.module: m for m in report.modules}
    assert found[f"{AT}.self_attn.q_proj"].rule == "e4m3 block128x128"
    assert found["lm_head"].rule == "" and "16 bit" in found["lm_head"].reason
    assert [m.module for m in report.fallbacks] == [f"{AT}.mlp.down_proj"]
    assert "K is not a multiple of 128" in report.fallbacks[0].reason
    assert (report.quantized, report.kept) == (3, 1)
    assert report.bytes_out < report.bytes_in
    assert json.loads(report.to_json())["files"] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_every_float_dtype(tmp_path, dtype):
    weight = gaussian(64, 48, dtype=dtype)
    model = write_checkpoint(tmp_path / "model", [{f"{AT}.mlp.down_proj.weight": weight}])
    quantize_checkpoint(config(model))
    q = read_scaled(Checkpoint.open(tmp_path / "out"), f"{AT}.mlp.down_proj")
    assert torch.equal(q.codes, quantize_ref(weight, E4M3, PerRow()).codes)


def test_codes_are_the_oracle_s_through_the_fast_path(model):
    quantize_checkpoint(config(model))
    source, result = Checkpoint.open(model), Checkpoint.open(model.parent / "out")
    for name in SHAPES:
        q = read_scaled(result, f"{AT}.{name}")
        want = quantize_ref(source.get(f"{AT}.{name}.weight"), E4M3, PerRow())
        assert torch.equal(q.codes, want.codes) and torch.equal(q.scale, want.scale)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"scheme": "chanel"}, "channel"),
        ({"layout": "nativ"}, "native"),
        ({"scale_format": "po3"}, "po2"),
        ({"rounding": "nearst"}, "nearest"),
        ({"rounding": "compensated"}, "moments"),
        ({"method": "absmx"}, "absmax"),
        ({"activation": "tokens"}, "token"),
        ({"max_shard_size": "5 apples"}, "5GB"),
        ({"layout": "native"}, "block128"),
        ({"scheme": "block128", "activation": "static"}, "group128"),
    ],
)
def test_bad_settings_name_the_remedy(model, options, word):
    with pytest.raises(ConfigError, match=word):
        quantize_checkpoint(config(model, **options))
    assert not (model.parent / "out").exists()


def test_unknown_key(model):
    with pytest.raises(ConfigError, match="scale_format"):
        QuantizeConfig.parse({"model": "m", "out": "o", "scale_formt": "po2"})


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("1000", 1000)])
def test_sizes(text, size):
    assert parse_size(text) == size


def truncate(model):
    path = model / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def index(key, value):
    def edit(model):
        values = json.loads((model / INDEX).read_text())
        values["weight_map"][key] = value
        (model / INDEX).write_text(json.dumps(values))

    return edit


def pickled(model):
    for path in model.glob("*.safetensors*"):
        path.unlink()
    torch.save({"a": torch.zeros(2)}, model / "pytorch_model.bin")


BAD_INPUT = {
    "missing-folder": (shutil.rmtree, "does not exist|nothing there"),
    "empty-folder": (lambda m: (shutil.rmtree(m), m.mkdir()), "config.json"),
    "truncated-shard": (truncate, "model-00002-of-00002.safetensors"),
    "missing-shard": (lambda m: (m / "model-00002-of-00002.safetensors").unlink(), "model-00002-of-00002"),
    "index-leaves-folder": (index("x", "../../etc/model.safetensors"), "outside of the folder"),
    "pickle": (pickled, "pytorch_model.bin.*pickle"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_leaves_nothing(model, case):
    spoil, message = BAD_INPUT[case]
    spoil(model)
    with pytest.raises(CheckpointError, match=message) as caught:
        quantize_checkpoint(config(model))
    assert caught.value.exit_code == 2
    assert [p.name for p in model.parent.iterdir()] in ([], ["model"])


def test_quantized_input_and_its_three_ways(model):
    quantize_checkpoint(config(model, scheme="tensor"))
    fp8 = model.parent / "out"
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_checkpoint(QuantizeConfig(model=str(fp8), out=model.parent / "again"))
    again = QuantizeConfig(model=str(fp8), out=model.parent / "again", fp8_input="dequantize")
    assert quantize_checkpoint(again).quantized == 3
    renamed = QuantizeConfig(model=str(fp8), out=model.parent / "native", fp8_input="relayout", layout="native")
    report = quantize_checkpoint(renamed)
    assert report.quantized == 3 and report.fallbacks == []
    assert Checkpoint.open(model.parent / "native").config["quantization_config"]["quant_method"] == "fp8"


def test_scales_of_another_model(model, tmp_path):
    from octavo.store.scales import Scales

    Scales(model_fingerprint="sha256:other", data_fingerprint="d", samples=1, tokens=1, modules={}).write(
        tmp_path / "s"
    )
    with pytest.raises(MismatchError, match="another model"):
        quantize_checkpoint(config(model, activation="static", scales=tmp_path / "s"))


def test_output_that_exists(model):
    quantize_checkpoint(config(model))
    before = fingerprint(model.parent / "out")
    with pytest.raises(InputError, match="not empty"):
        quantize_checkpoint(config(model, scheme="tensor"))
    assert fingerprint(model.parent / "out") == before
    with pytest.raises(InputError, match="apart"):
        quantize_checkpoint(QuantizeConfig(model=str(model), out=model))


@pytest.fixture
def small_disk(mount_small):
    return mount_small(1024, "disk")


def big_model(folder, megabytes, shards=3):
    rows = megabytes * 1_000_000 // 2 // 512 // shards
    parts = [{f"model.layers.{i}.mlp.down_proj.weight": gaussian(rows, 512, seed=i)} for i in range(shards)]
    return write_checkpoint(folder, parts, {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": shards})


@pytest.mark.parametrize("known_before", [True, False])
def test_full_disk(tmp_path, small_disk, monkeypatch, known_before):
    """Seen before any work when the free space is known, and again when a write fails."""
    model = big_model(tmp_path / "model", 4)
    if not known_before:
        monkeypatch.setattr("octavo.store.conversion.check_space", lambda folder, needed: None)
    with pytest.raises(InputError, match="disk is full") as caught:
        quantize_checkpoint(QuantizeConfig(model=str(model), out=small_disk / "out", max_shard_size="600KB"))
    assert caught.value.exit_code == 2
    assert os.listdir(small_disk) == []


def test_mount_point_as_output(tmp_path, small_disk):
    model = big_model(tmp_path / "model", 1)
    quantize_checkpoint(QuantizeConfig(model=str(model), out=small_disk))
    assert Checkpoint.open(small_disk).config["quantization_config"]


SLOWED = """
import sys, time
from octavo.store import writer
from octavo.workflows.quantize import QuantizeConfig, quantize_checkpoint
put = writer.ShardWriter.put
def slow(self, *args):
    time.sleep(0.01)
    return put(self, *args)
writer.ShardWriter.put = slow
print("ready", flush=True)
quantize_checkpoint(QuantizeConfig(model=sys.argv[1], out=sys.argv[2], max_shard_size="1MB"))
print("done", flush=True)
"""


def start(model, out):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SLOWED, str(model), str(out)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ, "PYTHONPATH": "."}
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    """kill -9 after ever longer times: never a folder under the final name before it is whole; the next run finishes,
    and what it writes is what an undisturbed run writes."""
    model = big_model(tmp_path / "model", 12, shards=6)
    quantize_checkpoint(QuantizeConfig(model=str(model), out=tmp_path / "whole", max_shard_size="1MB"))
    out = tmp_path / "out"
    for delay in (0.05, 0.15, 0.3, 0.5):
        process = start(model, out)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        finished = "done" in process.communicate()[0]
        if out.exists():
            assert fingerprint(out) == fingerprint(tmp_path / "whole")
            assert finished or sorted(os.listdir(out)) == sorted(os.listdir(tmp_path / "whole"))
            shutil.rmtree(out)
        else:
            assert not finished
    report = quantize_checkpoint(QuantizeConfig(model=str(model), out=out, max_shard_size="1MB"))
    assert len(report.files) > 4
    assert fingerprint(out) == fingerprint(tmp_path / "whole")
    for path in (tmp_path / "whole").iterdir():
        if path.suffix == ".safetensors":
            assert (out / path.name).read_bytes() == path.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["model", "out", "whole"]


@pytest.mark.slow
def test_a_killed_run_resumes(tmp_path):
    model = big_model(tmp_path / "model", 12, shards=6)
    process = start(model, tmp_path / "out")
    work = tmp_path / ".out.octavo-unfinished"
    until = time.monotonic() + 60
    while time.monotonic() < until and len(list(work.glob("*.safetensors"))) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = {path.name for path in work.glob("*.safetensors")}
    assert not (tmp_path / "out").exists() and len(done) >= 2
    report = quantize_checkpoint(QuantizeConfig(model=str(model), out=tmp_path / "out", max_shard_size="1MB"))
    assert set(report.resumed) == done


def test_every_error_is_ours(model):
    """A fuzz of the header bytes: whatever a shard holds, the answer is an OctavoError or a finished checkpoint."""
    path = model / "model-00001-of-00002.safetensors"
    good = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        position = int(torch.randint(0, 200, (), generator=generator))
        value = int(torch.randint(0, 256, (), generator=generator))
        path.write_bytes(good[:position] + bytes([value]) + good[position + 1 :])
        shutil.rmtree(model.parent / "out", ignore_errors=True)
        try:
            quantize_checkpoint(config(model))
        except OctavoError as error:
            assert error.exit_code == 2
            assert not (model.parent / "out").exists()
        else:
            assert Checkpoint.open(model.parent / "out")


def test_engines_that_will_not_load_it_are_named_before_and_after(tiny_llama_128, tmp_path, capsys, monkeypatch):
    """Native blocks of a Llama: SGLang's loader drops their scales. What no engine loads is not written at all."""
    arguments = ["quantize", str(tiny_llama_128), str(tmp_path / "out"), "--scheme", "block128", "--layout", "native"]
    assert main.run(arguments) == 0
    assert "not for sglang: scales-dropped" in capsys.readouterr().out
    monkeypatch.setattr(planned, "judge_everywhere", lambda model: dict.fromkeys(("vllm", "sglang"), "error: odd: x"))
    with pytest.raises(RefusedError, match="no engine could load"):
        quantize_checkpoint(QuantizeConfig(model=str(tiny_llama_128), out=tmp_path / "second"))
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
