"""The memory formula against the storages of real steps, operation by operation, at the same shapes.

benchmarks/replay.py: Transformers, PEFT and autograd on tensors that have sizes and no memory.
"""

import importlib.util
import sys
from itertools import product
from pathlib import Path

import pytest

from octavo.workflows.planner.memory import memory
from octavo.workflows.planner.model import Model
from octavo.workflows.planner.setup import Setup
from octavo.workflows.planner.source import published
from octavo.workflows.planner.tables import load

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "replay.py"
CONFIG = published()["llama-3.2-1b"] | {"num_hidden_layers": 2, "vocab_size": 40_000}
MIB = 1 << 20


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("replay_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


# Of two times two times two times two ways the half that has every combination of any three settings.
FOUR = list(
    product(*(enumerate(two) for two in (("lora", "full"), ("bf16", "fp8"), ("none", "full"), ("tiled", "plain"))))
)
WAYS = [tuple(name for _, name in way) for way in FOUR if sum(number for number, _ in way) % 2 == 0]
WAYS += [("lora", precision, "selective", "tiled") for precision in ("bf16", "fp8")]
WAYS += [("lora", "saved", "none", "tiled"), ("lora", "saved", "full", "plain")]


@pytest.mark.parametrize("way", WAYS, ids=["-".join(way) for way in WAYS])
def test_the_formula_is_the_peak_of_a_real_step(script, way):
    method, precision, checkpointing, loss = way
    saved = precision == "saved"
    setup = Setup(
        method=method,
        precision="fp8" if saved else precision,
        context=4096,
        checkpointing=checkpointing,
        loss=loss,
        saved_fp8=saved,
        backend="native" if saved else "dequant",
        evaluates=False,
    )
    account = memory(Model.from_config("1B of two layers", CONFIG), setup)
    real = script.replay(CONFIG, setup)
    mine = account.allocated - account.persistent["workspaces of cuBLAS"]
    assert mine == pytest.approx(real.peak, rel=0.05)
    assert real.peak <= real.expandable <= 1.3 * real.peak


def test_launches_of_a_layer_are_those_of_the_table(script):
    setup = Setup(context=256, checkpointing="none")
    two, three = (script.replay(CONFIG | {"num_hidden_layers": n}, setup).launches for n in (2, 3))
    assert three - two == pytest.approx(load("calibration")["launches"]["lora"]["pass"], rel=0.05)


def test_the_recorder_counts_what_lives_at_the_same_time(script):
    import torch

    recorder = script.Recorder()
    with recorder:
        a = torch.empty(1000)
        b = a + 1
        c = b.view(10, 100)
        del a, b
        c.sum()
    assert recorder.peak == 8000 and recorder.live == 4000
    assert [size for number, size in recorder.events if number > 0] == [4000, 4000, 4]


def test_the_model_of_the_allocator(script):
    def holds(*events, expandable=False):
        return script.reserved(list(events), expandable) // MIB

    assert holds((1, 1)) == 2 and holds((1, 2 * MIB)) == 20 and holds((1, 11 * MIB - 1)) == 12
    assert holds((1, 2 * MIB), (2, 18 * MIB)) == 20 and holds((1, 2 * MIB), (2, 19 * MIB)) == 20 + 20
    assert holds((1, 15 * MIB), (-1, 15 * MIB), (2, 16 * MIB)) == 16  # a segment of 16, free again
    assert holds((1, 16 * MIB), (-1, 16 * MIB), (2, 24 * MIB)) == 40
    assert holds((1, 16 * MIB), (-1, 16 * MIB), (2, 24 * MIB), expandable=True) == 40
    two = (1, 30 * MIB), (2, 30 * MIB), (-1, 30 * MIB), (-2, 30 * MIB), (3, 60 * MIB)
    assert holds(*two) == 120 and holds(*two, expandable=True) == 60  # neighbours join in one segment only
