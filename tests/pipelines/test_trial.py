"""plan --trial: every way a candidate can end, the search over micro-batches, and one trial for real."""

import os
import subprocess
import sys
import time

import pytest

from octavo.base.errors import RefusedError, UnsupportedError
from octavo.base.oom import out_of_memory
from octavo.pipelines.plan import PlanJobConfig
from octavo.pipelines.plan import plan as job
from octavo.pipelines.trial import confirmed, trial
from octavo.pipelines.trial_process import Ended, classify, run_group
from octavo.workflows.plan import PlanConfig, plan

OOM_TEXTS = {
    "torch": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity ...",
    "old torch": "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.69 GiB total capacity)",
    "runtime": "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "driver": "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "growing segments": "RuntimeError: CUDA driver error: out of memory",
    "triton": "RuntimeError: Triton Error [CUDA]: out of memory",
    "hip": "RuntimeError: HIP error: out of memory",
    "another library": "RuntimeError: cudaMalloc failed: out of memory",
    "cublas": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cudnn": "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "nccl": "torch.distributed.DistBackendError: NCCL error, ncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure 2 'out of memory'",
    "cudnn 9": "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cufft": "RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED",
    "nccl, older": "NCCL WARN Cuda failure 'out of memory'",
    "nccl, itself": "torch.distributed.DistBackendError: ncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nFailed to CUDA calloc async 608 bytes",
    "cpu": "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 99 bytes. Error code 12 (Cannot allocate memory)",
    "python": "MemoryError",
    "c++": "terminate called after throwing an instance of 'std::bad_alloc'",
    "rust": "memory allocation of 5795635 bytes failed",
    "threads": "libgomp: Thread creation failed: Resource temporarily unavailable",
}
OTHER_TEXTS = {
    "assert": "RuntimeError: CUDA error: device-side assert triggered",
    "shape": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 2x5)",
    "key": "KeyError: 'memory'",
    "illegal": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "shared memory": "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 300",
    "advice": "ValueError: no such size. UserWarning: CUDA graphs may run out of memory",
    "nccl": "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
}
GOOD = {"steps": 3, "peak_bytes": 1e9, "seconds_per_step": 0.5, "gradient_norm": 1.0, "alloc_retries": 0}


def script(folder, rank, body):
    """A rank that runs `body` with `done(result)` at hand."""
    file = str(folder / f"rank-{rank}.json")
    head = f"import json, os, sys, time\ndef done(r): open({file!r}, 'w').write(json.dumps(r))\n"
    return [sys.executable, "-c", head + body]


def group(folder, *bodies, seconds=60.0):
    return run_group([script(folder, rank, body) for rank, body in enumerate(bodies)], folder, seconds)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("form", OOM_TEXTS)
def test_p8_every_form_of_out_of_memory(form):
    assert classify([1], [f"Traceback\n{OOM_TEXTS[form]}\n"], [])[0] == "out of memory"


@pytest.mark.parametrize("form", OTHER_TEXTS)
def test_p8_another_error_is_an_error_and_not_too_large(form):
    assert not out_of_memory(OTHER_TEXTS[form])
    kind, detail = classify([1], [OTHER_TEXTS[form]], [])
    assert kind == "error" and OTHER_TEXTS[form][:10] in detail


