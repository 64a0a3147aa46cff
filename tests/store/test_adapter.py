"""An adapter on disk: scaling, names, shapes, and everything that is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file

from octavo.base.errors import CheckpointError, MismatchError, OctavoError, RefusedError
from octavo.store.adapter import Adapter

Q = "model.layers.0.self_attn.q_proj"


def write(folder, tensors=None, **config):
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if tensors is None:
        torch.manual_seed(0)
        tensors = {f"base_model.model.{Q}.lora_A.weight": torch.randn(4, 6)}
        tensors[f"base_model.model.{Q}.lora_B.weight"] = torch.randn(10, 4)
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"k_proj": 2}}, 2.0),
    ],
    ids=["alpha/r", "alpha/sqrt(r)", "pattern", "other pattern"],
)
def test_delta(tmp_path, config, scaling):
    tensors = write(tmp_path, **config)
    pair = Adapter.open(tmp_path).pairs[Q]
    a, b = tensors.values()
    torch.testing.assert_close(pair.delta(), scaling * (b @ a))
    torch.testing.assert_close(pair.delta(3, 7), scaling * (b @ a)[3:7])


def test_fan_in_fan_out_transposes(tmp_path):
    tensors = write(tmp_path, fan_in_fan_out=True)
    pair = Adapter.open(tmp_path).pairs[Q]
    a, b = tensors.values()
    assert pair.shape == (6, 10)
    torch.testing.assert_close(pair.delta(), 2.0 * (b @ a).T)
    torch.testing.assert_close(pair.delta(1, 3), 2.0 * (b @ a).T[1:3])


def test_bfloat16_adapter_multiplies_in_float32(tmp_path):
    tensors = {k: v.bfloat16() for k, v in write(tmp_path).items()}
    write(tmp_path, tensors)
    a, b = tensors.values()
    torch.testing.assert_close(Adapter.open(tmp_path).pairs[Q].delta(), 2.0 * (b.float() @ a.float()), rtol=0, atol=0)


def test_match_by_name_and_shape(tmp_path):
    write(tmp_path)
    adapter = Adapter.open(tmp_path)
    assert list(adapter.match({f"{Q}.weight": (10, 6), "lm_head.weight": (9, 6)})) == [f"{Q}.weight"]
    assert list(adapter.match({f"language_model.{Q}.weight": (10, 6)})) == [f"language_model.{Q}.weight"]
    with pytest.raises(MismatchError, match="no weight for"):
        adapter.match({"model.layers.1.self_attn.q_proj.weight": (10, 6)})
    with pytest.raises(MismatchError, match=r"got a base weight \[10, 7\]"):
        adapter.match({f"{Q}.weight": (10, 7)})


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"lora_bias": True},
        {"target_parameters": ["experts.w1"]},
        {"peft_type": "LOHA"},
    ],
    ids=lambda c: next(iter(c)),
)
def test_more_than_plain_lora_is_refused(tmp_path, config):
    write(tmp_path, **config)
    with pytest.raises(RefusedError, match=next(iter(config))):
        Adapter.open(tmp_path)


def test_foreign_tensor_is_refused_by_name(tmp_path):
    tensors = write(tmp_path)
    write(tmp_path, {**tensors, f"base_model.model.{Q}.lora_magnitude_vector.weight": torch.ones(10)})
    with pytest.raises(RefusedError, match="lora_magnitude_vector"):
        Adapter.open(tmp_path)


def broken(folder, case):
    tensors = write(folder)
    if case == "no config":
        (folder / "adapter_config.json").unlink()
    elif case == "bad json":
        (folder / "adapter_config.json").write_text("{")
    elif case == "pickle":
        (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    elif case == "truncated":
        data = (folder / "adapter_model.safetensors").read_bytes()
        (folder / "adapter_model.safetensors").write_bytes(data[:-8])
    elif case == "no B":
        write(folder, {k: v for k, v in tensors.items() if "lora_A" in k})
    elif case == "empty":
        write(folder, {})
    elif case == "nan":
        write(folder, {k: v * torch.nan for k, v in tensors.items()})
    elif case == "ranks":
        write(folder, {k: v[:, :3].contiguous() if "lora_B" in k else v for k, v in tensors.items()})


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no config", "has no adapter_config.json"),
        ("bad json", "not readable JSON"),
        ("pickle", "is a pickle"),
        ("truncated", "not readable"),
        ("no B", "has no lora_B"),
        ("empty", "holds no adapter"),
        ("nan", "NaN or Inf"),
        ("ranks", "need A"),
    ],
)
def test_broken_adapter(tmp_path, case, words):
    broken(tmp_path / "adapter", case)
    with pytest.raises(CheckpointError, match=words) as error:
        Adapter.open(tmp_path / "adapter")
    assert isinstance(error.value, OctavoError)


@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": None},
        {"lora_alpha": "much"},
        {"lora_alpha": 10**400},
        {"lora_alpha": float("nan")},
        {"alpha_pattern": ["q_proj"]},
        {"alpha_pattern": {"((": 1}},
    ],
    ids=["null", "text", "huge", "nan", "list", "pattern"],
)
def test_an_alpha_that_is_none(tmp_path, config):
    write(tmp_path, **config)
    with pytest.raises(CheckpointError, match="lora_alpha"):
        Adapter.open(tmp_path)


@pytest.mark.parametrize(("rank", "dtype"), [(0, torch.float32), (4, torch.int32), (4, torch.complex64)], ids=str)
def test_matrices_without_arithmetic(tmp_path, rank, dtype):
    shapes = {"A": (rank, 6), "B": (10, rank)}
    write(
        tmp_path,
        {f"base_model.model.{Q}.lora_{s}.weight": torch.ones(shape, dtype=dtype) for s, shape in shapes.items()},
    )
    with pytest.raises(CheckpointError, match="rank 1 or more"):
        Adapter.open(tmp_path)
