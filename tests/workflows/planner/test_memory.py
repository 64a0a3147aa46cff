"""The memory model against what was measured on an H200, and its parts against each other."""

from dataclasses import replace

import pytest

from octavo.workflows.planner.memory import memory
from octavo.workflows.planner.search import Limits, host_bytes, search
from octavo.workflows.planner.setup import Setup
from octavo.workflows.planner.source import read_model
from octavo.workflows.planner.tables import GIB, Machine, gpu_named, gpus, instances

MODEL = read_model("Llama-3.1-8B")
PLAIN = Setup(context=4096, adapters="float32", loss="plain")
LIGER = replace(PLAIN, loss="liger", fused_layers=True)

BACKWARD = "first block's backward"

# Peak allocated GiB on one H200 (benchmarks/log.md, 2026-11-29). None of them entered the model.
MEASURED = {
    "stock, micro-batch 4, checkpointing": (replace(PLAIN, micro=4), 43.2),
    "liger, micro-batch 4, checkpointing": (replace(LIGER, micro=4), 24.7),
    "liger, micro-batch 4, checkpointing, 16-bit adapters": (replace(LIGER, micro=4, adapters="same"), 23.6),
    "liger, micro-batch 2, no checkpointing": (replace(LIGER, micro=2, checkpointing="none"), 77.2),
}


def allocated(setup):
    return memory(MODEL, setup).allocated / GIB


@pytest.mark.parametrize("name", MEASURED)
def test_measured_peaks_within_three_percent(name):
    setup, measured = MEASURED[name]
    assert allocated(setup) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("name", MEASURED)
def test_measured_peaks_lie_in_the_range(name):
    setup, measured = MEASURED[name]
    account = memory(MODEL, setup)
    assert account.low - account.outside < measured * GIB < account.high


def test_the_peak_is_a_maximum_of_instants_and_no_sum():
    account = memory(MODEL, replace(PLAIN, micro=4))
    stays = sum(account.persistent.values())
    assert account.instant == "loss" and account.instants[BACKWARD] > 0
    total = stays + max(account.instants.values()) + account.terms["fragmentation"] + account.outside
    assert account.peak == pytest.approx(total)
    assert sum(account.terms.values()) == pytest.approx(account.peak)


def test_p4_logits_of_a_long_context_and_a_large_vocabulary():
    """float32 logits of 32k tokens and 128k words are 15.7 GiB each; a fused loss has none of them."""
    long = Setup(context=32768, checkpointing="full", loss="plain")
    plain, fused = memory(MODEL, long), memory(MODEL, replace(long, loss="tiled"))
    assert plain.dominant == "logits" and plain.instants["loss"] > 3 * 15.6 * GIB
    assert fused.dominant != "logits"
    assert plain.peak - fused.peak > 35 * GIB


def test_p5_fp8_products_save_no_memory_and_fp8_storage_does():
    full = replace(PLAIN, method="full")
    assert memory(MODEL, replace(full, precision="fp8")).peak >= memory(MODEL, full).peak
    stored, wide = memory(MODEL, replace(PLAIN, precision="fp8")), memory(MODEL, PLAIN)
    assert sum(wide.persistent.values()) - sum(stored.persistent.values()) == pytest.approx(6.98e9, rel=0.01)


def test_full_training_is_sixteen_bytes_a_parameter_where_the_optimizer_works():
    """Twelve stay; gradients live from backward to the optimizer, and from pass to pass where they accumulate."""
    full = replace(PLAIN, method="full")
    once, often = memory(MODEL, full), memory(MODEL, replace(full, accumulation=4))
    rest = once.persistent["workspaces of cuBLAS"]
    assert sum(once.persistent.values()) - rest == 12 * MODEL.parameters
    assert once.instants["optimizer"] == 4 * MODEL.parameters
    assert sum(often.persistent.values()) - rest == 16 * MODEL.parameters and often.instants["optimizer"] == 0
    sharded = memory(MODEL, replace(full, sharding="fsdp", world=8))
    assert sum(sharded.persistent.values()) - rest == 1.5 * MODEL.parameters


