"""Reading JSON and YAML that nobody meant to write: an error of a known kind, and no waiting."""

import os

import pytest

from octavo.base.errors import ConfigError
from octavo.base.report import UNREADABLE, read_json, read_yaml


@pytest.fixture(params=["nothing", "folder", "pipe", "loop", "bytes", "deep", "long-number"])
def odd(request, tmp_path):
    path = tmp_path / "odd"
    make = {
        "nothing": lambda: None,
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "loop": lambda: path.symlink_to(path),
        "bytes": lambda: path.write_bytes(b"\xff\xfe"),
        "deep": lambda: path.write_text("[" * 100_000),
        "long-number": lambda: path.write_text("9" * 5000),
    }
    make[request.param]()
    return path


def test_json_fails_in_a_known_way(odd):
    with pytest.raises(UNREADABLE):
        read_json(odd)


def test_yaml_is_a_config_error(odd):
    with pytest.raises(ConfigError, match="odd"):
        read_yaml(odd)


def test_json(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1, null]}')
    assert read_json(tmp_path / "a.json") == {"a": [1, None]}
