"""What is no argument at all is one clear error everywhere: no AttributeError from the middle of the work."""

import importlib
import inspect
import pkgutil

import pytest
import torch

import octavo
import octavo.pipelines
import octavo.workflows
from octavo.base.errors import ConfigError, UnsupportedError
from octavo.base.report import Config
from octavo.workflows.finetune import FinetuneConfig


def workflows():
    """Every public function of a workflow or pipeline that needs its Config and nothing else."""
    for package in (octavo.workflows, octavo.pipelines):
        for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            if info.ispkg:
                continue
            module = importlib.import_module(info.name)
            for name, function in inspect.getmembers(module, inspect.isfunction):
                names = list(inspect.signature(function).parameters.values())
                needed = [p.name for p in names if p.default is p.empty] or [p.name for p in names[:1]]
                public = function.__module__ == info.name and not name.startswith("_")
                returns = str(inspect.signature(function).return_annotation)
                if public and needed == ["config"] and returns.endswith("Report"):
                    yield pytest.param(function, id=name)


@pytest.mark.parametrize("function", list(workflows()))
@pytest.mark.parametrize("value", [[], {"model": "demo"}, 3, Config()], ids=["list", "dict", "int", "another config"])
def test_a_workflow_takes_its_config_and_nothing_else(function, value):
    with pytest.raises(ConfigError, match=rf"{function.__name__}: config; got {type(value).__name__}; need \w+Config"):
        function(value)


def test_none_is_no_config_either():
    with pytest.raises(ConfigError, match="evaluate: config; got NoneType; need EvaluateConfig"):
        octavo.evaluate(None)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: octavo.quantize([1.0]), "quantize: x; got list; need Tensor"),
        (lambda: octavo.quantize(torch.ones(2, 2), "channel"), "quantize: rule; got str; need Rule"),
        (lambda: octavo.dequantize(torch.ones(2)), "dequantize: q; got Tensor; need ScaledTensor"),
        (lambda: octavo.scaled_mm(None, None), "scaled_mm: a; got NoneType; need ScaledTensor"),
        (lambda: octavo.convert([]), "convert: model; got list; need Module"),
        (lambda: octavo.convert(torch.nn.Linear(16, 16), 3), "convert: recipe; got int; need Recipe or str"),
        (lambda: octavo.load("demo", [1]), "load: recipe; got list"),
        (lambda: octavo.Recipe.named([]), "recipe; got list; need str"),
    ],
    ids=lambda value: value.partition(";")[0] if isinstance(value, str) else "",
)
def test_public_functions_name_the_argument(call, what):
    with pytest.raises(ConfigError, match=what):
        call()


@pytest.mark.parametrize(
    "setting",
    [{"learning_rate": 1e308}, {"alpha": 1e308}, {"weight_decay": float("inf")}, {"epochs": float("inf")}],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_that_overflow_are_refused_with_their_range(setting):
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}: Input should be less than or equal to"):
        FinetuneConfig.parse({"model": "demo", "out": "run", "data": "demo", **setting})


def test_a_cpu_has_no_number():
    from octavo.integrations.loading import device_of

    assert device_of("cpu:0").type == "cpu"
    with pytest.raises(UnsupportedError, match="device cpu:7"):
        device_of("cpu:7")
