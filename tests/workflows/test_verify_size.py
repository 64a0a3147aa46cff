"""verify on large checkpoints, scaled down from benchmarks/verify.py: memory does not follow size, nor do headers."""

import importlib.util
import time
from pathlib import Path

from octavo.workflows.verify import VerifyConfig, verify

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "verify.py"
spec = importlib.util.spec_from_file_location("benchmark_verify", SCRIPT)
assert spec is not None and spec.loader is not None
benchmark = importlib.util.module_from_spec(spec)
spec.loader.exec_module(benchmark)


def test_memory_does_not_follow_the_size(tmp_path):
    """Mapped pages count as memory too: a view of a file lives as long as one slice is looked at."""
    size = benchmark.make(tmp_path / "sparse", 1, 2, vocab=32_000)
    large, small = benchmark.measure(tmp_path / "sparse"), benchmark.measure(tmp_path / "sparse", mode="quick")
    assert size > 1.8
    assert large["memory_mb"] - small["memory_mb"] < 300
    assert large["codes"] == ["all-zero"] and small["verdict"] == "ok"


def test_headers_take_time_in_proportion(tmp_path):
    sizes = {"hidden": 1024, "inter": 2048, "kv": 128, "vocab": 256}
    for layers, name in ((30, "few"), (120, "many")):
        benchmark.make(tmp_path / name, layers, 2 * layers, **sizes)

    def seconds(name):
        start = time.process_time()
        verify(VerifyConfig(folder=tmp_path / name, gpu="sm90", quick=True))
        return time.process_time() - start

    few, many = (min(seconds(name) for _ in range(3)) for name in ("few", "many"))
    assert many < 9 * few  # four times as much; what compared all with all would take sixteen
