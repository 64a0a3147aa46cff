"""Flags mirror the Config of the workflow behind the command: same names, same defaults, same choices."""

from importlib import import_module
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import typer
from pydantic_core import PydanticUndefined

from octavo.cli.common import NOT_SETTINGS
from octavo.cli.main import app

CONFIGS = {
    "bench": "octavo.workflows.bench:BenchConfig",
    "calibrate": "octavo.workflows.calibrate:CalibrateConfig",
    "doctor": "octavo.workflows.doctor:DoctorConfig",
    "eval": "octavo.workflows.evaluate:EvaluateConfig",
    "explain": "octavo.workflows.explain:ExplainConfig",
    "export": "octavo.workflows.export:ExportConfig",
    "finetune": "octavo.workflows.finetune:FinetuneConfig",
    "plan": "octavo.pipelines.plan:PlanJobConfig",
    "quantize": "octavo.workflows.quantize:QuantizeConfig",
    "quickstart": "octavo.pipelines.quickstart:QuickstartConfig",
    "tune": "octavo.pipelines.tune_report:TuneConfig",
    "requantize": "octavo.workflows.requantize:RequantizeConfig",
    "serve": "octavo.workflows.serve:ServeConfig",
    "verify": "octavo.workflows.verify:VerifyConfig",
}
COMMANDS = {command.name: command for command in typer.main.get_group(app).commands.values()}

# (command, field) that only a file can set, and why.
ONLY_IN_FILES = {("quantize", "compat"): "reproduces another tool's bytes, for comparisons in benchmarks"}


def config_of(command):
    module, name = CONFIGS[command].split(":")
    return getattr(import_module(module), name)


def settings(command):
    return {p.name: p for p in COMMANDS[command].params if p.name not in {*NOT_SETTINGS, "help"}}


def choices(annotation):
    """The values of a Literal, also inside `Literal[...] | None`."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((get_args(arg) for arg in get_args(annotation) if get_origin(arg) is Literal), ())


def shown(default):
    if default is None or default is PydanticUndefined or default in ((), ""):
        return False
    return default.as_posix() if isinstance(default, Path) else str(default)


def test_every_command_is_compared():
    assert set(COMMANDS) == set(CONFIGS)


@pytest.mark.parametrize("command", sorted(CONFIGS))
def test_names(command):
    hidden = {field for name, field in ONLY_IN_FILES if name == command}
    assert set(settings(command)) == set(config_of(command).model_fields) - hidden


@pytest.mark.parametrize("command", sorted(CONFIGS))
def test_defaults_and_choices_in_the_help(command):
    fields = config_of(command).model_fields
    for name, parameter in settings(command).items():
        assert parameter.default is None, f"--{name} would hide what the file says"
        if parameter.param_type_name == "argument":
            continue
        assert parameter.show_default == shown(fields[name].get_default()), name
        if known := choices(fields[name].annotation):
            assert parameter.metavar == "|".join(map(str, known)), name


@pytest.mark.parametrize("command", sorted(CONFIGS))
def test_every_flag_is_described(command):
    assert COMMANDS[command].help
    assert all(parameter.help for parameter in COMMANDS[command].params)
