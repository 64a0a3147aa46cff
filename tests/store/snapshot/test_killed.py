"""A training process that is killed at random instants and at every write, and resumes: see killing.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def kill(model, kills, *more):
    """In a process of its own, with one thread: forks of it are trainings."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.store.snapshot.killing",
        "--model",
        model,
        "--kills",
        str(kills),
    ]
    done = subprocess.run([*command, *map(str, more)], capture_output=True, text=True, env=environment)
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and found["wrong"] == [], found
    assert found["kills"] >= kills and found["resumed"] > kills // 4, found
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kills"), [("full", 30), ("sharded", 5)])
def test_losses_are_those_of_a_run_nobody_killed(model, kills):
    """Dropout, shuffling, accumulation; sharded: FSDP2 on two gloo ranks."""
    found = kill(model, kills)
    assert model == "sharded" or len(found["ways"]) == 4, found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["trainer-ddp-lora", "trainer-fsdp"])
def test_a_trainer_on_two_ranks_is_killed(model):
    """SnapshotCallback in Hugging Face's Trainer: accelerate's DDP and FSDP2 on gloo."""
    kill(model, 2)


@pytest.mark.slow
def test_a_real_model_with_lora_is_killed(demo_model):
    """SmolLM2-135M in FP8, LoRA with dropout."""
    kill("lora", 3, "--demo", demo_model)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("model", "kills"), [("full", 2000), ("sharded", 200), ("trainer-fsdp", 100)])
def test_killed_thousands_of_times(model, kills):
    kill(model, kills)
