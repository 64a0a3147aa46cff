"""Stand-alone snapshots: bit for bit the same run, refusals that name the difference, errors that surface, stopping."""

import errno
import json
import os
import signal
import socket
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from octavo.base.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    MismatchError,
    PreemptedError,
    RefusedError,
    UnsupportedError,
)
from octavo.store.snapshot.channel import Channel
from octavo.store.snapshot.files import Files
from octavo.store.snapshot.folder import SnapshotFolder
from octavo.store.snapshot.process import start_process
from octavo.store.snapshot.snapshots import Snapshots
from tests.store.snapshot.conftest import make_state, train


class Broken(Files):
    """Every file fails while `now` is set; slow: seconds that each takes."""

    def __init__(self, flag, number=errno.ENOSPC, slow=0.0):
        self.flag, self.number, self.slow = flag, number, slow

    def create(self, path, size):
        time.sleep(self.slow)
        if self.flag.exists():
            raise OSError(self.number, os.strerror(self.number))
        return super().create(path, size)


class Hanging(Files):
    """No file is made while `flag` is there."""

    def __init__(self, flag):
        self.flag = flag

    def create(self, path, size):
        while self.flag.exists():
            time.sleep(0.005)
        return super().create(path, size)


def test_resumed_is_the_same_to_the_bit(new, tmp_path):
    """Through the real writer process; on the way an optimizer without tensors for its counts would differ."""
    straight, state = new(every=0), make_state()
    losses = train(state, straight, straight.start(state), 9)
    straight.close()
    (tmp_path / "snapshots").rename(tmp_path / "other")
    found = {}
    for end in (5, 9):
        snapshots, again = new(start=start_process), make_state()
        begin = snapshots.start(again)
        assert begin == (0 if end == 5 else 4)
        found |= train(again, snapshots, begin, end)
        snapshots.close()
    assert found == losses
    assert all(torch.equal(a, b) for a, b in zip(state.names, again.names, strict=True))


def test_a_snapshot_holds_the_moment_it_was_taken(new):
    snapshots, state = new(), make_state()
    train(state, snapshots, snapshots.start(state), 2)
    want = {name: p.detach().clone() for p, name in state.names.items()}
    with torch.no_grad():
        for p in state.names:
            p.add_(1)
    snapshots.close()
    found = load_file(snapshots.path / "step-2" / "model.safetensors")
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("what", ["width", "settings", "base", "optimizer"])
def test_what_differs_is_named(new, what):
    options = {"settings": {"lr": 1, "seed": 0}, "base": "sha256:a"}
    snapshots, state = new(**options), make_state()
    train(state, snapshots, snapshots.start(state), 2)
    snapshots.close()
    other, words = make_state(), ""
    if what == "width":
        other, words = make_state(16), r"0.bias; got \[16\]; need \[8\]"
    elif what == "settings":
        options, words = {**options, "settings": {"lr": 2, "seed": 0}}, "other settings: lr; got 2; need 1"
    elif what == "base":
        options, words = {**options, "base": "sha256:b"}, "other settings: model; got 'sha256:b'"
    else:
        other.optimizer.add_param_group({"params": [other.optimizer.param_groups[0]["params"].pop()]})
        words = "another optimizer; got 4 parameters in 2 groups"
    before = [p.detach().clone() for p in other.names]
    again = new(**options)
    with pytest.raises(MismatchError, match=words):
        again.start(other)
    assert all(torch.equal(a, b) for a, b in zip(before, other.names, strict=True))


def test_an_error_shows_at_the_next_step_and_in_the_exit_code(new, tmp_path, caplog):
    flag = tmp_path / "full"
    snapshots, state = new(Broken(flag)), make_state()
    train(state, snapshots, snapshots.start(state), 3)
    snapshots.writer.drain()
    flag.touch()
    train(state, snapshots, 3, 5)
    snapshots.writer.drain()
    train(state, snapshots, 5, 6)
    assert "snapshot of step 4 failed: No space left on device; last on disk: 2" in caplog.text
    with pytest.raises(RefusedError, match="the snapshot of step 6 failed; got No space left on device; on disk: 2"):
        snapshots.close()
    assert SnapshotFolder(snapshots.path).steps() == [2] and not list(snapshots.path.glob(".*.tmp"))


