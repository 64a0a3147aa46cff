"""Runs vLLM from another environment, for tests: many folders in one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from octavo.workflows.rules.probing import PROBE

RUNNER = Path(__file__).with_name("vllm_runner.py")
PLUGIN = Path(__file__).with_name("plugin")


def environment(reference_kernels: bool) -> dict[str, str]:
    """Of a vLLM process: nothing of this environment's Python, one thread, no network, the reference kernels if wanted.

    One thread, because threads that wait by spinning make a machine with two busy cores many times slower.
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    return kept | vllm_variables(reference_kernels)


def vllm_variables(reference_kernels: bool) -> dict[str, str]:
    ours = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    ours |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return ours | ({"PYTHONPATH": str(PLUGIN)} if reference_kernels else {})


def run_vllm(
    python: Path, requests: list[dict[str, Any]], reference_kernels: bool = True, timeout: float = 900
) -> list[dict[str, Any]]:
    """`probe(**request)` of every request, in one process. AssertionError with its last lines if it dies."""
    command = [str(python), str(RUNNER), str(PROBE)]
    stdout = _run(command, json.dumps(requests, default=str), environment(reference_kernels), timeout)
    return [json.loads(line) for line in stdout.splitlines()]


def _run(command: list[str], stdin: str, env: dict[str, str], timeout: float) -> str:
    """In a process group of its own, ended as a whole when time is up or the test is interrupted."""
    process = subprocess.Popen(
        command,
        env=env,
        start_new_session=True,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        stdout, stderr = process.communicate(stdin, timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, f"vLLM process ended with {process.returncode}:\n{stderr[-4000:]}"
    return stdout
