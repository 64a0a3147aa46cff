"""The rules against what they describe: compressed-tensors' own models, and the shared cases where they are at hand."""

import copy
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
from tests.workflows.broken import decoder, quantize

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


# ---------------------------------------------------------------------------------------------------------- mutations
JSON_VALUES = st.sampled_from(
    [None, True, 0, -1, 1 << 70, 1.5, "", "x", "re:(", [], {}, [1], {"a": 1}, [[128]], "\u0000"]
)


def paths(value, here=()):
    yield here
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*here, key))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folders = {}
    for kind in ("block", "ct-channel", "ct-static", "modelopt"):
        folder = quantize(decoder(layers=2), kind)
        folder.two_shards(lambda n: "layers.1" in n)
        folders[kind] = folder.write(tmp_path_factory.mktemp(kind) / "ckpt")
    return folders


def settings_for(examples):
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@settings_for(150)
@given(st.data())
def test_mutated_config_and_index_never_crash(pristine, data):
    mutate_json(pristine, data)


@settings_for(100)
@given(st.data())
def test_mutated_headers_never_crash(pristine, data):
    mutate_header(pristine, data)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("which", ["json", "header"])
def test_mutations_for_hours(which, pristine):
    settings_for(50_000)(given(st.data())(lambda data: MUTATIONS[which](pristine, data)))()


def mutate_json(pristine, data):
    folder = pristine[data.draw(st.sampled_from(sorted(pristine)))]
    file = folder / data.draw(st.sampled_from(["config.json", "model.safetensors.index.json"]))
    original = file.read_text()
    value = json.loads(original)
    for _ in range(data.draw(st.integers(1, 3))):
        if not value:
            break
        *parents, last = data.draw(st.sampled_from([p for p in paths(value) if p]))
        target = value
        for key in parents:
            target = target[key]
        if data.draw(st.booleans()) or not isinstance(target, dict):
            target[last] = copy.deepcopy(data.draw(JSON_VALUES))
        else:
            del target[last]
    try:
        file.write_text(json.dumps(value))
        report = verify(VerifyConfig(folder=folder, gpu="sm90", quick=True))
    finally:
        file.write_text(original)
    assert report.verdict in ("ok", "warn", "error")


def mutate_header(pristine, data):
    file = pristine["ct-static"] / "model-00001-of-00002.safetensors"
    original = file.read_bytes()
    size = int.from_bytes(original[:8], "little") + 8
    changed = bytearray(original)
    for _ in range(data.draw(st.integers(1, 6))):
        changed[data.draw(st.integers(0, size - 1))] = data.draw(st.sampled_from(b'\x00\xff0129"{}[],:-AFx'))
    try:
        file.write_bytes(bytes(changed))
        report = verify(VerifyConfig(folder=pristine["ct-static"], gpu="sm90"))
    finally:
        file.write_bytes(original)
    assert report.verdict in ("ok", "warn", "error")


MUTATIONS = {"json": mutate_json, "header": mutate_header}
