"""Starting the writer process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import octavo


class Process(Protocol):
    """What the training process needs of its writer; subprocess.Popen has it."""

    pid: int

    def wait(self, timeout: float | None = None) -> int: ...


# (the folder, the handle of its lock or None) -> our end of the connection, and the process
Start = Callable[[Path, int | None], tuple[socket.socket, Process]]


def start_process(folder: Path, lock: int | None) -> tuple[socket.socket, Process]:
    """A fresh interpreter, not a fork: CUDA and the threads of the training do not survive one."""
    ours, theirs = socket.socketpair()
    root = str(Path(octavo.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo.store.snapshot.worker", str(theirs.fileno()), str(folder)],
            pass_fds=[handle for handle in (theirs.fileno(), lock) if handle is not None],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    return ours, process
