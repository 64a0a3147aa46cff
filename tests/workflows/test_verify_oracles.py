"""The rules against what they describe: compressed-tensors' own models, and the shared cases where they are at hand."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.workflows.rules.findings import Findings
from octavo.workflows.rules.scheme import check_args
from octavo.workflows.verify import VerifyConfig, verify

VALUES = {
    "num_bits": [8, 4],
    "type": ["float", "int", "FLOAT", "complex"],
    "symmetric": [True, False],
    "strategy": ["tensor", "channel", "group", "block", "token", "tensor_group", "attn_head", "CHANNEL", "odd", None],
    "group_size": [None, 128, -1, 0],
    "block_structure": [None, [128, 128], "128x128", [128], [0, 1]],
    "dynamic": [True, False, "local"],
    "actorder": [None, "weight", "group", "static", False, True],
    "odd_key": [1],
}


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in VALUES.items()}))
def test_quantization_arguments_like_compressed_tensors(args):
    from compressed_tensors.quantization import QuantizationArgs

    try:
        QuantizationArgs.model_validate(args)
        theirs = True
    except (ValueError, NotImplementedError):
        theirs = False
    assert check_args(args, "x", Findings()) == theirs, args


CASES = next((p / "shared" / "cases" for p in Path(__file__).parents if (p / "shared" / "cases").is_dir()), None)


@pytest.mark.slow
@pytest.mark.skipif(CASES is None, reason="no shared/cases beside this checkout")
def test_shared_cases(tmp_path):
    assert CASES is not None
    subprocess.run([sys.executable, CASES / "make_checkpoints.py", tmp_path], check=True, capture_output=True)
    spec = importlib.util.spec_from_file_location("run_cases", CASES / "run_cases.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    wrong = []
    for case, expected in tool.load_cases(tmp_path, ""):
        for row in expected["rows"]:
            reference = (tmp_path / case / row["reference"]).resolve() if row.get("reference") else None
            config = {k: row[k] for k in ("engine", "engine_version", "gpu", "tp")}
            report = verify(VerifyConfig(folder=tmp_path / case, reference=reference, **config))
            note = tool.judge(row, json.loads(report.to_json()))
            if note:
                wrong.append((case, row["engine"], row["gpu"], row["verdict"], report.verdict, note))
    assert not wrong
