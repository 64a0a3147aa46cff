"""octavo bench: its checks on the CPU, where its times are made up, and what it says without a GPU."""

import json

import pytest
import torch

from octavo.base.errors import OctavoError, UnsupportedError
from octavo.cli.main import run
from octavo.integrations import fused
from octavo.ops import attention
from octavo.testing import fake_caps
from octavo.workflows import bench as workflow
from octavo.workflows.bench import BenchConfig, bench
from octavo.workflows.measures import decode, gemm, kv, lora, w8a16
from tests.conftest import TINY

TINY_LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, **TINY}


@pytest.fixture
def on_cpu(monkeypatch):
    """Everything as it is, but timed as one millisecond."""
    for measure in (decode, gemm, kv, w8a16):
        monkeypatch.setattr(measure, "graph_milliseconds", lambda calls, rounds: float([c() for c in calls] != []))
    monkeypatch.setattr(decode, "milliseconds", lambda call, rounds: 1.0 + (call() is None))
    monkeypatch.setattr(decode, "NEW", 8)
    for measure in (kv, w8a16):
        monkeypatch.setattr(measure, "FLUSH_BYTES", 1)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1 << 20)
    monkeypatch.setattr(decode, "SMALL_GPU", (1 << 30) + (1 << 19))


def test_not_measured_without_a_gpu(capsys):
    with pytest.raises(UnsupportedError, match="not measured here"):
        bench(BenchConfig(name="kv"))
    assert run(["bench", "decode"]) == 3
    assert "bench decode: not measured here" in capsys.readouterr().err


def test_unknown_name(capsys):
    assert run(["bench", "kw"]) == 2
    assert "kv" in capsys.readouterr().err


def test_kv(on_cpu):
    least = kv.check("cpu", [(32, 2, 40)])
    assert set(least) == set(kv.KINDS) and min(least.values()) > kv.FLOOR_DB
    rows = list(kv.rows("cpu", (64,), (2,)))
    assert [row["what"] for row in rows] == ["tensor", "token-head", "16bit", "torch bf16"]
    sizes = {row["what"]: row["bytes"] for row in rows}
    assert sizes["16bit"] == 2 * (sizes["tensor"] - 8) == 2 * 2 * 2 * 8 * 64 * 128


def test_kv_says_no(on_cpu, monkeypatch):
    right = attention.attend
    monkeypatch.setattr(kv, "attend", lambda *args, **options: right(*args, **options) * 1.01)
    with pytest.raises(OctavoError, match="gate of kv"):
        kv.check("cpu", [(32, 2, 40)])


def test_w8a16(on_cpu, monkeypatch):
    rows = list(w8a16.rows("cpu", (1, 3), [(48, 64)]))
    assert [(row["what"], row["tokens"]) for row in rows] == [
        ("row", 1),
        ("row", 3),
        ("block128x128", 1),
        ("block128x128", 3),
    ]
    monkeypatch.setattr(w8a16, "FLOOR_DB", 80.0)
    with pytest.raises(OctavoError, match="check of w8a16"):
        list(w8a16.rows("cpu", (1,), [(48, 64)]))


def test_gemm(on_cpu, monkeypatch):
    rows = list(gemm.rows("cpu", 64, [(128, 256)]))
    assert [row["what"] for row in rows] == ["row", "block128x128"] and all(row["speedup"] == 1 for row in rows)
    monkeypatch.setattr(gemm, "FLOOR_DB", 99.0)
    with pytest.raises(OctavoError, match="check of gemm: row, 64 x 128 x 256"):
        next(gemm.rows("cpu", 64, [(128, 256)]))


def test_lora(on_cpu, monkeypatch):
    """Fused layers as their oracle in torch; the rival needs Liger."""
    monkeypatch.setattr(fused, "products_run", lambda shape, device: True)
    monkeypatch.setattr(lora, "version_of", lambda package: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 << 20)
    rows = list(lora.rows(TINY_LLAMA, "cpu", list(lora.VARIANTS)[:2], sequence=32))
    assert "not measured" in rows[0]["outcome"] and rows[1]["tokens_s"] > 0 and rows[1]["db"] > 30
    monkeypatch.setitem(lora.ROOM_DB, "gradients", -9.0)
    with pytest.raises(OctavoError, match="gate of lora: gradients of fused layers"):
        lora.check(TINY_LLAMA, "cpu", 16)


def test_decode(on_cpu, monkeypatch):
    some = [name for name in decode.VARIANTS if name != "graph bf16, kv fp8" and "tensor" not in name]
    rows = list(decode.rows(TINY_LLAMA, "cpu", some, (2,), (4,)))
    measured = [row for row in rows if "tokens_s" in row]
    assert [row["what"] for row in measured] == some
    assert all((row["db"] or 99) > 22 for row in measured)
    parts = [row for row in rows if row["what"].startswith("parts of")]
    assert len(parts) == 3 and parts[0]["sum"] > 0
    fit = {row["what"].partition(", ")[2]: row["tokens"] for row in rows if row["what"].startswith("tokens in")}
    assert fit["graph fp8, kv fp8"] > 1.4 * fit["graph bf16, kv bf16"] > 0
    monkeypatch.setitem(decode.FLOOR_DB, "token-head", 200.0)
    with pytest.raises(OctavoError, match="gate of decode"):
        next(decode.rows(TINY_LLAMA, "cpu", ["graph bf16, kv fp8"], (1,)))


def test_tokens_that_fit(on_cpu, monkeypatch):
    """What is made for a capacity beside the caches counts, too; where more was taken, fewer tokens are tried."""
    model = decode.random_model(TINY_LLAMA, "bf16", "cpu")
    peaks, sizes = iter([decode.SMALL_GPU + (1 << 16), decode.SMALL_GPU]), []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    right = decode.Decoder
    monkeypatch.setattr(
        decode, "Decoder", lambda *x, **options: sizes.append(options["capacity"]) or right(*x, **options)
    )
    row = decode._context(model, "16bit", 0, "cpu")
    assert row["bytes_a_token"] == 2 * 2 * 2 * 16 * 2 and sizes[0] == decode.STEP
    assert sizes[1] <= (1 << 19) / (256 + 1 + 8 + 2 * 8 * 2) < sizes[1] + decode.STEP and row["tokens"] == sizes[2]
    assert sizes[2] == sizes[1] - decode.STEP
    assert decode._context(model, "16bit", 1 << 20, "cpu")["tokens"] == 0
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: decode.SMALL_GPU + 1)
    with pytest.raises(OctavoError, match="a cache of"):
        decode._context(model, "16bit", 0, "cpu")


def test_report(on_cpu, monkeypatch, capsys):
    monkeypatch.setattr(workflow, "caps_of", lambda: fake_caps("h200"))
    monkeypatch.setattr(workflow, "published", lambda: {workflow.MODEL: TINY_LLAMA})
    monkeypatch.setattr(workflow, "_device", lambda: "cpu")
    monkeypatch.setattr(workflow.kv, "check", lambda device: {"tensor": 51.0})
    monkeypatch.setattr(workflow.w8a16, "SHAPES", ((48, 64),))
    for measure in (workflow.kv, workflow.decode, workflow.gemm, workflow.lora):
        monkeypatch.setattr(
            measure, "rows", lambda *sizes, **options: iter([{"what": "tensor", "db": 50.0, "us": 1.0}])
        )
    for name in ("decode", "kv", "w8a16", "gemm", "lora"):
        assert run(["bench", name, "--quick", "--json"]) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert report["rows"] and report["checked"] and report["machine"]["device"] == "h200 (sm90)"
