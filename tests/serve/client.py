"""vLLM in another environment, for tests: all questions through one process."""

from __future__ import annotations

import contextlib
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


class Vllm:
    """One process in vLLM's environment that answers questions, one after the other (see vllm_runner.py)."""

    def __init__(self, python: Path, log: Path) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(python), str(RUNNER), str(PROBE)],
                env=environment(reference_kernels=True),
                start_new_session=True,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    def ask(self, name: str, **arguments: Any) -> Any:
        """The answer of `ANSWERS[name]`. AssertionError with its last words if the process dies of the question."""
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps([name, arguments], default=str) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"vLLM's process ended with {self.process.wait()} at {name}:\n{self.log.read_text()[-4000:]}"
        return json.loads(line)

    def end(self) -> None:
        """With all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