def test_a_disk_that_fills_up_while_training(new, mount_small, caplog):
    """Said before the first snapshot; nothing half-written stays; training goes on, and saves once there is room."""
    small_disk = mount_small(256, "snapshots")
    rest = small_disk / "rest"
    rest.write_bytes(b"x" * (224 << 10))
    snapshots, state = new(), make_state(64)
    train(state, snapshots, snapshots.start(state), 3)
    snapshots.writer.drain()
    train(state, snapshots, 3, 4)
    assert "and 3 snapshots more will take" in caplog.text
    assert "snapshot of step 2 failed: No space left on device; last on disk: None" in caplog.text
    snapshots.writer.drain()
    assert SnapshotFolder(small_disk).steps() == [] and not list(small_disk.glob(".*.tmp"))
    rest.unlink()
    train(state, snapshots, 4, 6)
    snapshots.close()
    assert SnapshotFolder(small_disk).steps() == [6] and SnapshotFolder(small_disk).problem(6) is None


def test_a_later_success_cures_and_stop_stops(new, tmp_path):
    flag = tmp_path / "full"
    flag.touch()
    snapshots, state = new(Broken(flag, errno.EIO)), make_state()
    train(state, snapshots, snapshots.start(state), 2)
    snapshots.writer.drain()
    flag.unlink()
    train(state, snapshots, 2, 4)
    snapshots.close()
    flag.touch()
    strict = new(Broken(flag, errno.EIO), on_error="stop", exits=True)
    state = make_state()
    begin = strict.start(state)
    train(state, strict, begin, 6)
    strict.writer.drain()
    with pytest.raises(RefusedError, match="before step 7; got Input/output error"):
        train(state, strict, 6, 7)
    with pytest.raises(SystemExit) as ended:
        strict.close()
    assert ended.value.code == 1


def test_a_writer_that_is_killed_costs_one_snapshot(new, caplog):
    snapshots, state = new(), make_state()
    train(state, snapshots, snapshots.start(state), 2)
    snapshots.writer.drain()
    os.kill(snapshots.writer._process.pid, signal.SIGKILL)
    train(state, snapshots, 2, 4)
    snapshots.writer.drain()
    train(state, snapshots, 4, 6)
    snapshots.close()
    assert "ended unasked (exit code -9)" in caplog.text
    assert SnapshotFolder(snapshots.path).steps() == [2, 6]


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_a_kill_costs_one_interval_at_most_at_every_instant(new, tmp_path, every):
    """A disk slower than training: what is at risk right after each optimizer step, when it is most."""
    snapshots, state = new(Broken(tmp_path / "no", slow=0.02), every=every, keep_last=9), make_state()
    snapshots.start(state)
    done, at_risk = [], []
    state.optimizer.register_step_post_hook(
        lambda *_: (done.append(1), at_risk.append(len(done) - (snapshots.durable or 0)))
    )
    train(state, snapshots, 0, 9)
    snapshots.close()
    assert max(at_risk) == every
    assert {n for n in range(1, 10) if n % every == 0} <= set(SnapshotFolder(snapshots.path).steps())


def test_one_failed_write_makes_training_wait_and_costs_no_more(new, tmp_path, caplog):
    flag = tmp_path / "full"
    snapshots, state = new(Broken(flag, slow=0.02), every=4, keep_last=9), make_state()
    snapshots.start(state)
    train(state, snapshots, 0, 2)
    snapshots.writer.drain()
    flag.touch()
    train(state, snapshots, 2, 4)
    snapshots.writer.drain()
    flag.unlink()
    train(state, snapshots, 4, 7)
    assert snapshots.durable == 6 and "snapshot of step 4 failed" in caplog.text
    snapshots.close()


