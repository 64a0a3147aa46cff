"""`octavo COMMAND`: the commands, and the one place where a result or an error reaches the terminal.

Importing this file loads no torch, no transformers and no pydantic: each command imports its workflow when called.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Annotated, NoReturn

import typer

from octavo import __version__
from octavo.base.env import env
from octavo.base.errors import ConfigError, did_you_mean
from octavo.cli.bench import bench
from octavo.cli.calibrate import calibrate
from octavo.cli.common import Result
from octavo.cli.doctor import doctor
from octavo.cli.errors import BROKEN_PIPE, INTERRUPTED, BadUsageError, explained, show_error, show_traceback
from octavo.cli.eval import evaluate
from octavo.cli.explain import explain
from octavo.cli.export import export
from octavo.cli.finetune import finetune
from octavo.cli.plan import plan
from octavo.cli.quantize import quantize
from octavo.cli.quickstart import quickstart
from octavo.cli.requantize import requantize
from octavo.cli.serve import serve
from octavo.cli.tune import tune
from octavo.cli.verify import verify

app = typer.Typer(
    name="octavo",
    help="FP8 for language models, from fine-tuning to serving, on the GPU you have.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _octavo(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


app.command()(quickstart)
app.command()(doctor)
app.command()(plan)
app.command()(calibrate)
app.command()(quantize)
app.command()(finetune)
app.command()(export)
app.command()(verify)
app.command()(requantize)
app.command("eval")(evaluate)
app.command()(tune)
app.command()(serve)
app.command()(explain)
app.command()(bench)


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Everything is shown here; nothing is raised for a mistake."""
    as_json = "--json" in (argv[: argv.index("--")] if "--" in argv else argv)
    try:
        return _run(list(argv), as_json)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (BrokenPipeError, SystemExit):  # SystemExit: what Typer and Rich make of a closed pipe
        return BROKEN_PIPE
    except Exception as error:
        show_traceback(error)
        shown = explained(error)
        show_error(shown, as_json)
        return shown.exit_code


def _run(argv: list[str], as_json: bool) -> int:
    start_logging()
    _calm_libraries()
    for word in argv:
        if word != word.encode(errors="replace").decode():
            raise BadUsageError(f"argument {word!r} is not UTF-8", fix="Rename the file or folder.")
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        outcome = app(args=argv, prog_name="octavo", standalone_mode=False)
    if outcome == INTERRUPTED:  # Typer's answer to Ctrl-C
        raise KeyboardInterrupt
    return _show(outcome, as_json) if isinstance(outcome, Result) else int(outcome or 0)


def _calm_libraries() -> None:
    """Settings that libraries read when they are imported; what the user has set stays.

    OpenMP threads spin at barriers: on a machine that others use too, the same work took up to 100 times as long.
    Progress bars belong on a terminal.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def main() -> NoReturn:
    """The `octavo` script and `python -m octavo`."""
    # Started with a closed stdout or stderr, Python has None there: whoever closed it wants no output.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = BROKEN_PIPE
    if code == BROKEN_PIPE:  # the interpreter flushes once more on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _show(result: Result, as_json: bool) -> int:
    from rich.console import Console

    console = Console(stderr=as_json)
    for line in result.lines:
        if isinstance(line, str):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        else:
            console.print(line)
    if as_json:
        print(result.report.to_json(), flush=True)
    if result.then:
        result.then()
    return result.code


def start_logging() -> None:
    level = env().log
    levels = logging.getLevelNamesMapping()
    if level not in levels:
        raise ConfigError(f"environment variable OCTAVO_LOG is '{level}'", fix=did_you_mean(level, levels))
    log = logging.getLogger("octavo")
    log.setLevel(level)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)


if __name__ == "__main__":
    sys.exit(main())
