"""The time model against the H200's steps, and what it must say about links, FP8 and unknown GPUs."""

from dataclasses import replace

import pytest

from octavo.base.errors import ConfigError
from octavo.workflows.planner.setup import Setup
from octavo.workflows.planner.source import read_model
from octavo.workflows.planner.tables import Machine, gpu_named, gpus, instances, load
from octavo.workflows.planner.timing import fp8_arithmetic, fp8_shapes, step_time

MODEL = read_model("Llama-3.1-8B")
H200 = Machine("", gpus()["h200"], 1)
PLAIN = Setup(context=4096, adapters="float32", loss="plain")
LIGER = replace(PLAIN, loss="liger", fused_layers=True)

# tokens/s on one H200 (benchmarks/log.md, 2026-11-29). Rates of products, attention and copies come from the same day.
MEASURED = {
    "stock, checkpointing": (replace(PLAIN, micro=4), 6372),
    "liger, checkpointing": (replace(LIGER, micro=4), 7313),
    "liger, checkpointing, 16-bit adapters": (replace(LIGER, micro=4, adapters="same"), 10948),
    "liger, no checkpointing": (replace(LIGER, micro=2, checkpointing="none"), 10192),
}


@pytest.mark.parametrize("name", MEASURED)
def test_measured_steps_within_ten_percent_and_in_the_range(name):
    setup, tokens = MEASURED[name]
    time = step_time(MODEL, setup, H200)
    assert setup.tokens / time.seconds == pytest.approx(tokens, rel=0.1)
    assert time.low < setup.tokens / tokens < time.high and time.measured


def test_parts_are_the_whole():
    time = step_time(MODEL, replace(PLAIN, micro=4, accumulation=3), H200)
    assert sum(time.parts.values()) == pytest.approx(time.seconds)


def test_recomputation_costs_a_forward_pass_and_does_not_count_as_use():
    none = step_time(MODEL, replace(LIGER, micro=2, checkpointing="none"), H200)
    full = step_time(MODEL, replace(LIGER, micro=2), H200)
    assert 1.2 < full.seconds / none.seconds < 1.5
    assert full.mfu < none.mfu < 1


def test_fused_layers_measured():
    """tokens/s of benchmarks/log.md, 2026-11-30: what is run again there leaves out the MLP's last product."""
    fused = replace(LIGER, micro=4, adapters="autocast", precision="fp8", saved_fp8=True, backend="native")
    for setup, tokens in ((replace(fused, checkpointing="none"), 23237), (fused, 17791)):
        time = step_time(MODEL, setup, H200)
        assert setup.tokens / time.seconds == pytest.approx(tokens, rel=0.1)


def test_small_models_wait_for_launches():
    assert step_time(read_model("demo"), Setup(context=512), H200).bound == "launches"
    assert step_time(MODEL, PLAIN, H200).bound == "GPU"


def test_p16_eight_cards_on_pcie_are_not_eight_times_one():
    """FSDP gathers the weights in every pass of an accumulation: over PCIe that shows, and the range is wide."""
    one, eight = (instances([name], False, {})[0] for name in ("g6e.4xlarge", "g6e.48xlarge"))
    alone = step_time(MODEL, Setup(context=1024, accumulation=8), one)
    sharded = step_time(MODEL, Setup(context=1024, world=8, sharding="fsdp"), eight)
    replicas = step_time(MODEL, Setup(context=1024, world=8, sharding="ddp"), eight)
    assert sharded.seconds > alone.seconds / 8 * 1.3
    assert replicas.seconds < sharded.seconds
    assert (sharded.high - sharded.low) / sharded.seconds > (alone.high - alone.low) / alone.seconds
    fast = instances(["p5.48xlarge"], False, {})[0]
    linked = step_time(MODEL, Setup(context=1024, world=8, sharding="fsdp"), fast)
    assert linked.parts["exposed communication"] < sharded.parts["exposed communication"] / 3


def test_several_instances_are_bound_by_the_network():
    (p4d,) = instances(["p4d.*"], False, {})
    setup = Setup(method="full", context=1024, sharding="fsdp")
    near = step_time(MODEL, replace(setup, world=8), p4d)
    far = step_time(MODEL, replace(setup, world=16), p4d, nodes=2)
    assert far.parts["exposed communication"] > near.parts["exposed communication"]


@pytest.mark.parametrize(
    ("gpu", "scheme", "reason"),
    [
        ("a100-80", "channel", "no FP8 units"),
        ("a10g", "tensor", "no FP8 units"),
        ("rtxpro6000", "channel", "row-scaled"),
        ("rtxpro6000", "tensor", None),
        ("l40s", "channel", None),
        ("h200", "block128", None),
        ("l4", "block128", "no FP8 product"),
    ],
)
def test_p6_fp8_products_by_recipe_and_capability(gpu, scheme, reason):
    found = fp8_arithmetic(gpus()[gpu], scheme)
    assert found is None if reason is None else reason in found


def test_shapes_that_fp8_products_dislike_are_named():
    assert fp8_shapes(MODEL, "block128") == []
    assert any("q_proj [576, 576]" in text for text in fp8_shapes(read_model("demo"), "block128"))


def test_an_unknown_gpu_is_never_taken_for_another():
    for name in (
        "h300",
        "l40s-2",
        "a100",
        "",
        "NVIDIA H100 PCIe",
        "H100 NVL",
        "RTX PRO 6000 Blackwell Workstation Edition",
    ):
        with pytest.raises(ConfigError, match="unknown to the planner"):
            gpu_named(name)
    with pytest.raises(ConfigError) as error:
        gpu_named("A100")
    assert error.value.fix == "Say which: a100-40, a100-80."


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("A100-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000"),
        ("RTX PRO 6000", "rtxpro6000"),
    ],
)
def test_gpus_as_drivers_name_them(said, name):
    assert gpu_named(said).name == name


@pytest.mark.parametrize("table", ["gpus", "instances"])
def test_every_value_of_the_tables_has_source_and_date_and_none_is_zero(table):
    content = load(table)
    for name, entry in content[table].items():
        for key, cell in entry.items():
            assert cell["value"] != 0, f"{name} {key}: unknown is null"
            if cell["value"] is not None:
                source = content["sources"][cell["source"]]
                assert source["url"].startswith("https://") and len(source["date"]) == 10, f"{name} {key}"


def test_every_constant_says_whether_it_was_measured_and_where():
    content = load("calibration")
    constants = [*content["factors"].values(), *content["rates"]["h200"].values()]
    assert all(c["kind"] in ("measured", "estimated") and c["source"] in content["sources"] for c in constants)
    assert all(c["low"] <= c["value"] <= c["high"] for c in content["factors"].values())
