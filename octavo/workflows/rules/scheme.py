"""quantization_config as data: method, groups, skip list. How an engine reads it is in the engine's file.

The checks of compressed-tensors arguments follow the pydantic models of compressed-tensors 0.20 (extra="forbid"); the
tests hold them against those models. They are not imported here: that takes four seconds and loads transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.base.report import UNREADABLE, read_json
from octavo.store.tensors import Checkpoint
from octavo.workflows.rules.findings import CONFIG, Findings

ARGS_KEYS = frozenset(
    {"num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"}
    | {"scale_dtype", "zp_dtype", "observer", "observer_kwargs"}
)
GROUP_KEYS = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
STRATEGIES = frozenset({"tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"})
DYNAMIC_STRATEGIES = frozenset({"token", "tensor", "tensor_group", "group"})
ACTIVATION_STRATEGIES = frozenset({"token", "tensor", "group", "tensor_group", "attn_head"})
FORMATS = frozenset(
    {"dense", "sparse-bitmask", "sparse-24-bitmask", "int-quantized", "float-quantized", "naive-quantized"}
    | {"pack-quantized", "marlin-24", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized"}
    | {"mxfp8-quantized", "mixed-precision"}
)
STATUSES = frozenset({"initialized", "calibration", "frozen", "compressed"})
# quant_method of what is not about FP8 codes beside scales, in vLLM 0.33, SGLang 0.5.23 or Transformers 5.24.
OTHER_METHODS = frozenset(
    {"aqlm", "auto-round", "auto_awq", "auto_gptq", "awq", "awq_marlin", "bitnet", "bitsandbytes", "eetq", "exl2"}
    | {"experts_int8", "fbgemm_fp8", "fouroversix", "fp_quant", "gguf", "gpt_oss_mxfp4", "gptq", "gptq_marlin", "higgs"}
    | {
        "hqq",
        "humming",
        "inc",
        "intel",
        "marlin",
        "metal",
        "moe_wna16",
        "mxfp4",
        "mxfp8",
        "nvfp4",
        "octavo",
        "petit_nvfp4",
    }
    | {"qoq", "quanto", "quark", "sinq", "spqr", "torchao", "vptq", "w4afp8", "w8a8_fp8", "w8a8_int8"}
    | {"deepseek_v4_fp8", "fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "int8_per_channel_weight_only"}
)
# Formats whose weights are plain 8-bit codes beside a scale.
CODE_FORMATS = frozenset({"float-quantized", "naive-quantized", "int-quantized"})


@dataclass(frozen=True)
class Weights:
    """strategy: tensor, channel, block or group. block: rows and columns of a block. activation: none, static, dynamic.

    act_strategy: tensor, token or group. kind: float or int. bits: of a code.
    """

    strategy: str
    block: tuple[int, int] | None = None
    activation: str = "dynamic"
    act_strategy: str = "tensor"
    kind: str = "float"
    bits: int = 8

    def __str__(self) -> str:
        size = f" {self.block[0]}x{self.block[1]}" if self.block else ""
        return f"{self.strategy}{size}"


@dataclass(frozen=True)
class Group:
    """A config group of compressed-tensors. weights None: the group quantizes no weight."""

    name: str
    targets: tuple[str, ...]
    weights: Weights | None
    format: str | None


@dataclass
class Scheme:
    """method: `fp8`, `compressed-tensors`, `modelopt`, `none`, or the name of one that is not about FP8.

    raw: the dict as found, `source`: where. skip: the list of modules left alone. groups: compressed-tensors only.
    weights: of the methods that know only one scheme. kv: the declared scheme of the KV cache, as a dict, or None.
    """

    method: str
    raw: dict[str, Any] = field(default_factory=dict)
    source: str = "config.json"
    skip: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    weights: Weights | None = None
    kv: dict[str, Any] | None = None
    format: str | None = None

    @property
    def key(self) -> str:
        return f"{self.source}: quantization_config"


def read_scheme(checkpoint: Checkpoint, out: Findings) -> Scheme:
    """From config.json, else hf_quant_config.json. What is wrong for every engine goes to `out`."""
    raw, source = _find(checkpoint, out)
    if raw is None:
        return Scheme("none")
    method = raw.get("quant_method")
    if method is None and ("config_groups" in raw or isinstance(raw.get("quantization"), dict)):
        method = "compressed-tensors" if "config_groups" in raw else "modelopt"
        if "config_groups" in raw:
            out.error(
                "quant-method-missing", f"{source}: quant_method", "quantization_config has no quant_method.", CONFIG
            )
    if not isinstance(method, str):
        out.error("quant-method-missing", f"{source}: quant_method", "quantization_config has no quant_method.", CONFIG)
        return Scheme("unknown", raw, source)
    method = method.lower()
    if method == "fp8":
        return _native(raw, source, out)
    if method == "compressed-tensors":
        return _compressed_tensors(raw, source, out)
    if method.startswith("modelopt"):
        return _modelopt(raw, source, out)
    if method not in OTHER_METHODS:
        text = (
            f"quant_method {raw['quant_method']!r} is known to no engine: vLLM and SGLang stop, Transformers skips it."
        )
        out.error("quant-method", f"{source}: quant_method", text, CONFIG)
    return Scheme(method, raw, source)


def _find(checkpoint: Checkpoint, out: Findings) -> tuple[dict[str, Any] | None, str]:
    for config, source in ((checkpoint.config, "config.json"), (checkpoint.text_config, "config.json: text_config")):
        for key in ("quantization_config", "compression_config"):
            value = config.get(key)
            if isinstance(value, dict) and value:
                return value, source
            if value is not None and not isinstance(value, dict):
                out.error("quant-config-type", f"{source}: {key}", f"{key} is no JSON object.", CONFIG)
    path = checkpoint.folder / "hf_quant_config.json"
    if not path.is_file():
        return None, ""
    try:
        value = read_json(path)
    except UNREADABLE as error:
        out.error("bad-json", path.name, f"It is not readable JSON ({error}).", "Fetch the file again.")
        return None, ""
    return (value, path.name) if isinstance(value, dict) else (None, "")


def names(value: Any, where: str, out: Findings) -> tuple[str, ...]:
    """A list of module names, or a finding."""
    if value is None:
        return ()
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    out.error("skip-list-type", where, "It must be a list of module names.", CONFIG)
    return ()


def pair(value: Any) -> tuple[int, int] | None:
    """[128, 128] -> (128, 128); None for anything else."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(_positive(n) for n in value):
        return int(value[0]), int(value[1])
    return None


