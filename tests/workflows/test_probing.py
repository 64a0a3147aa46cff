"""The parent's side of the probe, with stand-ins for the other interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from octavo.workflows.rules.probing import probe_vllm

SHAPE = {"loads", "error", "text", "tokens", "logprobs", "prompt_logprobs", "kernels", "version"}


def stand_in(folder: Path, body: str) -> Path:
    """An executable that gets the probe's arguments."""
    script = folder / "python"
    script.write_text(f"#!{sys.executable}\n{body}\n")
    script.chmod(0o755)
    return script


def test_last_line_is_the_answer(tmp_path: Path) -> None:
    body = "import json, sys; print('noise'); print(json.dumps({'loads': True, 'argv': sys.argv[2:]}))"
    assert probe_vllm(stand_in(tmp_path, body), "folder", "--max-tokens", "2") == {
        "loads": True,
        "argv": ["folder", "--max-tokens", "2"],
    }


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
        ("import sys; sys.exit('no module named vllm')", "exit code 1; its last words: no module named vllm"),
        ("print('not json')", "exit code 0"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
    ids=["crash", "exit", "silent", "hang"],
)
def test_no_verdict_is_told(tmp_path: Path, body: str, expected: str) -> None:
    answer = probe_vllm(stand_in(tmp_path, body), "folder", timeout=1 if "sleep" in body else 60)
    assert set(answer) == SHAPE and answer["loads"] is False
    assert expected in str(answer["error"])


def test_missing_interpreter(tmp_path: Path) -> None:
    assert "cannot be run" in str(probe_vllm(tmp_path / "nothing", "folder")["error"])


def test_no_vllm_there(tmp_path: Path) -> None:
    """This environment has no vLLM: the probe itself runs in it and says so."""
    answer = probe_vllm(Path(sys.executable), str(tmp_path))
    assert answer["loads"] is False and "No module named 'vllm'" in str(answer["error"])
