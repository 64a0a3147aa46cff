"""octavo plan: limits, ranking, reasons, run.yaml, and that none of it needs torch."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

from octavo.base.errors import ConfigError
from octavo.cli import main
from octavo.workflows.plan import PlanConfig, plan
from octavo.workflows.planner import search as searching
from octavo.workflows.planner.model import Model
from octavo.workflows.planner.tables import backend, gpus
from tests.workflows.planner.test_model import write_headers

EIGHT_B = {"model": "Llama-3.1-8B", "context": 4096, "batch": 16}


def planned(**settings):
    return plan(PlanConfig.parse(EIGHT_B | settings, "test"))


def test_llama_8b_over_all_instances_without_torch():
    """How long it takes is measured by benchmarks/planner.py."""
    code = (
        "import sys\n"
        "from octavo.cli.main import run\n"
        "code = run(['plan', 'meta-llama/Llama-3.1-8B', '--context', '4096', '--batch', '16', '--json'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert code == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["plan"]["parameters"] == 8_030_261_248


def test_the_batch_is_met_exactly():
    report = planned()
    for one in [*report.options, *report.pareto]:
        assert one.micro_batch * one.accumulation * one.gpus == 16
    odd = planned(batch=12, instance=("p5.48xlarge",))
    assert not odd.options and "12 sequences does not divide among 8 GPUs" in odd.rejected[0].reason


def test_order_and_pareto():
    by_cost, by_time = planned(), planned(order="time", tokens=20_000_000)
    assert by_cost.options[0].usd_per_million_tokens == min(o.usd_per_million_tokens or 1e9 for o in by_cost.options)
    assert by_time.options[0].hours == min(o.hours for o in by_time.options)
    known = [o for o in by_time.pareto if o.cost_usd is not None]
    assert [o.seconds_per_step for o in known] == sorted(o.seconds_per_step for o in known)
    assert [o.cost_usd for o in known] == sorted((o.cost_usd for o in known), reverse=True)


def test_an_unknown_price_is_unknown_and_never_nothing():
    report = planned(instance=("p5e.*",))
    assert report.options[0].usd_per_hour is report.options[0].usd_per_million_tokens is None
    refused = planned(instance=("p5e.*",), budget=100.0, tokens=10**7)
    assert not refused.options and any("price is unknown" in r.reason for r in refused.rejected)


def test_prices_of_the_user_win(tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("p5e.48xlarge: 40\n")
    (option,) = planned(instance=("p5e.*",), prices=prices, spot=True).options
    assert option.usd_per_hour == 40
    spot = planned(instance=("g6e.*",), spot=True)
    assert all(o.usd_per_hour is None for o in spot.options) and any("spot prices" in n for n in spot.notes)


def test_a_price_of_a_gpu_is_for_each_and_of_nothing_is_refused(tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("h200: 3\nml.p5.48xlarge: 40\n")
    report = planned(gpu=("h200",), prices=prices, budget=100.0, tokens=10**6)
    assert {o.gpus: o.usd_per_hour for o in report.options} == {1: 3, 2: 6, 4: 12, 8: 24}
    assert planned(instance=("ml.p5.48xlarge",), prices=prices).options[0].usd_per_hour == 40
    prices.write_text("p5.48xlrge: 40\n")
    with pytest.raises(ConfigError, match=r"'p5\.48xlrge' is no instance type") as error:
        planned(prices=prices)
    assert "p5.48xlarge" in error.value.fix


@pytest.mark.parametrize("price", ["cheap", "0", "-1", ".inf", ".nan", "true", "[1]"])
def test_what_is_no_price(tmp_path, price):
    prices = tmp_path / "prices.yaml"
    prices.write_text(f"p5.48xlarge: {price}\n")
    with pytest.raises(ConfigError, match=r"p5\.48xlarge"):
        planned(prices=prices)


def test_every_limit_says_why(tmp_path):
    cases = {
        "usable": {"gpu": ("rtx4090",), "precision": "bf16", "max_gpus": 1, "loss": "plain"},
        "at most 4": {"instance": ("p5.48xlarge",), "max_gpus": 4},
        "the budget is 1": {"instance": ("g7e.2xlarge",), "budget": 1.0, "tokens": 20_000_000},
        "the deadline is 0.1 h": {"instance": ("g7e.2xlarge",), "deadline": 0.1, "tokens": 20_000_000},
        "products": {"gpu": ("a100-80",), "method": "full", "precision": "fp8", "max_gpus": 1},
    }
    for words, limits in cases.items():
        report = planned(**limits)
        assert not report.options and report.run is None
        assert any(words in r.reason for r in report.rejected), (words, report.rejected)


def test_memory_limit_of_a_gpu_moves_the_plan():
    free, tight = planned(gpu=("h200",), max_gpus=1), planned(gpu=("h200",), max_gpus=1, max_memory_per_gpu=30)
    assert free.options[0].memory_gib > 30 > tight.options[0].memory_range_gib[1]


def test_several_instances_only_where_more_gpus_are_allowed():
    def most(**limits):
        report = planned(model="Llama-3.1-70B", instance=("p4d.*",), batch=32, **limits)
        return max((o.gpus for o in report.options), default=0)

    assert most() == 8 and most(max_gpus=32) == 32


def test_fp8_storage_is_offered_on_ampere_and_says_how_it_computes():
    report = planned(gpu=("a10g",), precision="fp8", max_gpus=1, context=1024)
    assert report.options[0].arithmetic == "16bit"
    assert "no FP8 units" in report.options[0].notes[0]


def test_p6_a_scheme_without_a_product_falls_back_with_its_reason(monkeypatch):
    fast = replace(backend("native"), rounded=False)
    monkeypatch.setattr(searching, "_backends", lambda sm: [fast])
    assert searching.octavo_arithmetic(gpus()["h200"], "channel") == ("fp8", "channel", "")
    kind, scheme, why = searching.octavo_arithmetic(gpus()["rtxpro6000"], "channel")
    assert (kind, scheme) == ("fp8", "tensor") and "row-scaled" in why
    assert searching.octavo_arithmetic(gpus()["a10g"], "channel")[0] == "16bit"


def test_backends_of_the_operations_are_known_to_the_planner():
    """A backend that capability.json does not know counts as 16-bit arithmetic: name it there."""
    from octavo.ops.backends import BACKENDS

    assert set(BACKENDS) <= set(searching.load("capability")["backends"])


def test_logits_that_dominate_are_named_with_the_remedy():
    report = planned(context=32768, batch=1, gpu=("h200",), max_gpus=1, checkpointing="full", loss="plain")
    assert report.options[0].dominant == "logits"
    assert any("--loss tiled" in note for note in report.notes)
    fused = planned(context=32768, batch=1, gpu=("h200",), max_gpus=1, checkpointing="full", loss="tiled")
    assert fused.options[0].dominant != "logits" and not any("--loss tiled" in n for n in fused.notes)


def test_activations_of_an_unknown_family_are_said_to_be_a_guess(tmp_path):
    """Headers give the parameters of any model; what autograd keeps in its layers they do not."""
    llama = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    llama |= {"num_attention_heads": 4, "vocab_size": 256}
    write_headers(tmp_path / "model.safetensors", Model.from_config("x", llama).shapes)
    for kind, said in (("llama", False), ("glm4_moe", True)):
        (tmp_path / "config.json").write_text(json.dumps(llama | {"model_type": kind}))
        report = planned(model=str(tmp_path), gpu=("h200",), max_gpus=1)
        assert report.options and any("activations of 'glm4_moe'" in note for note in report.notes) == said


def test_run_yaml_is_what_finetune_takes(tmp_path):
    from octavo.workflows.finetune import FinetuneConfig

    file = tmp_path / "run.yaml"
    report = planned(gpu=("h200",), max_gpus=1, write=file, data="d.txt", out=tmp_path / "run", tokens="1M")
    config = FinetuneConfig.load(file)
    assert config.micro_batch * config.accumulation == 16 and config.context == 4096
    assert config.max_steps == report.steps == 16
    assert config.checkpointing == report.options[0].checkpointing
    assert (config.mode == "lora") == (report.options[0].precision == "fp8")
    assert file.read_text().startswith("# octavo plan: 1 x h200; predicted")
    assert report.command == f"octavo finetune {file}"


def test_run_yaml_without_data_leaves_it_to_the_command(tmp_path):
    file = tmp_path / "run.yaml"
    report = planned(gpu=("h200",), max_gpus=1, write=file)
    assert report.command == f"octavo finetune {file} --data DATA --out OUT"
    run = yaml.safe_load(file.read_text())
    assert "data" not in run and run["model"] == "meta-llama/Llama-3.1-8B"


def test_what_finetune_does_not_run_has_no_run_yaml(tmp_path):
    report = planned(method="full", gpu=("b300",))
    assert report.options and report.run is None and "no run.yaml" in report.notes[-1]
    for settings in ({"max_gpus": 8, "order": "time"}, {"max_gpus": 1, "loss": "liger"}):
        report = planned(gpu=("h200",), **settings)
        assert report.options and report.run is report.command is None and "no run.yaml" in report.notes[-1]
    with pytest.raises(ConfigError, match="nothing that octavo finetune could run"):
        planned(method="full", gpu=("b300",), write=tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"budget": 5.0}, "tokens"),
        ({"instance": ("p9.*",)}, "p9"),
        ({"gpu": ("h999",)}, "h999"),
        ({"gpu": ("h100",), "instance": ("g5.*",)}, "no such instance has h100"),
        ({"target_modules": ("nothing",)}, "nothing"),
        ({"tokens": "many"}, "tokens"),
        ({"tokens": "1.2.3M"}, "tokens"),
        ({"tokens": "9" * 400 + "M"}, "tokens"),
        ({"tokens": 10**400}, "tokens"),
        ({"context": 10**400}, "context"),
        ({"rank": 10**400}, "rank"),
        ({"max_gpus": 10**400}, "max_gpus"),
        ({"gpu": ""}, "gpu: .*names nothing"),
        ({"instance": (",",)}, "instance: .*names nothing"),
    ],
)
def test_bad_limits_are_clear_errors(settings, word):
    with pytest.raises(ConfigError, match=word):
        planned(**settings)


def test_the_command_prints_a_table_the_reasons_and_the_next_step(capsys):
    instances = "g5.xlarge,g5.2xlarge,ml.g7e.2xlarge"
    argv = ["plan", "Llama-3.1-8B", "--context", "2048", "--instance", instances, "--tokens", "20M"]
    assert main.run(argv) == 0
    out = capsys.readouterr().out
    assert "8,030,261,248 by formula" in out and out.count("not g5.xlarge, g5.2xlarge, bf16, checkpointing none") == 1
    assert "next: the same with --write run.yaml, then octavo finetune run.yaml --data DATA --out OUT" in out


def test_nothing_that_fits_is_exit_code_one(capsys):
    assert main.run(["plan", "Llama-3.1-70B", "--gpu", "l4", "--max-gpus", "1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["plan"]["options"] == []


def test_both_tables_of_gpus_agree():
    """base/hardware.py says what a GPU can run, gpus.json what it has: no card may have two capabilities."""
    from octavo.base.hardware import caps_named

    for name, gpu in gpus().items():
        family = re.sub(r"-(40|80)$", "", name)
        assert caps_named(family).tag == gpu.sm, name