def test_a_disk_that_hangs_holds_no_rank_for_ever(new, tmp_path, caplog):
    """Other ranks would wait in a collective, and die of its timeout."""
    flag = tmp_path / "hangs"
    flag.touch()
    snapshots, state = new(Hanging(flag), every=1, keep_last=9), make_state()
    snapshots.start(state)
    snapshots.writer._patience = 0.05
    train(state, snapshots, 0, 4)
    assert snapshots.durable is None
    flag.unlink()
    snapshots.writer.drain()
    train(state, snapshots, 4, 5)
    assert "the one before it is still being written" in caplog.text
    snapshots.close()
    assert SnapshotFolder(snapshots.path).steps()[-1] == 5


@pytest.mark.parametrize("buffers", [0, 1])
def test_little_memory_means_slower_not_less(new, monkeypatch, caplog, buffers):
    monkeypatch.setattr("octavo.store.snapshot.writer.buffers_that_fit", lambda *_: buffers)
    monkeypatch.setattr("octavo.store.snapshot.files.BLOCK", 100)
    snapshots, state = new(), make_state()
    losses = train(state, snapshots, snapshots.start(state), 4)
    assert (snapshots.durable == 4) == (buffers == 0) or buffers
    snapshots.close()
    assert ("written while training waits" in caplog.text) == (buffers == 0)
    again, other = new(), make_state()
    begin = again.start(other)
    losses |= train(other, again, begin, 6)
    again.close()
    assert begin == 4 and len(losses) == 6


def test_memory_for_the_weights_alone_saves_those_beside_training(new, monkeypatch, caplog):
    snapshots, state = new(every=8, adapter_every=1, keep_last=9), make_state()
    begin = snapshots.start(state)
    weights = state.layout("adapter", 0, 1).nbytes
    monkeypatch.setattr("octavo.store.snapshot.writer.buffers_that_fit", lambda n, *_: 2 if n <= weights else 0)
    train(state, snapshots, begin, 6)
    assert "written while training waits; saves of the trained weights alone, 0.0 GB, still run" in caplog.text
    assert [buffer.nbytes for buffer in snapshots.writer._buffers] == [weights] * 2
    snapshots.close()
    folder = SnapshotFolder(snapshots.path)
    assert (folder.steps(), folder.steps("adapter")) == ([4], [5, 6])
    assert not any(folder.problem(step, kind) for step, kind in ((4, "step"), (5, "adapter"), (6, "adapter")))
    again = new(every=8)
    assert again.start(make_state()) == 4
    again.close()


def test_sigterm_saves_and_ends_with_75(new, caplog):
    before = signal.getsignal(signal.SIGTERM)
    snapshots, state = new(every=100, signals=True, exits=True), make_state()
    begin = snapshots.start(state)
    train(state, snapshots, begin, 3)
    os.kill(os.getpid(), signal.SIGTERM)
    assert list(train(state, snapshots, 3, 9)) == [4]
    with pytest.raises(SystemExit) as ended:
        snapshots.close()
    assert ended.value.code == 75 and "stopped by SIGTERM; got step 4 on disk" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == before
    again = new()
    assert again.start(make_state()) == 4
    again.close()


def test_the_last_snapshot_has_a_limit(new, tmp_path):
    """A disk that would take minutes: the process ends in time, and says what is on disk."""
    snapshots, state = new(Broken(tmp_path / "no", slow=30.0), every=4, signals=True, grace=0.3), make_state()
    train(state, snapshots, snapshots.start(state), 3)
    snapshots.stop.ask("spot notice")
    started = time.monotonic()
    train(state, snapshots, 3, 9)
    with pytest.raises(PreemptedError, match="spot notice; got step None on disk, and one more") as caught:
        snapshots.close()
    assert time.monotonic() - started < 15 and caught.value.exit_code == 75
    os.kill(snapshots.writer._process.pid, signal.SIGKILL)
    snapshots.writer.drain()


def test_where_to_start(new, tmp_path):
    with pytest.raises(CheckpointError, match="no snapshot to continue from"):
        new().find("must")
    snapshots, state = new(keep_last=9), make_state()
    train(state, snapshots, snapshots.start(state), 7)
    snapshots.close()
    with pytest.raises(ConfigError, match="holds snapshots up to step 6"):
        new().find("never")
    with pytest.raises(CheckpointError, match="step-5"):
        new().find(5)
    back, state = new(), make_state()
    assert back.start(state, 4) == 4
    assert SnapshotFolder(back.path).steps() == [2, 4] and (back.path / ".left-step-6.0").is_dir()
    train(state, back, 4, 6)
    back.close()
    assert SnapshotFolder(back.path).steps() == [4, 6]


