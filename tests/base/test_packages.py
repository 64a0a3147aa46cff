"""Installed versions, and which extra brings what is missing."""

from octavo.base.packages import extra_of, extras, pip_line, version_of


def test_versions():
    assert version_of("pydantic").split(".")[0] == "2"
    assert version_of("no-such-package") is None


def test_extras_come_from_the_metadata():
    assert {"train", "gpu", "demo"} <= set(extras())
    assert "peft" in extras()["train"]
    assert "octavo" not in extras()["demo"]


def test_extra_of_a_module():
    assert extra_of("peft.tuners.lora") == "train"
    assert extra_of("lm_eval") == "eval"
    assert extra_of("smollm2") == "demo"
    assert extra_of("torch") is None
    assert pip_line("train") == "pip install 'octavo[train]'"
