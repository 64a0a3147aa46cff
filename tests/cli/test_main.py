"""What every command promises: exit codes, errors for people and for programs, quick help, quiet pipes."""

import errno
import json
import os
import subprocess
import sys

import pytest
import typer

from octavo import __version__
from octavo.base.errors import ConfigError, RefusedError, UnsupportedError
from octavo.base.report import Report
from octavo.cli import main
from octavo.cli.common import AsJson, Result


class Answer(Report):
    value: float


@pytest.fixture
def command():
    """A command `try` whose body the test gives: a Result to return or an exception to raise."""
    outcome = []

    def body(json: AsJson = False) -> Result:
        print("a library talks")
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    before = list(main.app.registered_commands)
    main.app.command("try")(body)
    yield outcome
    main.app.registered_commands[:] = before


def last_line(text):
    return json.loads(text.splitlines()[-1])


@pytest.mark.parametrize(
    ("error", "code", "name"),
    [
        (ConfigError("steps", got="-1", need="a positive number", fix="Give more."), 2, "bad-config"),
        (RefusedError("adapter lost"), 1, "refused"),
        (UnsupportedError("no such backend"), 3, "unsupported"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/model.safetensors"), 2, "file-system"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "file-system"),
        (MemoryError(), 3, "unsupported"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 3, "unsupported"),
        (ModuleNotFoundError("No module named 'peft'", name="peft.tuners"), 3, "unsupported"),
        (ModuleNotFoundError("No module named 'nobody'", name="nobody"), 70, "bug"),
        (TypeError("our own\n mistake"), 70, "bug"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_every_error_has_its_code_and_its_json(command, capsys, error, code, name):
    command.append(error)
    assert main.run(["try", "--json"]) == code
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1
    assert last_line(out)["error"]["code"] == name
    assert set(last_line(out)["error"]) == {"code", "message", "fix"}
    assert err.startswith("a library talks\nerror: ") and "Traceback" not in err


def test_error_for_people_says_what_got_need_next(command, capsys):
    command.append(ConfigError("steps", got="-1", need="a positive number", fix="Give more."))
    assert main.run(["try"]) == 2
    out, err = capsys.readouterr()
    assert out == "a library talks\n"
    assert err == "error: steps\n  got:  -1\n  need: a positive number\n  next: Give more.\n"


def test_a_missing_package_names_the_pip_line(command, capsys):
    command.append(ModuleNotFoundError("No module named 'peft'", name="peft"))
    main.run(["try", "--json"])
    assert "octavo[train]" in last_line(capsys.readouterr().out)["error"]["fix"]


def test_traceback_only_on_request(command, capsys, monkeypatch):
    command.append(TypeError("our own mistake"))
    main.run(["try"])
    err = capsys.readouterr().err
    assert "OCTAVO_LOG=DEBUG" in err and "Traceback" not in err
    monkeypatch.setattr(main, "env", lambda: type("E", (), {"log": "DEBUG"})())
    main.run(["try"])
    assert "Traceback" in capsys.readouterr().err


def test_bad_log_level_is_a_usage_error(capsys, monkeypatch):
    monkeypatch.setattr(main, "env", lambda: type("E", (), {"log": "DEBIG"})())
    assert main.run(["doctor"]) == 2
    assert "DEBUG" in capsys.readouterr().err


def test_result_goes_to_stdout_or_to_stderr_with_json(command, capsys):
    command.append(Result(Answer(value=1.5), ["for [people]"], code=1))
    assert main.run(["try"]) == 1
    assert capsys.readouterr().out == "a library talks\nfor [people]\n"
    assert main.run(["try", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == '{"value":1.5}\n' and err == "a library talks\nfor [people]\n"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), typer.Abort()], ids=["ctrl-c", "abort"])
def test_interrupt(command, capsys, interrupt):
    command.append(interrupt)
    assert main.run(["try"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_closed_pipe_is_quiet(command, capsys):
    command.append(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    assert main.run(["try"]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["doctr"], "Did you mean 'doctor'"),
        (["doctor", "--gpo", "h100"], "No such option"),
        (["doctor", "--gpu"], "requires"),
    ],
    ids=["command", "option", "value"],
)
def test_usage_errors(capsys, argv, words):
    assert main.run([argv[0], "--json", *argv[1:]]) == 2
    out, err = capsys.readouterr()
    error = last_line(out)["error"]
    assert error["code"] == "bad-usage" and words in error["message"] and "--help" in error["fix"]
    assert words in err


def test_json_after_the_double_dash_is_not_ours(capsys):
    assert main.run(["doctr", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_without_a_command_there_is_help(capsys):
    assert main.run([]) == 0
    assert "doctor" in capsys.readouterr().out


def test_version_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"octavo {__version__}\n")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from octavo.cli.main import run; assert run(['--help']) == 0;"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'yaml'} & set(sys.modules); assert not heavy, heavy;"
        "assert run(['doctor', '--help']) == 0; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_help_is_quick():
    """0.5 s where importing what draws it takes 0.1 (measured: 0.26 and 0.09): CPU time, best of three of each."""

    def seconds(*arguments):
        child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        return used.ru_utime + used.ru_stime

    drawing = min(seconds("-c", "import typer, rich.console") for _ in range(3))
    assert min(seconds("-m", "octavo", "--help") for _ in range(3)) < 5 * drawing


def test_closed_pipe_of_a_real_process():
    """Nobody reads: no message, no traceback, no 'Exception ignored' from the interpreter's last flush."""
    reader = subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.PIPE)
    reader.wait(timeout=60)
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "--help"],
        stdout=reader.stdin,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    reader.stdin.close()
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("closed", ["1", "2"], ids=["stdout", "stderr"])
def test_a_stream_that_was_closed_before_the_start(closed):
    line = f'exec "$0" -m octavo --version {closed}>&-'
    found = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