def test_experts_that_lora_trains_cost_a_copy_of_all_of_them():
    model = read_model("Qwen3-30B-A3B")
    none = Setup(context=1024, checkpointing="none")
    attention = read_model("Qwen3-30B-A3B", ("q_proj", "k_proj", "v_proj", "o_proj"))
    copies = 2 * model.widths[0].experts * model.layers
    assert copies > 50e9
    assert memory(model, none).instants[BACKWARD] - memory(attention, none).instants[BACKWARD] > copies
    fp8 = replace(none, precision="fp8")  # experts that are codes get no adapters
    assert memory(model, fp8).instants[BACKWARD] < memory(attention, fp8).instants[BACKWARD] * 1.01


def test_sharding_keeps_a_gathered_block_and_ddp_buckets():
    sharded = memory(MODEL, replace(PLAIN, method="full", sharding="fsdp", world=8))
    assert sharded.instants["save"] > 2 * 2 * MODEL.widths[0].parameters
    doubled = memory(MODEL, replace(PLAIN, sharding="ddp", world=2))
    assert doubled.instants["optimizer"] == 8 * MODEL.adapter_parameters(16)  # gradients, and a copy
    assert doubled.outside > memory(MODEL, PLAIN).outside


@pytest.mark.parametrize("better", [{"checkpointing": "full"}, {"checkpointing": "selective"}, {"saved_fp8": True}])
def test_saving_less_takes_less(better):
    none = replace(PLAIN, checkpointing="none", micro=4)
    assert memory(MODEL, replace(none, **better)).peak < memory(MODEL, none).peak


@pytest.mark.parametrize("name", ["Qwen3-4B", "gemma-2-2b", "Mixtral-8x7B-v0.1", "DeepSeek-V2-Lite", "demo"])
def test_more_tokens_take_more_for_every_architecture(name):
    model = read_model(name)
    peaks = [memory(model, Setup(context=512, micro=n)).peak for n in (1, 2, 4, 8)]
    assert peaks == sorted(set(peaks))


def test_a_cpu_computes_in_float32_and_has_no_context():
    account = memory(MODEL, Setup(width=4, adapters="same"))
    assert account.outside == 0
    assert account.persistent["16-bit weights"] == 4 * MODEL.parameters


def test_p1_the_nameplate_is_not_what_is_usable():
    """A plan of 21.4 GiB does not fit a "24 GB" A10G: torch reports 22.03 GiB, and the refusal says so."""
    tight = Setup(context=7680, precision="bf16")
    assert 20.9 * GIB < memory(MODEL, tight).high < 24 * GIB
    found, rejected = search(MODEL, [Machine("", gpus()["a10g"], 1)], [tight], Limits(1), "channel")
    assert not found
    assert "22.03 GiB" in rejected[0].reason and "usable" in rejected[0].reason
    assert "out-of-memory messages" in gpus()["a10g"].memory_source


def test_p13_pinned_snapshots_of_a_full_run_do_not_fit_the_host():
    (machine,) = instances(["g7e.2xlarge"], False, {})
    full = replace(PLAIN, method="full")
    assert host_bytes(MODEL, full, 1) > machine.ram == 64 * GIB
    assert host_bytes(MODEL, PLAIN, 1) < machine.ram
    small = read_model("Llama-3.2-3B")
    host = replace(machine, ram=32 * GIB)
    found, _ = search(small, [host], [Setup(method="full", context=512)], Limits(1), "channel")
    assert any("snapshots must be synchronous" in note and "32 GiB" in note for note in found[0].notes)


@pytest.mark.parametrize(
    ("name", "gpu", "scheme", "reason"),
    [
        ("Llama-3.1-8B", "h200", "channel", ""),
        ("Llama-3.1-8B", "a100-80gb", "channel", "no FP8 units"),
        ("Llama-3.1-8B", "h200", "block128", "per channel or tensor, got block128"),
        ("Mixtral-8x7B-v0.1", "h200", "channel", "dense fused layers, which 'mixtral' has not"),
    ],
)
def test_where_activations_are_saved_in_fp8(name, gpu, scheme, reason):
    wanted = [Setup(precision="fp8", context=1024, saved_fp8=True)]
    machine = Machine("", gpu_named(gpu), 1)
    found, rejected = search(read_model(name), [machine], wanted, Limits(4), scheme)
    if reason:
        assert not found and reason in rejected[0].reason
    else:
        assert [(one.setup.backend, one.arithmetic) for one in found] == [("native", "fp8")]