def test_p6_a_product_that_is_not_supported():
    log = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`"
    assert classify([1], [log], [])[0] == "unsupported"


def test_p13_killed_by_the_host_is_out_of_memory():
    assert classify([-9], ["..."], [])[0] == classify([137], ["..."], [])[0] == "out of memory"


def test_p10_a_candidate_that_thrashes_is_rejected():
    assert classify([0], [""], [GOOD | {"alloc_retries": 3}])[0] == "thrashing"


def test_p11_adapters_without_a_gradient():
    assert classify([0], [""], [GOOD | {"gradient_norm": 0.0}])[0] == "no gradient"


def test_a_rank_without_a_result_is_an_error():
    assert classify([0, 0], ["", ""], [GOOD])[0] == "error"
    assert classify([0], [""], [GOOD]) == ("ok", "")


def test_a_hanging_candidate_is_ended_with_its_children(tmp_path):
    child = "import subprocess\np = subprocess.Popen(['sleep', '600'])\n"
    body = f"{child}open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))\ntime.sleep(600)"
    ended = group(tmp_path, body, seconds=3.0)
    assert ended.kind == "timeout" and ended.seconds < 60
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_killed_planner_leaves_no_candidate_behind(tmp_path):
    rank = (
        "import os, time\nfrom pathlib import Path\nfrom octavo.pipelines.trial_process import end_with_parent\n"
        f"end_with_parent(Path({str(tmp_path / 'candidate')!r}))\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    planner = (
        "import sys\nfrom pathlib import Path\nfrom octavo.pipelines.trial_process import run_group\n"
        f"run_group([[sys.executable, '-c', {rank!r}]], Path({str(tmp_path)!r}), 600)"
    )
    (tmp_path / "candidate" / "run").mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", planner])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    pid = int((tmp_path / "pid").read_text())
    for _ in range(300):
        if not alive(pid):
            break
        time.sleep(0.1)
    assert not alive(pid) and not (tmp_path / "candidate").exists()


def test_a_crashed_candidate_leaves_the_next_one_clean(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir(), second.mkdir()
    assert group(first, "os.abort()").kind == "error"
    assert group(second, f"done({GOOD!r})") == Ended("ok", "", pytest.approx(0, abs=60), [GOOD])


def test_an_oom_kill_from_outside(tmp_path):
    assert group(tmp_path, "os.kill(os.getpid(), 9)").kind == "out of memory"


GLOO = """
import torch, torch.distributed as dist, resource
dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == 2
if rank == 1:
    now = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (now + 2**26, now + 2**26))
    torch.ones(2**28)
dist.all_reduce(x)
done({})
"""


def test_p9_one_gloo_rank_runs_out_of_memory_and_the_other_does_not_hang(tmp_path):
    """Rank 0 waits in a collective for a rank that is gone: the group ends as out of memory, long before the limit."""
    ended = group(tmp_path, GLOO, GLOO, seconds=300.0)
    assert ended.kind == "out of memory" and "rank 1" in ended.detail
    assert ended.results == [] and ended.seconds < 150
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout.split()
    assert left == []


class Machine:
    """A machine on which micro-batches up to `fits` run; others end as `otherwise`."""

    def __init__(self, fits, otherwise="out of memory", supports=("channel", "tensor", "two-stage")):
        self.fits, self.otherwise, self.supports, self.asked = fits, otherwise, supports, []

    def __call__(self, spec, processes, seconds):
        settings = spec["settings"]
        self.asked.append((settings["mode"], settings["scheme"], settings["micro_batch"]))
        what = settings["scheme"] if settings["mode"] == "lora" else "two-stage"
        if what not in self.supports:
            return Ended("unsupported", "CUBLAS_STATUS_NOT_SUPPORTED", 1.0)
        micro = settings["micro_batch"]
        peak = (1.0 + 0.25 * micro) * 2**30
        if micro > self.fits:
            return Ended(self.otherwise, "why", 1.0)
        return Ended("ok", "", 1.0, [GOOD | {"peak_bytes": peak, "seconds_per_step": 0.1 * micro}])


def tried_on(machine, **settings):
    config = PlanConfig(model="demo", context=512, batch=settings.pop("batch", 16), **settings)
    report = plan(config)
    found = trial(config, report, seconds=5, processes=settings.pop("processes", 1), device="cuda", run=machine)
    return report, found


@pytest.mark.parametrize("fits", [1, 2, 8, 16])
def test_binary_search_finds_the_largest_micro_batch(fits):
    machine = Machine(fits)
    _, found = tried_on(machine, gpu=("h200",), max_gpus=1, precision="bf16")
    assert found.micro_batch == fits and found.accumulation == 16 // fits
    assert len(machine.asked) == len(set(machine.asked)) <= 4


def test_thrashing_counts_as_too_large():
    assert tried_on(Machine(4, "thrashing"), precision="bf16", gpu=("h200",), max_gpus=1)[1].micro_batch == 4


def test_nothing_fits_is_said_and_the_run_is_gone():
    report, found = tried_on(Machine(0), precision="bf16", gpu=("h200",), max_gpus=1)
    assert found.micro_batch is None and report.run and confirmed(report, found).run is None


def test_errors_are_no_verdict_on_the_size():
    with pytest.raises(UnsupportedError, match="why"):
        tried_on(Machine(0, "error"), precision="bf16", gpu=("h200",), max_gpus=1)


def test_unsupported_products_fall_back_to_scales_per_tensor_and_then_to_16_bit():
    report, found = tried_on(Machine(16, supports=("tensor",)), precision="fp8", gpu=("h200",), max_gpus=1)
    assert confirmed(report, found).run["scheme"] == "tensor"
    machine = Machine(16, supports=("two-stage",))
    report, found = tried_on(machine, precision="fp8", gpu=("h200",), max_gpus=1)
    assert confirmed(report, found).run["mode"] == "two-stage"
    assert [kind[:2] for kind in machine.asked[:3]] == [
        ("lora", "channel"),
        ("lora", "tensor"),
        ("two-stage", "channel"),
    ]


def test_refinement_is_the_line_through_the_measurements():
    _, found = tried_on(Machine(8), precision="bf16", gpu=("h200",), max_gpus=1)
    if len([t for t in found.tried if t.outcome == "ok"]) > 1:
        assert found.refined == pytest.approx({"persistent_gib": 1.0, "per_sequence_gib": 0.25})
    else:
        assert found.refined["factor"] == pytest.approx(3.0 / found.tried[0].predicted_gib)
    assert all(t.error_percent is not None for t in found.tried if t.outcome == "ok")


def test_what_cannot_be_tried_is_refused():
    with pytest.raises(RefusedError, match="does not run"):
        tried_on(Machine(1), method="full")
    config = PlanConfig(model="demo", batch=3)
    with pytest.raises(RefusedError, match="multiple of 2"):
        trial(config, plan(config), seconds=5, processes=2, device="cpu", run=Machine(1))


@pytest.mark.slow
def test_p2_p3_a_real_trial_on_this_machine(tmp_path, tiny_llama):
    """Three optimizer steps, evaluation, snapshot. The peak has the optimizer's state, which the first step makes:
    16 bytes for every trained parameter. Held to less than that, the same candidate is out of memory."""
    settings = {"model": str(tiny_llama), "batch": 1, "context": 256, "rank": 2048, "precision": "bf16"}
    config = PlanJobConfig(**settings, trial=True, device="cpu", write=tmp_path / "run.yaml", data="d.txt")
    done = job(config)
    (tried,) = done.trial.tried
    assert tried.outcome == "ok" and tried.seconds_per_step > 0
    assert tried.measured_gib * 2**30 > 16 * done.plan.trained > 40e6
    assert done.trial.micro_batch == 1 and "micro_batch: 1" in config.write.read_text()
    refused = job(PlanJobConfig(**settings, trial=True, device="cpu", max_memory_per_gpu=0.03))
    assert refused.trial.tried[0].outcome == "out of memory", refused.trial
    assert refused.plan.run is None
