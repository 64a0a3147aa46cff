"""Order of copies beside training, told by a lane that notes what is asked of it; what travels together; memory."""

import contextlib
import threading

import torch
from safetensors.torch import load_file
from torch import nn

from octavo.store.snapshot.folder import SnapshotFolder
from octavo.store.snapshot.host import HostBuffer, buffers_that_fit, free_memory
from octavo.store.snapshot.layout import JOINED, SMALL, Copy, Layout, Piece, lay_out
from octavo.store.snapshot.staging import CpuLane, stage
from octavo.store.snapshot.state import TrainingState
from tests.store.snapshot.conftest import train


class Told(CpuLane):
    """Keeps the order of what a CUDA stream would be asked to do."""

    def __init__(self):
        self.log = []

    def follow(self):
        self.log.append("follow")

    def copy(self, target, source):
        super().copy(target, source)
        self.log.append(f"copy {len(source)}")

    def mark(self):
        self.log.append("mark")
        return len(self.log)

    def hold(self, mark):
        self.log.append(f"hold {mark}")

    def wait(self, mark):
        self.log.append(f"wait {mark}")


def layout_of(**tensors):
    return lay_out({"f.safetensors": {name: Piece(tensor) for name, tensor in tensors.items()}})


def test_buffers_go_first_and_only_they_hold_the_next_forward():
    pieces = {"weight": Piece(torch.randn(4, 4)), "buffer": Piece(torch.randn(3), early=True)}
    layout, lane = lay_out({"f.safetensors": pieces}), Told()
    staged = stage(layout, torch.zeros(layout.nbytes, dtype=torch.uint8), lane)
    assert lane.log == ["follow", "copy 12", "mark", "hold 3", "copy 64", "mark"]
    staged.hold_training()  # before the optimizer step
    staged.wait()  # the courier
    assert lane.log[-2:] == ["hold 6", "wait 6"]


def test_the_buffers_of_a_model_are_found_among_its_tensors():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    layout, lane = state.layout("full", 0, 1), Told()
    stage(layout, torch.zeros(layout.nbytes, dtype=torch.uint8), lane)
    held = lane.log.index("hold 4")
    assert lane.log[:held] == ["follow", "copy 8", "copy 32", "mark"]  # batches seen; mean and variance
    assert lane.log[held + 1 :] == ["copy 112", "mark"]


class Latest(CpuLane):
    """Copies as late as a stream may: when training comes to a point that waits for them."""

    def __init__(self):
        self.queue, self.done, self.changed, self.free = [], 0, threading.Condition(), False

    def copy(self, target, source):
        self.queue.append(lambda: target.copy_(source))

    def join(self, sources):
        joined = torch.empty(sum(len(source) for source in sources), dtype=torch.uint8)
        self.queue.append(lambda: torch.cat(list(sources), out=joined))
        return joined

    def mark(self):
        return self.done + len(self.queue)

    def hold(self, mark):
        with self.changed:
            while self.done < mark:
                self.queue.pop(0)()
                self.done += 1
            self.changed.notify_all()

    def wait(self, mark):
        with self.changed:
            self.changed.wait_for(lambda: self.done >= mark or self.free)
        self.hold(mark)

    def release(self):
        with self.changed:
            self.free = True
            self.changed.notify_all()


def test_copies_that_run_at_the_last_moment_are_still_of_the_step(new, monkeypatch):
    """The next forward changes the norm's statistics, the next update the rest: neither comes before its copy."""
    lane = Latest()
    monkeypatch.setattr("octavo.store.snapshot.writer.lane_for", lambda layout: lane)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = TrainingState(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20))
    snapshots, want = new(keep_last=9), {}
    snapshots.start(state)
    for step in range(5):
        train(state, snapshots, step, step + 1)
        want[step + 1] = {name: value.clone() for name, value in model.state_dict().items()}
        want[step + 1] |= {
            f"optimizer.{name}.exp_avg": optimizer.state[p]["exp_avg"].clone() for p, name in state.names.items()
        }
    lane.release()
    snapshots.close()
    for step in (2, 4):
        folder = SnapshotFolder(snapshots.path).at(step)
        found = load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")
        assert [name for name in want[step] if not torch.equal(found[name], want[step][name])] == []


