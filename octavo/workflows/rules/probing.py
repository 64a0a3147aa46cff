"""Asking a real vLLM, in another environment, through vllm_probe.py. What goes wrong on the way is an answer too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

PROBE = Path(__file__).with_name("vllm_probe.py")
OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # would make the other interpreter import our packages


def probe_vllm(
    python: Path, *arguments: str, timeout: float = 900, extra_env: dict[str, str] | None = None
) -> dict[str, object]:
    """The probe's answer to its command line `arguments` (see vllm_probe.py). timeout: seconds.

    An engine that crashes (an instruction this CPU lacks, a CUDA fault), hangs or is not installed gives
    `loads: false` and the reason in `error`, like a folder that vLLM refuses.
    """
    kept = {k: v for k, v in os.environ.items() if k not in OURS} | (extra_env or {})
    try:
        process = subprocess.Popen(
            [str(python), str(PROBE), *arguments],
            env=kept,
            start_new_session=True,  # a group of its own: vLLM's worker processes end with it
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        return no_answer(f"{python} cannot be run: {error.strerror}")
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end_group(process)
        return no_answer(f"no answer within {timeout:.0f} s")
    except BaseException:
        end_group(process)
        raise
    last = stdout.strip().rpartition("\n")[2]
    if process.returncode == 0 and last.startswith("{"):
        answer: dict[str, object] = json.loads(last)
        return answer
    return no_answer(f"{reason(process.returncode)}; its last words: {stderr.strip()[-1500:]}")


def no_answer(error: str) -> dict[str, object]:
    """In the shape of an answer."""
    empty: dict[str, object] = {name: [] for name in ("tokens", "logprobs", "prompt_logprobs", "kernels")}
    return {"loads": False, "error": error, "text": "", "version": "", **empty}


def reason(returncode: int) -> str:
    if returncode >= 0:
        return f"the vLLM process ended with exit code {returncode}"
    return f"the vLLM process was ended by {signal.Signals(-returncode).name} ({signal.strsignal(-returncode)})"


def end_group(process: subprocess.Popen[str]) -> None:
    """End the process and all that it started, and collect it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.poll()  # it had ended by itself
    process.communicate()
