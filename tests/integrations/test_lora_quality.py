"""benchmarks/lora_quality.py on a tiny model: every figure is there, within its limit, and the curves are drawn."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from octavo import quantize
from octavo.integrations import fused
from octavo.ops.lora import Projection

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(fused, "products_run", fused.products_run)  # the script replaces it on a CPU
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("lora_quality")
    for name in ("lora_quality", "curves"):
        sys.modules.pop(name, None)


def test_losses_gradients_and_figure(script, tiny_llama, tmp_path, capsys):
    out, svg = tmp_path / "rows.jsonl", tmp_path / "curves.svg"
    sizes = ["--context", "32", "--windows", "8", "--steps", "3", "--every", "2", "--warm", "2", "--seeds", "5"]
    variants = [name for name in script.VARIANTS if name != "blocks-compensated"]  # two of the others in one
    run = ["--model", str(tiny_llama), "--device", "cpu", *sizes, "--out", str(out), "--variants", *variants]
    assert script.main(run) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    products = [row for row in rows if row["part"] == "gradients" and row["of"] != "layer"]
    assert [row["of"] for row in products] == list(script.LINEARS) and all(row["layers"] == 2 for row in products)
    assert all(0.999 < row["worst"]["cosine dX"] < 0.99999 for row in products), "rounded to E4M3, and no worse"
    curves = {row["variant"]: row for row in rows if row["part"] == "curve"}
    assert list(curves) == variants
    assert len({row["adapters"] for row in curves.values()}) == 1, "every variant starts from the same adapters"
    assert all([step for step, _ in row["held_out"]] == [0, 2, 3] for row in curves.values())
    assert {name for name, row in curves.items() if "judged" in row} == {"fused", "compensated", "blocks"}
    assert all(list(row["judged"]) == list(script.WIDE) for row in curves.values() if "judged" in row)
    assert sum(row["part"] == "held-out loss" for row in rows) == 2 * (1 + 3 * 4), (
        "three of the four judged in four ways"
    )
    assert script.main(["--read", str(out), "--variants", "fused"]) == 0
    again = tmp_path / "again.jsonl"
    assert script.main(["--read", str(out), "--out", str(again), "--svg", str(svg)]) == 0
    assert again.read_text() == out.read_text()
    assert svg.read_text().count("<polyline") == 2 * (7 + 5), "a line a seed and one of means, in two panels"


def test_beyond_a_limit_is_exit_code_one(script, tiny_llama, monkeypatch, capsys):
    monkeypatch.setattr(script, "COSINES", {"product": 0.99999, "layer": 0.997})
    sizes = ["--context", "16", "--windows", "4", "--warm", "1", "--only", "gradients"]
    assert script.main(["--model", str(tiny_llama), "--device", "cpu", *sizes]) == 1
    assert "BEYOND" in capsys.readouterr().out


@pytest.mark.parametrize("sums", ["that cancel", "that do not"])
def test_the_error_that_rounding_alone_makes(script, sums):
    """What tokens share cancels in a gradient whose sum over tokens is zero, as that of keys is; its rounding stays."""
    torch.manual_seed(0)
    x, dy = torch.randn(512, 64), torch.randn(512, 48)
    if sums == "that cancel":
        x, dy = x + 3 * torch.randn(64), dy - dy.mean(0)
    adapter = torch.randn(4, 64).requires_grad_(), torch.randn(48, 4).requires_grad_()
    found = script.product_figures(Projection(quantize(torch.randn(48, 64)), None, *adapter, 2.0), x, dy)
    for letter in "AB":
        alone = found[f"rounding alone d{letter}"]
        assert abs(found[f"error d{letter}: BF16 input"] / alone - 1) < 0.15
        assert (alone > 0.05) == (sums == "that cancel") and found[f"error d{letter}: same input"] < 0.02
