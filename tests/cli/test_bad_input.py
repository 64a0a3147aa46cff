"""Bad input through the commands: one clear error, its exit code, and nothing left behind."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.cli.main import run

ANSWER = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def folder(tiny_llama, tmp_path):
    """A copy of the tiny model that a test may break."""
    return shutil.copytree(tiny_llama, tmp_path / "model")


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """refused(*argv) -> the error of the JSON line, after checking code, brevity and that no file appeared."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def check(*argv, code=2):
        before = sorted(work.rglob("*"))
        assert run([*map(str, argv), "--json"]) == code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert sorted(work.rglob("*")) == before
        return json.loads(out.splitlines()[-1])["error"]

    return check


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def index(file):
    def write(folder):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {ANSWER: file}}))

    return write


def pickles(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def poison(value):
    def write(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors[ANSWER][3, 5] = value
        save_file(tensors, folder / "model.safetensors")

    return write


def tokenizer_loop(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")


def config(**values):
    def write(folder):
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**found, **values}))

    return write


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (shutil.rmtree, "does not exist"),
        (empty, "config.json"),
        (truncate, "model.safetensors"),
        (index("model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors"),
        (index("../outside.safetensors"), "outside"),
        (pickles, "pytorch_model.bin"),
        (tokenizer_loop, "tokenizer.json"),
        (poison(torch.nan), ANSWER),
        (poison(torch.inf), ANSWER),
    ],
    ids=["missing", "empty", "truncated", "missing-shard", "outside", "pickle", "link-loop", "nan", "inf"],
)
def test_broken_model(folder, refused, break_it, words):
    break_it(folder)
    error = refused("quantize", folder, "out")
    assert words in error["message"] + error["fix"]


def test_a_model_type_that_is_no_text(folder, tmp_path):
    config(model_type=["llama"])(folder)
    assert run(["quantize", str(folder), str(tmp_path / "fp8")]) == 0


def test_an_argument_that_is_no_text(folder, refused):
    assert "UTF-8" in refused("quantize", folder, "out\udcff")["message"]


def test_output_that_links_to_itself(folder, refused, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert "link" in refused("quantize", folder, tmp_path / "loop")["message"]


def test_already_quantized(folder, refused, tmp_path, capsys):
    assert run(["quantize", str(folder), str(tmp_path / "fp8")]) == 0
    capsys.readouterr()
    assert "octavo requantize" in refused("quantize", tmp_path / "fp8", "out")["fix"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--scheme", "chanel"], "channel"),
        (["--layout", "natve"], "native"),
        (["--scale-format", "po3"], "po2"),
        (["--fp8-input", "maybe"], "refuse"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_unknown_word_names_the_known_ones(folder, refused, argv, words):
    error = refused("quantize", folder, "out", *argv)
    assert words in error["message"] + error["fix"]


def test_missing_arguments(refused):
    assert "model" in refused("quantize")["message"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("none.txt", None),
        ("empty.txt", b""),
        ("bad.jsonl", b"{not json"),
        ("deep.jsonl", b"[" * 100_000),
        ("surrogate.jsonl", b'{"text": "\\ud800"}'),
        ("binary.txt", b"\xff\xfe\x00"),
        ("short.txt", b"a"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_data(folder, refused, tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert name.split(".")[0] in refused("calibrate", folder, "--data", path, "--out", "scales.json")["message"]


def test_scales_of_another_model(folder, refused, tmp_path, tiny_llama_128, capsys):
    scales = tmp_path / "scales.json"
    assert run(["calibrate", str(tiny_llama_128), "--out", str(scales), "--samples", "1", "--context", "32"]) == 0
    capsys.readouterr()
    argv = ["--activation", "static", "--scheme", "tensor", "--scales", scales]
    assert refused("quantize", folder, "out", *argv)["code"] == "mismatch"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modell: demo\n", "Did you mean 'model'"),
        ("max_steps: many\n", "max_steps"),
        ("max_steps: -3\n", "max_steps"),
        ("[1, 2]\n", "mapping"),
        ("a: [\n", "YAML"),
    ],
    ids=["unknown-key", "wrong-type", "negative", "list", "syntax"],
)
def test_bad_yaml(folder, refused, tmp_path, text, words):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    error = refused("finetune", path, "--model", folder, "--data", "demo", "--out", "run")
    assert words in error["message"] + error["fix"]


def test_a_yaml_that_is_not_there(refused):
    assert "no.yaml" in refused("finetune", "no.yaml")["message"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the test asks for in vain")
@pytest.mark.parametrize("argv", [["eval"], ["calibrate"], ["finetune", "--data", "demo", "--out", "run", "--model"]])
def test_a_device_that_is_not_here(folder, refused, argv):
    assert "cuda" in refused(*argv, folder, "--device", "cuda", code=3)["message"]


def test_a_device_without_arithmetic(folder, refused):
    assert "meta" in refused("calibrate", folder, "--device", "meta", code=3)["message"]


@pytest.mark.parametrize("command", ["eval", "calibrate"])
def test_a_device_that_is_none(folder, refused, command):
    assert "gpu0" in refused(command, folder, "--device", "gpu0")["message"]


def test_verify_gives_a_verdict_where_others_give_an_error(folder, capsys):
    empty(folder)
    assert run(["verify", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["verdict"] == "error" and report["findings"][0]["severity"] == "error"


def test_flags_win_over_the_file(folder, tmp_path, capsys):
    (tmp_path / "q.yaml").write_text(f"model: {folder}\nout: {tmp_path / 'a'}\nscheme: tensor\n")
    argv = ["quantize", "--config", str(tmp_path / "q.yaml"), "--scheme", "channel", "--json"]
    assert run(argv) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["scheme"], report["out"]) == ("channel", str(tmp_path / "a"))
