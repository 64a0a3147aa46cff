"""Threads and the disk: order, errors, early flushes, and torch's own settings left as they were."""

import threading

import pytest
import torch

from octavo.store import runner
from octavo.store.runner import run_tasks, worker_pool, write_shards
from octavo.store.tensors import Checkpoint
from octavo.store.writer import ShardWriter


def test_results_come_in_order():
    with worker_pool(3) as pool:
        assert list(run_tasks(pool, [lambda i=i: i for i in range(50)], 3)) == list(range(50))


def test_workers_use_one_thread_each_and_torch_keeps_its_own():
    before = torch.get_num_threads()
    with worker_pool(2) as pool:
        assert set(run_tasks(pool, [torch.get_num_threads] * 4, 2)) == {1}
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [before]


def test_first_error_stops_the_rest():
    started = []

    def task(i):
        started.append(i)
        if i == 3:
            raise ValueError("three")
        return i

    with pytest.raises(ValueError, match="three"), worker_pool(1) as pool:
        list(run_tasks(pool, [lambda i=i: task(i) for i in range(1000)], 1))
    assert len(started) < 20


@pytest.mark.parametrize("failing", ["sync", "finish_shard"])
def test_errors_of_the_flusher_arrive(tmp_path, monkeypatch, failing):
    def fail(self, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runner, "FLUSH", 1)
    monkeypatch.setattr(ShardWriter, failing, fail)
    writer = ShardWriter(tmp_path, {"x": (torch.uint8, (64,))})
    data = torch.arange(64, dtype=torch.uint8)
    tasks = [lambda i=i: writer.put("x", data[i : i + 1], i) or 1 for i in range(64)]
    with pytest.raises(OSError, match="No space"):
        write_shards(writer, lambda file: tasks, 2, lambda amount: None)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_failed_last_flush_is_not_followed_by_a_name(tmp_path, monkeypatch):
    """One flush only, which fails; fsync would succeed, since the kernel reports a write error once."""

    def fail(self, file):
        raise OSError(5, "I/O error")

    monkeypatch.setattr(runner, "FLUSH", 64)
    monkeypatch.setattr(ShardWriter, "sync", fail)
    writer = ShardWriter(tmp_path, {"x": (torch.uint8, (64,))})
    tasks = [lambda: writer.put("x", torch.zeros(64, dtype=torch.uint8)) or 64]
    with pytest.raises(OSError, match="I/O error"):
        write_shards(writer, lambda file: tasks, 2, lambda amount: None)
    assert not (tmp_path / "model.safetensors").exists()


def test_flushes_on_the_way(tmp_path, monkeypatch):
    calls = []
    sync = ShardWriter.sync
    monkeypatch.setattr(runner, "FLUSH", 10)
    monkeypatch.setattr(ShardWriter, "sync", lambda self, file: (calls.append(file), sync(self, file))[1])
    writer = ShardWriter(tmp_path, {"x": (torch.uint8, (64,))})
    data = torch.arange(64, dtype=torch.uint8)
    tasks = [lambda i=i: writer.put("x", data[i : i + 1], i) or 1 for i in range(64)]
    assert write_shards(writer, lambda file: tasks, 2, lambda amount: None) == []
    assert calls
    (tmp_path / "config.json").write_text("{}")
    assert torch.equal(Checkpoint.open(tmp_path).get("x"), data)
