"""The protocol on disk: whole or not at all at every point, whatever the disk says; what verifies, stays, goes."""

import errno
import json
import os
import re
import signal
import subprocess

import pytest

from octavo.base.errors import CheckpointError, InputError, RefusedError
from octavo.store.snapshot.files import Files, problem_of
from octavo.store.snapshot.folder import Keep, SnapshotFolder
from octavo.store.snapshot.jobs import FilePlan, Job, write
from octavo.store.snapshot.manifest import SnapshotManifest
from tests.store.snapshot.killing import PHASES, Deadly

DATA = bytes(range(256)) * 8


def job(step, run="run", **more):
    plan = FilePlan("model.safetensors", "{}      ", 0, len(DATA))
    return Job(step, more.pop("kind", "full"), run, "life", files=[plan], small={"training.json": "{}"}, **more)


def save(folder, step, files=None, **more):
    write(
        SnapshotFolder(folder, files),
        job(step, **more),
        lambda plan: lambda begin, size: memoryview(DATA)[begin : begin + size],
        None,
        lambda: None,
    )


class Failing(Files):
    """Raises at the n-th change of the disk."""

    def __init__(self, point, number):
        self.left, self.number = point, number

    def _maybe(self):
        self.left -= 1
        if self.left == 0:
            raise OSError(self.number, os.strerror(self.number))


for _name in ("make_folder", "create", "write", "sync", "sync_folder", "rename"):
    setattr(Failing, _name, lambda self, *a, _name=_name: (self._maybe(), getattr(Files, _name)(self, *a))[1])


def count_points(tmp_path):
    counter = Failing(-1, 0)
    save(tmp_path / "count", 1, counter)
    return -1 - counter.left


def test_killed_at_every_point_there_is_all_or_nothing(tmp_path):
    save(tmp_path / "run", 1)
    before = SnapshotManifest.read(tmp_path / "run" / "step-1")
    points = count_points(tmp_path)
    assert points > 12
    for point in range(1, points + 1):
        for phase in PHASES:
            pid = os.fork()
            if pid == 0:
                save(tmp_path / "run", 2, Deadly(point, phase, False))
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, (point, phase)
            folder = SnapshotFolder(tmp_path / "run")
            assert SnapshotManifest.read(folder.at(1)) == before
            assert folder.problem(1) is None
            for step in folder.steps()[1:]:
                assert folder.problem(step) is None, (point, phase)
                folder._delete(folder.at(step), "run")
            folder.clean("run")
            assert {p.name for p in folder.path.iterdir()} == {"step-1"}, (point, phase)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_an_error_at_every_point_leaves_nothing_behind(tmp_path, number):
    save(tmp_path / "run", 1)
    for point in range(1, count_points(tmp_path) + 1):
        with pytest.raises(OSError, match=os.strerror(number)):
            save(tmp_path / "run", 2, Failing(point, number))
        folder = SnapshotFolder(tmp_path / "run")
        assert folder.problem(1) is None
        if folder.steps() == [1, 2]:  # only the last fsync failed: it is whole, but nobody says it is durable
            assert folder.problem(2) is None
            folder._delete(folder.at(2), "run")
        assert {p.name for p in folder.path.iterdir()} == {"step-1"}, point


