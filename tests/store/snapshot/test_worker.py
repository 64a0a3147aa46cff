"""The writer process as its training sees it: what it answers to what, and how it ends."""

import errno
import os
import socket
import threading
import time

import pytest
import torch

from octavo.store.snapshot.channel import Channel
from octavo.store.snapshot.files import Files
from octavo.store.snapshot.folder import SnapshotFolder
from octavo.store.snapshot.host import HostBuffer
from octavo.store.snapshot.jobs import FilePlan, Job
from octavo.store.snapshot.remote import RemoteStore
from octavo.store.snapshot.worker import Worker

SIZE = 4096


class Full(Files):
    def create(self, path, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def serve(channel, folder):
    Worker(channel, folder).run()
    channel.close()


@pytest.fixture
def worker(tmp_path):
    """start(files) -> our end of a connection to a worker in a thread, which has one buffer."""
    running, buffers = [], []

    def start(files=None):
        ours, theirs = (Channel(end) for end in socket.socketpair())
        thread = threading.Thread(target=serve, args=(theirs, SnapshotFolder(tmp_path / "run", files)))
        thread.start()
        buffers.append(HostBuffer(SIZE, pin=None))
        buffers[0].data.copy_(torch.arange(SIZE) % 251)
        ours.send({"do": "buffers"}, [buffers[0].handle])
        running.append((ours, thread))
        return ours

    yield start
    for ours, thread in running:
        ours.close()
        thread.join(60)
        assert not thread.is_alive(), "it outlived its training"
    buffers[0].close()


def order(step, **more):
    files = [FilePlan("model.safetensors", "{}      ", 0, SIZE)]
    return {"do": "write", "job": Job(step, "full", "run", "life", files=files, **more).plain()}


def test_a_snapshot_is_durable_then_uploaded_then_all_is_finished(worker, tmp_path):
    channel, url = worker(), f"memory://{tmp_path.name}/run"
    channel.send({"do": "remote", "url": url, "options": {}})
    channel.send(order(1))
    channel.send({"do": "finish"})
    news = [channel.receive() for _ in range(3)]
    assert [(entry["event"], entry.get("step")) for entry in news] == [
        ("durable", 1),
        ("uploaded", 1),
        ("finished", None),
    ]
    folder = SnapshotFolder(tmp_path / "run")
    assert folder.problem(1) is None and RemoteStore(url).steps() == [1]
    assert (folder.at(1) / "model.safetensors").read_bytes()[16:] == bytes(n % 251 for n in range(SIZE))


def test_a_full_disk_is_told_and_the_next_order_is_taken(worker, tmp_path):
    channel = worker(Full())
    for step in (1, 2):
        channel.send(order(step))
        assert channel.receive() == {"event": "failed", "step": step, "error": "No space left on device"}
    assert list((tmp_path / "run").iterdir()) == []


def test_the_wait_for_another_rank_ends_when_training_says_so(worker, tmp_path):
    channel = worker()
    channel.send(order(1, world=2))
    channel.send(order(2))
    channel.send({"do": "abort", "step": 1, "reason": "a failure on another rank"})
    failed, durable = channel.receive(), channel.receive()
    assert failed["event"] == "failed" and failed["error"].endswith("a failure on another rank")
    assert (durable["event"], durable["step"]) == ("durable", 2)


def test_once_training_is_gone_it_waits_for_no_rank(worker, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("octavo.store.snapshot.worker.ORPHAN_PATIENCE", 0.05)
    channel = worker()
    channel.send(order(1, world=2))
    channel.close()
    said, until = "", time.monotonic() + 60
    while "the run was killed" not in said and time.monotonic() < until:
        time.sleep(0.01)
        said += capfd.readouterr().err
    assert "rank 1 has not written its part" in said
    assert list((tmp_path / "run").iterdir()) == []


def test_old_snapshots_that_cannot_go_are_a_warning(worker, tmp_path, monkeypatch):
    class Stays(Files):
        def remove_tree(self, path):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    channel = worker(Stays())
    for step in (1, 2, 3):
        channel.send(order(step))
        assert channel.receive()["event"] == "durable"
    assert channel.receive() == {
        "event": "warning",
        "text": "old snapshots cannot be deleted: Device or resource busy",
    }
