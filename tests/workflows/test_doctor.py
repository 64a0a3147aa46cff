"""doctor: what it says is true of this machine, and of a GPU that is not here."""

import os
import shutil

import pytest

from octavo.base.errors import ConfigError
from octavo.ops.backends import BACKENDS
from octavo.workflows.doctor import DoctorConfig, _memory, doctor


def test_this_machine():
    report = doctor()
    assert report.cores == len(os.sched_getaffinity(0))
    assert 0 < report.memory_free <= report.memory
    assert 0 < report.disk_free <= shutil.disk_usage("/").total
    assert report.packages["torch"] and report.packages["transformers"]


def test_one_backend_is_chosen_per_call_and_it_does_not_refuse():
    report = doctor()
    calls = {line.problem for line in report.backends}
    for call in calls:
        chosen = [line for line in report.backends if line.problem == call and line.chosen]
        assert [line.reason for line in chosen] == [None], call
    assert {line.name for line in report.backends} == {*BACKENDS, "codes", "decoded", "fused", "layer by layer"}


@pytest.mark.parametrize("gpu", ["sm80", "h100", "rtx5090"])
def test_another_gpu(gpu):
    report = doctor(DoctorConfig(gpu=gpu))
    assert report.target != "cpu"
    cpu = [line.reason for line in report.backends if line.name == "cpu"]
    assert all("CPU" in reason for reason in cpu)
    (fused,) = (line for line in report.backends if line.name == "fused")
    assert fused.chosen is (gpu != "sm80") and ("sm89 or later" in (fused.reason or "")) is (gpu == "sm80")


def test_unknown_gpu():
    with pytest.raises(ConfigError, match="h100"):
        doctor(DoctorConfig(gpu="h10"))


def test_missing_packages_come_with_the_line_that_adds_them(monkeypatch):
    monkeypatch.setattr("octavo.workflows.doctor.version_of", lambda name: None if name == "peft" else "1.0")
    extras = {extra.name: extra for extra in doctor().extras}
    assert extras["train"].packages["peft"] is None
    assert extras["train"].install == "pip install 'octavo[train]'"
    assert extras["gpu"].install is None


def test_memory_limit_of_a_container(monkeypatch):
    files = {
        "/proc/meminfo": ["MemTotal: 1000 kB", "MemAvailable: 900 kB"],
        "/sys/fs/cgroup/memory.max": ["512000"],
        "/sys/fs/cgroup/memory.current": ["112000"],
    }
    monkeypatch.setattr("octavo.workflows.doctor._lines", lambda path: files[str(path)])
    assert _memory() == (512000, 400000)
    files["/sys/fs/cgroup/memory.max"] = ["max"]
    assert _memory() == (1024000, 921600)