def test_a_full_disk(tmp_path):
    """A file system of 8 KB where one can be mounted; a limit on the size of files elsewhere."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", small], capture_output=True).returncode == 0
    )
    try:
        if mounted:
            (small / "rest").write_bytes(b"x" * 4096)
            with pytest.raises(OSError, match="No space left"):
                save(small, 1)
        else:
            import resource

            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
            try:
                with pytest.raises(OSError, match="too large"):
                    save(small, 1)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert SnapshotFolder(small).steps() == [] and not list(small.glob(".*"))
    finally:
        if mounted:
            subprocess.run(["umount", small], check=True)


def test_a_step_is_never_written_twice(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="exists"):
        save(tmp_path, 1)
    assert SnapshotFolder(tmp_path).problem(1) is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "model.safetensors").write_bytes(DATA[:-1]), "bytes, .* were written"),
        (lambda f: flip(f / "model.safetensors"), "other bytes"),
        (lambda f: flip(f / "training.json"), "other bytes"),
        (lambda f: flip(f / "manifest.json"), "manifest"),
        (lambda f: (f / "manifest.json").write_bytes(b""), "not readable"),
        (lambda f: (f / "manifest.json").unlink(), "not readable"),
        (lambda f: (f / "training.json").unlink(), "No such file"),
        (lambda f: [p.unlink() for p in f.iterdir()], "not readable"),
        (lambda f: f.rename(f.with_name("step-7")), "manifest is of step 2"),
    ],
    ids=["truncated", "flip", "flip-json", "flip-manifest", "no-bytes", "no-manifest", "no-file", "empty", "renamed"],
)
def test_damage_is_found_and_the_one_before_is_used(tmp_path, damage, words, caplog):
    save(tmp_path, 1)
    save(tmp_path, 2)
    damage(tmp_path / "step-2")
    folder = SnapshotFolder(tmp_path)
    assert folder.latest_verified() == 1
    assert "is broken and not used" in caplog.text
    assert re.search(words, caplog.text)
    assert folder.steps() == [1] and len(list(tmp_path.glob(".bad-step-*"))) == 1


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_pruning_keeps_what_it_is_told_to_keep(tmp_path):
    for step in range(1, 9):
        save(tmp_path, step)
    for step in (3, 8, 9):
        save(tmp_path, step, kind="adapter")
    folder = SnapshotFolder(tmp_path)
    folder.set_best(2, 0.5)
    assert folder.prune("run", Keep(last=2, every=5)) == [1, 3, 4, 6]
    assert folder.steps() == [2, 5, 7, 8] and folder.steps("adapter") == [9]


def test_pruning_never_deletes_the_last_that_verifies(tmp_path, caplog):
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip(tmp_path / "step-3" / "model.safetensors")
    folder = SnapshotFolder(tmp_path)
    assert folder.prune("run", Keep(last=1)) == []
    assert folder.steps() == [1, 2] and "step-3 is broken" in caplog.text
    assert folder.prune("run", Keep(last=1)) == [1]


def test_pruning_leaves_other_runs_alone(tmp_path):
    for step, run in ((1, "theirs"), (2, "mine"), (3, "mine"), (4, "theirs")):
        save(tmp_path, step, run=run)
    (tmp_path / ".step-9.theirs-life.tmp").mkdir()
    (tmp_path / ".step-9.mine-life.tmp").mkdir()
    (tmp_path / "step-5").mkdir()  # nobody knows whose
    folder = SnapshotFolder(tmp_path)
    folder.clean("mine")
    assert folder.prune("mine", Keep(last=1)) == [2]
    assert folder.steps() == [1, 3, 4, 5] and (tmp_path / ".step-9.theirs-life.tmp").exists()
    assert not (tmp_path / ".step-9.mine-life.tmp").exists()


def test_two_processes_do_not_share_a_folder(tmp_path):
    first = SnapshotFolder(tmp_path).lock()
    with pytest.raises(InputError, match="another process"):
        SnapshotFolder(tmp_path).lock(wait=0.05)
    os.close(first)
    os.close(SnapshotFolder(tmp_path).lock(wait=0))


def test_order_is_by_step_whatever_the_clock_says(tmp_path):
    for age, step in enumerate((1, 2, 10)):
        save(tmp_path, step)
        os.utime(tmp_path / f"step-{step}", (1e9 - age * 1e6, 1e9 - age * 1e6))
    folder = SnapshotFolder(tmp_path)
    assert folder.latest_verified() == 10
    assert folder.prune("run", Keep(last=1)) == [1, 2]


def test_rank_0_waits_for_the_parts_of_all(tmp_path):
    save(tmp_path, 1, rank=1, world=2)
    assert SnapshotFolder(tmp_path).steps() == []
    part = json.loads((tmp_path / ".step-1.run-life.tmp" / "part-1.json").read_text())
    assert set(part) == {"model.safetensors", "training.json"}
    os.rename(tmp_path / ".step-1.run-life.tmp" / "model.safetensors", tmp_path / "elsewhere")
    os.rename(tmp_path / ".step-1.run-life.tmp" / "training.json", tmp_path / "elsewhere2")
    with pytest.raises(CheckpointError, match="not what rank 1 says") as caught:
        write(SnapshotFolder(tmp_path), Job(1, "full", "run", "life", rank=0, world=2), None, None, lambda: None)
    assert "all nodes share" in str(caught.value)


@pytest.mark.parametrize("give_up", ["time", "abort", "error"])
def test_a_part_that_does_not_come_fails_the_snapshot(tmp_path, give_up):
    if give_up == "error":
        with pytest.raises(OSError, match="No space"):
            save(tmp_path, 1, Failing(3, errno.ENOSPC), rank=1, world=2)
    reason = {"time": None, "abort": "rank 1 failed", "error": None}[give_up]
    with pytest.raises(
        RefusedError, match={"time": "nothing for", "abort": "rank 1 failed", "error": "No space"}[give_up]
    ):
        write(
            SnapshotFolder(tmp_path), Job(1, "full", "run", "life", world=2, patience=0.05), None, None, lambda: reason
        )
    assert list(tmp_path.iterdir()) == []


def test_blocks_have_a_checksum_each(tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.store.snapshot.files.BLOCK", 100)
    data = os.urandom(1234)
    record = Files().write_file(tmp_path / "f", b"head", len(data), lambda b, n: memoryview(data)[b : b + n], None)
    assert (tmp_path / "f").read_bytes() == b"head" + data and len(record.sha256) == 13
    assert problem_of(tmp_path / "f", record) is None
    flip(tmp_path / "f")
    assert "other bytes" in problem_of(tmp_path / "f", record)