def test_without_buffers_the_forward_waits_for_nothing():
    layout, lane = layout_of(weight=torch.randn(4)), Told()
    stage(layout, torch.zeros(layout.nbytes, dtype=torch.uint8), lane)
    assert lane.log == ["follow", "copy 16", "mark"]


def test_the_copy_is_of_the_moment_it_was_asked_for():
    """In-place changes right after do not reach it; gaps in memory, other dtypes and empty tensors do no harm."""
    tensors = {
        "a": torch.randn(5, 3).T,
        "b": torch.arange(7, dtype=torch.uint8),
        "c": torch.tensor(2.0),
        "d": torch.ones(0, 2),
    }
    want = {name: tensor.clone() for name, tensor in tensors.items()}
    layout = layout_of(**tensors)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    stage(layout, buffer, CpuLane())
    for tensor in tensors.values():
        tensor.add_(1)
    from safetensors.torch import load

    plan = layout.plans[0]
    data = len(plan.header).to_bytes(8, "little") + plan.header.encode() + bytes(buffer[: plan.size].tolist())
    found = load(data)
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_small_tensors_of_a_device_travel_together_large_ones_alone():
    def bytes_at(begin, size, device="meta"):
        return Copy(torch.empty(size, dtype=torch.uint8, device=device), begin, None)

    def place(*sizes):
        return [bytes_at(sum(sizes[:i]), size) for i, size in enumerate(sizes)]

    def lengths(copies):
        return [[copy.nbytes for copy in run] for run in Layout((), tuple(copies), 0).runs[1]]

    assert lengths(place(10, 20, SMALL, 30, 0, 40)) == [[10, 20], [SMALL], [30, 40]]
    many = place(*[SMALL - 1] * (JOINED // SMALL + 2))
    assert all(sum(run) <= JOINED for run in lengths(many)) and sum(map(len, lengths(many))) == len(many)
    assert lengths([bytes_at(0, 8), bytes_at(9, 8)]) == [[8], [8]]  # not neighbours
    assert lengths([bytes_at(0, 8), bytes_at(8, 4, "cpu"), bytes_at(12, 8)]) == [[8], [4], [8]]


def test_step_counts_in_host_memory_do_not_part_what_is_on_the_gpu():
    """AdamW keeps one beside the two moments of every parameter."""
    on_gpu, count = torch.empty(4, device="meta"), torch.zeros(())
    names = [f"{p}.{kind}" for p in "abc" for kind in ("step", "exp_avg", "exp_avg_sq")]
    pieces = {name: Piece(count if name.endswith("step") else on_gpu) for name in names}
    layout = lay_out({"f.safetensors": pieces})
    assert [[copy.tensor.device.type for copy in run] for run in layout.runs[1]] == [["meta"] * 6, ["cpu"] * 3]


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch, caplog):
    class Refuses:
        def cudaHostRegister(self, *_):
            return 2

    monkeypatch.setattr("octavo.store.snapshot.host._cuda", Refuses)
    monkeypatch.setattr("torch.cuda.device", lambda gpu: contextlib.nullcontext())
    buffer = HostBuffer(4096, pin=torch.device("cuda", 0))
    assert not buffer.pinned and "cannot be pinned (CUDA error 2)" in caplog.text
    buffer.close()


def test_host_memory_is_shared_and_counted(tmp_path):
    buffer = HostBuffer(4096, pin=None)
    buffer.data.fill_(7)
    with open(f"/proc/self/fd/{buffer.handle}", "rb") as file:
        assert file.read() == b"\7" * 4096
    buffer.close()
    gigabyte = 1 << 30
    assert buffers_that_fit(gigabyte, free=3 * gigabyte) == 2
    assert buffers_that_fit(gigabyte, free=2 * gigabyte) == 1
    assert buffers_that_fit(gigabyte, free=gigabyte) == 0
    assert buffers_that_fit(gigabyte, processes=8, free=9 * gigabyte) == 1


def test_a_container_has_less_than_the_machine(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:  9999 kB\nMemAvailable:   1000 kB\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 1_024_000
    (tmp_path / "memory.max").write_text("600000\n")
    (tmp_path / "memory.current").write_text("100000\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 1_024_000
