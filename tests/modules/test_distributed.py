"""DDP and FSDP2 over two gloo ranks give the gradients of one process and keep the codes and scales."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_ddp_and_fsdp2_on_two_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("distributed_check.py")
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rank 0 ok" in done.stdout and "rank 1 ok" in done.stdout
