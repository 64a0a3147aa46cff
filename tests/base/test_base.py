import json
import os
from pathlib import Path

import pytest

from octavo.base import env as env_module
from octavo.base.env import env
from octavo.base.errors import ConfigError, OctavoError, RefusedError, UnsupportedError, did_you_mean
from octavo.base.hardware import CPU, caps_named, caps_of
from octavo.base.log import progress
from octavo.base.report import Config, Report, atomic_write, read_yaml


class Small(Config):
    steps: int = 1
    name: str = "x"


class Result(Report):
    loss: float


def test_error_says_what_got_need_next():
    error = OctavoError("weight", got="3 rows", need="4 rows", fix="Add a row.")
    assert str(error) == "weight; got 3 rows; need 4 rows. Add a row."
    assert (OctavoError("x").exit_code, RefusedError("x").exit_code, UnsupportedError("x").exit_code) == (2, 1, 3)
    assert did_you_mean("chanel", ["channel", "tensor"]) == "Did you mean 'channel'?"
    assert "channel, tensor" in did_you_mean("zzzzz", ["channel", "tensor"])


@pytest.fixture
def fresh_env(monkeypatch):
    for key in list(os.environ):
        if key.startswith("OCTAVO_"):
            monkeypatch.delenv(key)
    env.cache_clear()
    yield monkeypatch
    env.cache_clear()


def test_env_is_read_once(fresh_env):
    fresh_env.setenv("OCTAVO_DEBUG_SYNC", "1")
    fresh_env.setenv("OCTAVO_CACHE_DIR", "/somewhere")
    assert env().debug_sync is True and env().cache_dir == Path("/somewhere")
    fresh_env.setenv("OCTAVO_DEBUG_SYNC", "0")
    assert env().debug_sync is True


@pytest.mark.parametrize(("key", "value"), [("OCTAVO_CACHEDIR", "x"), ("OCTAVO_DEBUG_SYNC", "yes")])
def test_env_mistakes_are_named(fresh_env, key, value):
    fresh_env.setenv(key, value)
    with pytest.raises(ConfigError, match=key):
        env_module.env()


@pytest.mark.parametrize(
    ("text", "sm"),
    [("sm90", (9, 0)), ("H100", (9, 0)), ("RTX 3090", (8, 6)), ("rtx-4090", (8, 9)), ("9.0", (9, 0)), ("90a", (9, 0)),
     ("B200", (10, 0)), ("B300", (10, 3)), ("sm121", (12, 1)), ("NVIDIA A100", (8, 0)), ("GeForce RTX 5090", (12, 0)),
     ("cpu", (0, 0))],
)  # fmt: skip
def test_gpu_names(text, sm):
    assert caps_named(text).sm == sm


def test_caps():
    assert not caps_named("a100").native_fp8 and caps_named("l4").native_fp8 and caps_named("h100").tag == "sm90"
    assert str(caps_named("h100")) == "h100 (sm90)" and str(CPU) == "cpu" and caps_of("cpu") == CPU
    for unknown in ("h10", "sm99", "sm_95", ""):
        with pytest.raises(ConfigError, match="unknown"):
            caps_named(unknown)


def test_config_files_and_flags(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("steps: 3\n")
    assert Small.load(path, {"steps": None, "name": "y"}) == Small(steps=3, name="y")
    assert Small.load(path, {"steps": 5}).steps == 5
    for text, match in [("step: 3", "Did you mean 'steps'"), ("steps: many", "steps"), ("- 1", "mapping"),
                        ("a: [", "not readable YAML"), ("1: 2", "mapping")]:  # fmt: skip
        path.write_text(text)
        with pytest.raises(ConfigError, match=match):
            Small.load(path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="a folder; need a YAML file"):
        read_yaml(tmp_path)
    path.write_text("")
    assert Small.load(path) == Small()


def test_report_is_json(tmp_path):
    Result(loss=float("nan")).write(tmp_path / "a" / "r.json")
    assert json.loads((tmp_path / "a" / "r.json").read_text()) == {"loss": None}
    assert json.loads(Result(loss=1.5).to_json()) == {"loss": 1.5}


def test_atomic_write_keeps_the_old_file_on_failure(tmp_path, monkeypatch):
    path = tmp_path / "f"
    atomic_write(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["f"]


def test_progress_is_silent_without_a_terminal(capsys):
    with progress("work", 3) as advance:
        advance(1)
    assert capsys.readouterr() == ("", "")
