"""kill -9 in the middle of a run: no half-written adapter, only whole snapshots, and a resume that finishes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from octavo.store.run import RunFolder
from octavo.store.snapshot.folder import SnapshotFolder
from octavo.workflows.finetune import FinetuneConfig, finetune

SCRIPT = """
import sys, yaml
from octavo.workflows.finetune import FinetuneConfig, finetune
finetune(FinetuneConfig(**yaml.safe_load(open(sys.argv[1]))))
"""


@pytest.mark.slow
def test_killed_run_resumes(tiny_llama, tmp_path):
    (tmp_path / "train.txt").write_text("the quick brown fox jumps over the lazy dog. " * 80)
    settings = {"model": str(tiny_llama), "data": str(tmp_path / "train.txt"), "out": str(tmp_path / "run")}
    settings |= {"max_steps": 400, "context": 32, "accumulation": 1, "rank": 4, "save_every": 1, "keep": 3}
    (tmp_path / "run.yaml").write_text("\n".join(f"{key}: {value}" for key, value in settings.items()))
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "run.yaml")], env=dict(os.environ))
    run = RunFolder(tmp_path / "run")
    try:
        until = time.monotonic() + 120
        while (not run.steps() or run.steps()[-1] < 4) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        assert process.poll() is None, "it finished before it could be killed"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not run.adapter.exists() and not run.report.exists()
    os.close(SnapshotFolder(run.snapshots).lock())  # the writer finishes what it has in memory
    last = run.steps()[-1]
    for step in run.steps():
        assert SnapshotFolder(run.snapshots).problem(step) is None
    report = finetune(FinetuneConfig(**{**settings, "resume": "auto", "max_steps": last + 2, "save_every": 0}))
    assert (report.resumed_from, report.steps) == (last, last + 2)
    run.require_finished()