def _positive(value: Any) -> bool:
    """A size that a matrix can have: what is beyond 2^31 is no block, and no array index either."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31


def _one_of(value: Any, known: frozenset[str]) -> bool:
    return isinstance(value, str) and value in known


def _native(raw: dict[str, Any], source: str, out: Findings) -> Scheme:
    where = f"{source}: quantization_config"
    activation = raw.get("activation_scheme", "dynamic")
    if not _one_of(activation, frozenset({"static", "dynamic"})):
        text = f"activation_scheme is {activation!r}; engines know static and dynamic."
        out.error("activation-scheme", f"{where}.activation_scheme", text, CONFIG)
        activation = "dynamic"
    size = raw.get("weight_block_size")
    block = pair(size)
    if size is not None and block is None:
        text = f"weight_block_size is {size!r}; it must be two positive numbers, [128, 128]."
        out.error("block-size", f"{where}.weight_block_size", text, CONFIG)
    fmt = raw.get("fmt", "e4m3")
    if isinstance(fmt, str) and "e5m2" in fmt.lower():
        text = f"fmt is {fmt}; engines take weights for e4m3, whatever it says."
        out.warn("weight-dtype", f"{where}.fmt", text, CONFIG)
    ignored = names(raw.get("ignored_layers"), f"{where}.ignored_layers", out)
    skip = ignored or names(raw.get("modules_to_not_convert"), f"{where}.modules_to_not_convert", out)
    weights = Weights("block" if block else "tensor", block, activation, "group" if block else "tensor")
    return Scheme("fp8", raw, source, skip, weights=weights)


def _modelopt(raw: dict[str, Any], source: str, out: Findings) -> Scheme:
    inner = raw.get("quantization")
    flat = not isinstance(inner, dict)
    body = raw if flat else inner
    assert isinstance(body, dict)
    where = f"{source}: quantization_config" if flat else f"{source}: quantization"
    algo = body.get("quant_algo")
    skip_key = "ignore" if flat else "exclude_modules"
    skip = names(body.get(skip_key), f"{where}.{skip_key}", out)
    if not isinstance(algo, str) or not algo:
        out.error("quant-algo", f"{where}.quant_algo", "quant_algo is missing.", CONFIG)
        return Scheme("modelopt", raw, source, skip)
    kv = body.get("kv_cache_scheme")
    if not isinstance(kv, dict):
        kv_algo = body.get("kv_cache_quant_algo")
        kv = {"num_bits": 8, "type": "float"} if isinstance(kv_algo, str) and kv_algo.upper() == "FP8" else None
    known = {
        "FP8": Weights("tensor", None, "static"),
        "FP8_PER_CHANNEL_PER_TOKEN": Weights("channel", None, "dynamic", "token"),
        "FP8_PB_WO": Weights("block", (128, 128), "dynamic", "group"),
    }
    return Scheme("modelopt", raw, source, skip, weights=known.get(algo.upper()), kv=kv, format=algo.upper())


def _compressed_tensors(raw: dict[str, Any], source: str, out: Findings) -> Scheme:
    where = f"{source}: quantization_config"
    skip = names(raw.get("ignore"), f"{where}.ignore", out)
    fmt = raw.get("format")
    if fmt is not None and not _one_of(fmt, FORMATS):
        out.error("format", f"{where}.format", f"format {fmt!r} is unknown to compressed-tensors.", CONFIG)
    status = raw.get("quantization_status")
    if status is not None and not _one_of(status, STATUSES):
        out.error("status", f"{where}.quantization_status", f"quantization_status {status!r} is unknown.", CONFIG)
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        out.error("no-groups", f"{where}.config_groups", "config_groups is missing or empty.", CONFIG)
        groups = {}
    read = tuple(g for name, value in groups.items() if (g := _group(name, value, f"{where}.config_groups", out)))
    kv = raw.get("kv_cache_scheme")
    if kv is not None:
        kv_where = f"{where}.kv_cache_scheme"
        if not isinstance(kv, dict) or not check_args(kv, kv_where, out):
            kv = None
    return Scheme("compressed-tensors", raw, source, skip, read, kv=kv, format=fmt if isinstance(fmt, str) else None)


def _group(name: str, value: Any, parent: str, out: Findings) -> Group | None:
    where = f"{parent}.{name}"
    if isinstance(value, list):
        text = "A preset name with targets is known to compressed-tensors only; vLLM and SGLang need it spelled out."
        out.warn("preset-group", where, text, CONFIG)
        return None
    if not isinstance(value, dict):
        out.error("group-type", where, "A config group must be an object with targets and weights.", CONFIG)
        return None
    for key in sorted(set(value) - GROUP_KEYS):
        out.error("unknown-key", f"{where}.{key}", f"compressed-tensors forbids the key {key}.", CONFIG)
    targets = names(value.get("targets"), f"{where}.targets", out)
    if not targets:
        out.error("no-targets", f"{where}.targets", "The group names no targets.", CONFIG)
    fmt = value.get("format")
    if fmt is not None and not _one_of(fmt, FORMATS - {"mixed-precision"}):
        out.error("format", f"{where}.format", f"format {fmt!r} is unknown to compressed-tensors.", CONFIG)
    weights, acts = value.get("weights"), value.get("input_activations")
    ok = weights is None or check_args(weights, f"{where}.weights", out)
    acts_ok = acts is None or check_args(acts, f"{where}.input_activations", out, activation=True)
    if weights is None or not ok:
        return Group(name, targets, None, fmt if isinstance(fmt, str) else None)
    parsed = _weights(weights, acts if acts_ok else None)
    return Group(name, targets, parsed, fmt if isinstance(fmt, str) else None)


def _weights(weights: dict[str, Any], acts: dict[str, Any] | None) -> Weights:
    strategy = strategy_of(weights)
    activation = "none" if acts is None else "dynamic" if acts.get("dynamic") else "static"
    act_strategy = strategy_of(acts) if acts else "tensor"
    kind = str(weights.get("type", "int")).lower()
    return Weights(strategy, pair(_block(weights)), activation, act_strategy, kind, weights.get("num_bits", 8))


def _block(args: dict[str, Any]) -> Any:
    value = args.get("block_structure")
    if isinstance(value, str) and all(part.isdigit() for part in value.split("x")):
        return [int(part) for part in value.split("x")]
    return value


def strategy_of(args: dict[str, Any]) -> str:
    """The strategy, inferred from group_size where it is not written."""
    value = args.get("strategy")
    if isinstance(value, str):
        return value.lower()
    size = args.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


def check_args(args: Any, where: str, out: Findings, *, activation: bool = False) -> bool:
    """One QuantizationArgs: True when compressed-tensors would take it."""
    if not isinstance(args, dict):
        out.error("args-type", where, "Quantization arguments must be an object.", CONFIG)
        return False
    wrong = [(key, f"compressed-tensors forbids the key {key}") for key in sorted(set(args) - ARGS_KEYS)]
    strategy, dynamic, size = strategy_of(args), args.get("dynamic", False), args.get("group_size")
    if strategy not in STRATEGIES:
        wrong.append(("strategy", f"strategy {strategy!r} is unknown"))
    if str(args.get("type", "int")).lower() not in ("int", "float"):
        wrong.append(("type", f"type {args.get('type')!r} is unknown"))
    if not isinstance(args.get("num_bits", 8), int):
        wrong.append(("num_bits", f"num_bits is {args.get('num_bits')!r}"))
    if args.get("actorder") is True or str(args.get("actorder")).lower() in ("group", "dynamic"):
        wrong.append(("actorder", f"actorder {args['actorder']!r} has been removed"))
    if not isinstance(dynamic, bool) and (dynamic != "local" or strategy != "tensor_group"):
        wrong.append(("dynamic", f"dynamic is {dynamic!r}"))
    if strategy == "token" and not dynamic:
        wrong.append(("strategy", "strategy token needs dynamic true"))
    if strategy in ("group", "tensor_group") and not _positive(size):
        wrong.append(("group_size", f"strategy {strategy} needs a positive group_size"))
    if _positive(size) and strategy not in ("group", "tensor_group"):
        wrong.append(("group_size", f"group_size goes with strategy group, not {strategy}"))
    block = _block(args)
    if (strategy == "block") != (block is not None):
        wrong.append(("block_structure", "strategy block and block_structure go together"))
    elif block is not None and pair(block) is None:
        wrong.append(("block_structure", f"block_structure is {block!r}"))
    if dynamic and strategy not in DYNAMIC_STRATEGIES:
        wrong.append(("dynamic", f"strategy {strategy} cannot be dynamic"))
    if activation and strategy not in ACTIVATION_STRATEGIES:
        wrong.append(("strategy", f"strategy {strategy} is not for activations"))
    for key, text in wrong:
        out.error("ct-args", f"{where}.{key}", f"{text}.", CONFIG)
    return not wrong
