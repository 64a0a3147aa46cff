"""A Transformers model from its folder: the config, the class, and the weights as Octavo's quantizer takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octavo.base.errors import CheckpointError, ConfigError, OctavoError, RefusedError, UnsupportedError, did_you_mean
from octavo.base.log import logger
from octavo.formats.recipe import Recipe
from octavo.integrations.hub import first_line
from octavo.store.moments import Moments
from octavo.store.scales import Scales
from octavo.store.tensors import Checkpoint

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FP8_METHODS = ("compressed-tensors", "fp8", "modelopt")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_folder(
    folder: Path,
    recipe: Recipe | str | None,
    *,
    device: torch.device,
    dtype: torch.dtype | str | None = None,
    activation: str | None = None,
    scales: Scales | Path | str | None = None,
    moments: Moments | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """`octavo.load` of a folder, for a recipe whose moments are at hand if it needs them."""
    from octavo.integrations.quantizer import OctavoConfig

    quantization = OctavoConfig(recipe, activation, scales=scales, moments=moments)
    checkpoint = Checkpoint.open(folder)
    refuse_other_methods(checkpoint)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    kind = auto_class(config)
    settings: dict[str, Any] = {"device_map": {"": device}} if device.type != "cpu" else {}
    try:
        with _quiet():
            loaded, info = kind.from_pretrained(
                folder,
                config=config,
                quantization_config=quantization,
                dtype=_dtype(dtype, config),
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                **settings,
            )
    except OctavoError:
        raise
    except Exception as error:
        if quantization.problems:
            raise quantization.problems[0] from error
        raise CheckpointError(f"{folder} does not load in Transformers", got=first_line(error)) from error
    _refuse_incomplete(folder, info)
    return loaded


def load_config(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a model folder, without its quantization. RefusedError where remote code would have to run."""
    from transformers import AutoConfig

    values = Checkpoint.open(folder, strict=False).config
    kind = values.get("model_type")
    if "auto_map" in values and not trust_remote_code and not _is_known(kind):
        fix = "Read the Python files in the folder; if you trust them, pass trust_remote_code=True."
        raise RefusedError(f"{folder} is a model of type '{kind}' that brings its own code", fix=fix)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        if not _is_known(kind):
            what = f"model type '{kind}' is unknown to the installed Transformers"
            raise UnsupportedError(what, fix="Run: pip install --upgrade transformers") from error
        raise CheckpointError(f"{folder}/config.json does not load", got=first_line(error)) from error
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return config


def auto_class(config: PretrainedConfig) -> Any:
    """AutoModelForCausalLM, or AutoModelForImageTextToText for a multimodal wrapper. UnsupportedError otherwise."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    ):
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    what = f"Transformers has no language model that generates for model type '{config.model_type}'"
    raise UnsupportedError(what, fix="Give a causal language model.")


def refuse_other_methods(checkpoint: Checkpoint) -> None:
    """CheckpointError for a checkpoint quantized with anything but FP8: what it lost cannot be brought back."""
    for values in (checkpoint.config, checkpoint.text_config):
        inner = values.get("quantization_config", values.get("compression_config"))
        method = inner.get("quant_method") if isinstance(inner, dict) else None
        if inner and method not in FP8_METHODS:
            fix = "Give the original 16-bit model, or an FP8 checkpoint."
            raise CheckpointError(f"{checkpoint.folder} is already quantized", got=f"quant_method {method!r}", fix=fix)


@contextmanager
def _quiet() -> Iterator[None]:
    """Transformers' report of a load prints tracebacks for errors that we raise in one sentence."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(max(before, logging.ERROR))
    report = logging.get_logger("transformers.modeling_utils")
    level = report.level
    report.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        report.setLevel(level)
        logging.set_verbosity(before)


def _is_known(model_type: object) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def _refuse_incomplete(folder: Path, info: dict[str, Any]) -> None:
    kv_scales = (".k_scale", ".v_scale", ".q_scale")  # of an engine's KV cache: nothing is lost without them
    unexpected = sorted(name for name in info.get("unexpected_keys") or () if not name.endswith(kv_scales))
    if unexpected:
        logger().warning(
            "%s: %d tensors have no place in the model, such as %s", folder, len(unexpected), unexpected[0]
        )
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise CheckpointError(f"{folder} lacks weights of its model", got=f"nothing for {some}", fix="Fetch it again.")


def device_of(device: torch.device | str | None) -> torch.device:
    """None: the first GPU, else the CPU. ConfigError: no such word for a device. UnsupportedError: it is not here."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device '{device}'", got=first_line(error)) from None
    if place.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"device {place}", need="cpu or cuda")
    if place.type == "cpu" and place.index:
        raise UnsupportedError(f"device {place}", got="a CPU, which is one device", fix="Use cpu.")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise UnsupportedError(f"device {place}", got=f"{torch.cuda.device_count()} CUDA devices here")
    return place


def _dtype(dtype: torch.dtype | str | None, config: PretrainedConfig) -> torch.dtype:
    if dtype is None:
        stored = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
        return stored if stored in (torch.bfloat16, torch.float16) else torch.bfloat16
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ConfigError(f"dtype {dtype}", fix=did_you_mean(str(dtype), DTYPES))
    assert isinstance(found, torch.dtype)
    return found
