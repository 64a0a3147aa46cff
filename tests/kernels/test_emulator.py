"""The emulator notices what it is there to notice."""

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
