"""verify over mutated checkpoints: python -m tests.workflows.fuzz FOLDERS WORK --first 0 --count 2000

Prints one JSON line. A failure is an exception, more than HANG seconds for one tiny folder, memory beyond the limit, a
file opened outside of the folder, or a verdict other than error where the safetensors library refuses the files.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from octavo.base.errors import OctavoError
from octavo.base.hardware import KNOWN_SM
from octavo.workflows.verify import VerifyConfig, verify
from tests.workflows.mutations import mutate, pristine

HANG = 60  # seconds of wall clock; a folder takes some milliseconds
HEADROOM = 3 << 30  # bytes of address space beyond what the process starts with
KEPT = 40
GPUS = ["cpu", *(f"sm{a}{b}" for a, b in KNOWN_SM)]
ENGINES = ["all", "vllm", "vllm", "sglang", "transformers"]


class Opened:
    """What this process opens while `watching`, as Python's audit events tell."""

    def __init__(self) -> None:
        self.watching, self.paths = False, set[str]()
        sys.addaudithook(self._event)

    def _event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.watching and event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            self.paths.add(os.fsdecode(arguments[0]))

    def outside(self, *folders: Path) -> list[str]:
        found = [os.path.abspath(path) for path in self.paths]
        code = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]))
        allowed = tuple(f"{folder}{os.sep}" for folder in folders)
        return [p for p in found if not f"{p}{os.sep}".startswith((*allowed, *code))]


def refused(folder: Path) -> bool:
    """Whether the safetensors library refuses the files that are read, or config.json is no JSON object."""
    if any(path.exists() and not path.is_file() for path in folder.iterdir()):
        return False  # whether a pipe or a folder matters depends on who would open it
    try:
        with (folder / "config.json").open(encoding="utf-8") as file:
            if not isinstance(json.load(file), dict):
                return True
        single = folder / "model.safetensors"
        for path in sorted(folder.glob("model-*.safetensors")) or [single]:
            with safe_open(path, framework="pt"):
                pass
    except (OSError, ValueError, RecursionError, SafetensorError):
        return True
    return False


def settings(seed: int, folder: Path, work: Path) -> VerifyConfig:
    rng = random.Random(~seed)
    more: dict[str, Any] = {"quick": rng.random() < 0.6, "tp": rng.choice((1,) * 9 + (2, 3, 8))}
    if rng.random() < 0.05:
        more["fix"] = work / "fixed"
    if rng.random() < 0.05:
        more["reference"] = work / "reference"
    return VerifyConfig(folder=folder, engine=rng.choice(ENGINES), gpu=rng.choice(GPUS), **more)


def one(seed: int, files: dict[str, bytes], work: Path, opened: Opened) -> tuple[str, str]:
    """(verdict, failure); failure is empty when all is well."""
    folder = work / "ckpt"
    shutil.rmtree(work / "fixed", ignore_errors=True)
    mutant = mutate(files, seed)
    mutant.write(folder)
    signal.alarm(HANG)
    try:
        opened.watching, opened.paths = True, set()
        config = settings(seed, folder, work)
        verdict: str = verify(config).verdict
    except OctavoError as error:
        # Asking for a repaired copy of damaged files is refused with a clear error; so is a broken reference.
        if not (config.fix or config.reference):
            return "refused", f"{type(error).__name__}: {error}"
        verdict = "refused"
    except (Exception, Hang) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "octavo" in Path(f.filename).parts]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else "?"
        return "crash", f"{type(error).__name__} at {where}: {str(error)[:150]}; {', '.join(mutant.log)}"
    finally:
        opened.watching = False
        signal.alarm(0)
    written = (work / "fixed", work / ".fixed.octavo-unfinished") if config.fix else ()
    outside = [p for p in opened.outside(folder, work / "reference", *written) if not (config.fix and p == str(work))]
    if outside:
        return verdict, f"opened {outside[0]}; {', '.join(mutant.log)}"
    if verdict in ("ok", "warn") and refused(folder):
        return verdict, f"verdict {verdict} for files that safetensors refuses; {', '.join(mutant.log)}"
    return verdict, ""


class Hang(BaseException):
    """No Exception: what is being tested catches OSError, and TimeoutError is one."""


def hung(*_: object) -> None:
    raise Hang(f"more than {HANG} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", type=Path, help="a folder of good checkpoints")
    parser.add_argument("work", type=Path, help="scratch space")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # repaired copies are read again, power cuts are for other tests
    warnings.simplefilter("error")
    signal.signal(signal.SIGALRM, hung)
    kinds = {path.name: pristine(path) for path in sorted(given.folders.iterdir())}
    names = sorted(kinds)
    opened = Opened()
    one(-1, kinds[names[0]], given.work, opened)  # imports everything once, before memory is limited
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + HEADROOM, resource.RLIM_INFINITY))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    verdicts: collections.Counter[str] = collections.Counter()
    failures: dict[str, str] = {}
    for seed in range(given.first, given.first + given.count):
        kind = names[seed % len(names)]
        verdict, failure = one(seed, kinds[kind], given.work, opened)
        verdicts[verdict] += 1
        if failure:
            failures.setdefault(failure.partition(";")[0], f"seed {seed}, {kind}: {failure}")
    answer = {"cases": given.count, "first": given.first, "verdicts": dict(sorted(verdicts.items()))}
    answer["rss_rise_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    answer |= {"seconds": round(time.monotonic() - start, 1), "failures": list(failures.values())[:KEPT]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