def test_the_best_stays(new):
    snapshots, state = new(keep_last=1), make_state()
    snapshots.start(state)
    for step, loss in ((2, 3.0), (4, 1.0), (6, 2.0), (8, 2.5)):
        train(state, snapshots, step - 2, step)
        snapshots.note_metric(step, loss)
        snapshots.note_metric(step - 1, 0.0)  # no snapshot of that step
    snapshots.close()
    assert SnapshotFolder(snapshots.path).steps() == [4, 8]


def test_weights_alone_between_full_ones(new):
    snapshots, state = new(every=8, adapter_every=1), make_state()
    for p, name in state.names.items():
        p.requires_grad_(name.startswith("3"))
    state = type(state)(state.model, state.optimizer, state.scheduler)
    train(state, snapshots, snapshots.start(state), 6)
    snapshots.close()
    folder = SnapshotFolder(snapshots.path)
    assert (folder.steps(), folder.steps("adapter")) == ([4], [5, 6])
    assert {p.name for p in folder.at(5, "adapter").iterdir()} == {"adapter_model.safetensors", "manifest.json"}
    assert set(load_file(folder.at(5, "adapter") / "adapter_model.safetensors")) == {"3.weight", "3.bias"}


class Keeps:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_other_states_come_along_and_must_be_json(new):
    state, snapshots = make_state(extra={"guard": Keeps({"demoted": ["layer.3"]})}), new()
    train(state, snapshots, snapshots.start(state), 2)
    snapshots.close()
    guard = Keeps(None)
    again = new()
    again.start(make_state(extra={"guard": guard}))
    again.close()
    assert guard.value == {"demoted": ["layer.3"]}
    assert "guard" in json.loads((again.path / "step-2" / "training.json").read_text())["extra"]
    with pytest.raises(UnsupportedError, match="values that JSON has"):
        make_state(extra={"guard": Keeps(object())}).small_files(0, 1, {})


def test_a_folder_that_cannot_be_written_is_named_before_training():
    with pytest.raises(InputError, match="/proc/octavo"):
        Snapshots("/proc/octavo/snapshots", every=1).find()


def test_settings_that_cannot_work(tmp_path):
    with pytest.raises(ConfigError, match="keep_last=0"):
        Snapshots(tmp_path, every=1, keep_last=0)
    with pytest.raises(ConfigError, match="before find or start"):
        Snapshots(tmp_path, every=1).step_done(1)
    assert not list(tmp_path.iterdir())


def test_a_failure_on_another_rank_ends_the_wait_for_it(new):
    snapshots, state = new(every=1), make_state()
    snapshots.start(state)
    session = snapshots.session
    session.ranks.world = 2  # whose rank 1 never writes
    train(state, snapshots, 0, 1)
    while not snapshots.writer.drain(0.05):
        snapshots.writer.abort("a failure on another rank")
    with pytest.raises(RefusedError, match=r"rank 1 has not written its part of .*; got a failure on another rank"):
        snapshots.close()
    assert SnapshotFolder(snapshots.path).steps() == []


def test_news_of_an_upload_is_no_answer_to_a_write(new):
    """A buffer that counted as free too early would be overwritten while it is written."""

    class Ended:
        pid = 0

        def wait(self, timeout=None):
            return 0

    def start(folder, lock):
        ours, theirs = socket.socketpair()
        channel = Channel(theirs)

        def answer():
            while (message := channel.receive()) is not None:
                if message["do"] == "write":
                    channel.send({"event": "not-uploaded", "step": 0, "error": "an earlier one"})
                    time.sleep(0.05)
                    channel.send({"event": "durable", "step": message["job"]["step"], "kind": "full", "seconds": 0.0})
            channel.close()

        threading.Thread(target=answer, daemon=True).start()
        return ours, Ended()

    snapshots, state = new(start=start), make_state()
    train(state, snapshots, snapshots.start(state), 2)
    snapshots.writer.drain()
    assert snapshots.durable == 2
    snapshots.close()
