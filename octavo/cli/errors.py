"""From an exception to one clear error: what, got, need, next. No traceback for a user's mistake.

Exit codes: 0 done, 1 a check says no, 2 bad usage or bad input, 3 this machine cannot, 70 a bug, 75 asked to stop and
saved, 130 interrupted, 141 nobody reads the output any more.
"""

from __future__ import annotations

import errno
import json
import logging
import sys
import traceback

import typer

from octavo.base.errors import InputError, OctavoError, UnsupportedError
from octavo.base.oom import out_of_memory

BUG, INTERRUPTED, BROKEN_PIPE = 70, 130, 141

# BadParameter is a UsageError, which is a ClickException; only the first has a public name in every Typer.
ClickError = typer.BadParameter.__mro__[2]


class BadUsageError(InputError):
    code = "bad-usage"


class FileSystemError(InputError):
    code = "file-system"


class BugError(OctavoError):
    exit_code = BUG
    code = "bug"


def explained(error: Exception) -> OctavoError:
    """The same error as one of ours. What nobody foresaw is a bug, and says so."""
    if isinstance(error, OctavoError):
        return error
    if isinstance(error, ClickError):
        return _usage(error)
    if isinstance(error, OSError) and error.errno is not None:
        return _file_system(error)
    if _is_memory(error):
        fix = "Use a smaller batch or context, or a machine with more memory; `octavo doctor` shows what is free."
        return UnsupportedError("out of memory", got=_one_line(error), fix=fix)
    if isinstance(error, ModuleNotFoundError) and (missing := _missing_package(error.name or "")):
        return missing
    return BugError(
        f"{type(error).__name__}: {_one_line(error)}",
        need="nothing from you: this is a bug in Octavo",
        fix="Set OCTAVO_LOG=DEBUG to see the traceback, and report it.",
    )


def show_error(error: OctavoError, as_json: bool) -> None:
    """People read stderr; with --json the document is the last line of stdout."""
    print(f"error: {error.what}", file=sys.stderr)
    for label, text in (("got", error.got), ("need", error.need), ("next", error.fix)):
        if text:
            print(f"  {label + ':':<6}{text}", file=sys.stderr)
    if as_json:
        record = {"code": error.code, "message": error.message, "fix": error.fix}
        print(json.dumps({"error": record}), flush=True)


def show_traceback(error: BaseException) -> None:
    """With OCTAVO_LOG=DEBUG only."""
    if logging.getLogger("octavo").isEnabledFor(logging.DEBUG):
        traceback.print_exception(error, file=sys.stderr)


def _is_memory(error: Exception) -> bool:
    """Python's own, or a RuntimeError or torch's in whatever words its library has."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and out_of_memory(str(error)))


def _usage(error: Exception) -> OctavoError:
    describe = getattr(error, "format_message", error.__str__)
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "octavo"
    return BadUsageError(_one_line(describe()), fix=f"`{command} --help` lists what it takes.")


def _file_system(error: OSError) -> OctavoError:
    where = f"{error.filename}: " if error.filename else ""
    fix = {
        errno.ENOSPC: "Free some space or choose another disk, then run the command again.",
        errno.EDQUOT: "Free some of your quota or choose another disk, then run the command again.",
        errno.EACCES: "Check the permissions, or choose a folder you may write.",
        errno.EROFS: "Choose a folder that can be written.",
        errno.ENOENT: "Check the path.",
    }.get(error.errno or 0, "Check the path and the disk.")
    return FileSystemError(f"{where}{error.strerror}", fix=fix)


def _missing_package(module: str) -> OctavoError | None:
    from octavo.base.packages import extra_of, pip_line

    extra = extra_of(module)
    return (
        UnsupportedError(f"package '{module.split('.')[0]}' is not installed", fix=pip_line(extra)) if extra else None
    )


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
