"""One candidate of a trial: a group of processes with a time limit, and what became of it.

Every rank leads a session of its own. The first rank that fails ends the candidate: the others are killed with all that
they started, so that none waits in a collective and the next candidate finds the machine as it was.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from octavo.base.oom import out_of_memory

Kind = Literal["ok", "out of memory", "thrashing", "timeout", "unsupported", "no gradient", "error"]
GRACE = 2.0  # seconds that the other ranks get to say what happened to them
_NOT_SUPPORTED = ("CUBLAS_STATUS_NOT_SUPPORTED", "no kernel image is available", "UnsupportedError")
_TAIL = 20_000  # bytes of a rank's log that are looked at


@dataclass(frozen=True)
class Ended:
    """kind, and in words the reason. results: what each rank wrote, those that wrote nothing left out."""

    kind: Kind
    detail: str
    seconds: float
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def peak(self) -> float | None:
        """Bytes, of the rank that took most."""
        return max((float(r["peak_bytes"]) for r in self.results if r.get("peak_bytes")), default=None)


def run_group(commands: Sequence[Sequence[str]], folder: Path, seconds: float) -> Ended:
    """Run one command per rank at the same time; each writes rank-N.json into `folder` at its end.

    The environment is that of torchrun. seconds: the limit; what runs longer is killed.
    """
    started, port = time.monotonic(), _free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, command in enumerate(commands):
            with (folder / f"rank-{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        list(command),
                        env=_environment(rank, len(commands), port),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        in_time = _wait(ranks, started + seconds)
        codes = [process.poll() for process in ranks]
    finally:
        for process in ranks:
            _end(process)
    results = [found for rank in range(len(ranks)) if (found := _result(folder, rank))]
    took = time.monotonic() - started
    if not in_time:
        return Ended("timeout", f"not done after {seconds:g} s", took, results)
    kind, detail = classify(codes, [_log(folder, rank) for rank in range(len(ranks))], results)
    return Ended(kind, detail, took, results)


def classify(codes: Sequence[int | None], logs: Sequence[str], results: Sequence[dict[str, Any]]) -> tuple[Kind, str]:
    """What exit codes, logs and results of the ranks mean. One rank out of memory: the candidate is out of memory."""
    for rank, log in enumerate(logs):
        if codes[rank] != 0 and out_of_memory(log):
            return "out of memory", f"rank {rank}: {_line(log)}"
    killed = next((rank for rank, code in enumerate(codes) if code in (-signal.SIGKILL, 128 + signal.SIGKILL)), None)
    if killed is not None:
        return "out of memory", f"rank {killed} was killed: the host ran out of memory"
    for rank, code in enumerate(codes):
        if code != 0:
            log = logs[rank]
            missing = next((text for text in _NOT_SUPPORTED if text in log), None)
            if missing:
                return "unsupported", f"rank {rank}: {_line(log, missing)}"
            return "error", f"rank {rank}, exit code {code}: {_line(log)}"
    if len(results) < len(codes):
        return "error", "a rank ended without a result"
    for result in results:
        if retries := result.get("alloc_retries"):
            return "thrashing", f"the allocator had to free and retry {retries} times: too near the limit to be fast"
        if not result.get("gradient_norm"):
            return "no gradient", "the gradient of the adapters is zero: nothing would be trained"
    return "ok", ""


def end_with_parent(folder: Path) -> None:
    """For a rank: a thread that ends this process, and all in its session, once the one that started it is gone, and
    removes the candidate's folder, which nobody else is left to do."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        for _ in range(20):  # the training still writes into it
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Until all are done or one has failed, its peers given GRACE to say why. False: the deadline passed."""
    failed: float | None = None
    while True:
        codes = [process.poll() for process in ranks]
        if None not in codes:
            return True
        now = time.monotonic()
        if failed is None and any(code for code in codes):
            failed = now
        if failed is not None and now > failed + GRACE:
            return True
        if now > deadline:
            return False
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the rank and everything in its session, and wait until nothing of it is left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.wait()
        return
    process.wait()
    for _ in range(200):
        try:
            os.killpg(process.pid, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.01)


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    values = dict(os.environ)
    if world > 1:
        values |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return values


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _result(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / f"rank-{rank}.json").read_text())
    except (OSError, ValueError):  # killed before or while it wrote
        return None
    return found


def _log(folder: Path, rank: int) -> str:
    return (folder / f"rank-{rank}.log").read_bytes()[-_TAIL:].decode(errors="replace")


def _line(log: str, word: str = "") -> str:
    """The last line that has the word and says that memory ran out; else the last that has the word."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and word in line]
    return next((line for line in reversed(lines) if out_of_memory(line)), lines[-1] if lines else "no output")[:300]
