"""The emulator notices what it is there to notice."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.kernels.cuda import loader
from tests.kernels import host

PROBE = """
#include "device.cuh"
KERNEL(64, 1) NAME(u32* out, int wrong) {
    SHARED u32 shared[64];
    shared[threadIdx.x] = threadIdx.x + 1;
    if (!wrong || threadIdx.x < 32) __syncthreads();
    out[threadIdx.x] = shared[threadIdx.x ^ 1];
}
"""


def test_order_and_deadlock(host_folder, monkeypatch, tmp_path):
    """Threads run last to first between barriers: a missing barrier shows. A barrier some never reach is an answer."""
    device = (loader.SOURCES / "device.cuh").read_text()
    (tmp_path / "probe.cu").write_text(PROBE)
    (tmp_path / "missing.cu").write_text(PROBE.replace("if (!wrong || threadIdx.x < 32) __syncthreads();", ""))
    (tmp_path / "device.cuh").write_text(device)
    monkeypatch.setattr(loader, "SOURCES", tmp_path)
    out = torch.zeros(64, dtype=torch.int32)
    probe, missing = loader.Variant("probe.cu", ()), loader.Variant("missing.cu", ())
    host.launch(host_folder, probe, (1,), 64, (out, np.int32(0)))
    right = [(i ^ 1) + 1 for i in range(64)]
    assert out.tolist() == right
    host.launch(host_folder, missing, (1,), 64, (out, np.int32(0)))
    assert out.tolist() != right
    with pytest.raises(AssertionError, match="deadlock"):
        host.launch(host_folder, probe, (1,), 64, (out, np.int32(1)))


def test_a_library_keeps_no_stacks(host_folder, monkeypatch, tmp_path):
    """Hundreds of kernels are loaded in one run: what each kept would add up until the process can fork no more."""
    (tmp_path / "device.cuh").write_text((loader.SOURCES / "device.cuh").read_text())
    monkeypatch.setattr(loader, "SOURCES", tmp_path)
    out, before = torch.zeros(64, dtype=torch.int32), addresses()
    for number in range(4):
        (tmp_path / f"probe{number}.cu").write_text(PROBE)
        host.launch(host_folder, loader.Variant(f"probe{number}.cu", ()), (1,), 64, (out, np.int32(0)))
    assert (addresses() - before) / 4 < 8 << 20


def addresses():
    """Bytes of address space in use."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
