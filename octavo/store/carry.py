"""What a new quantization_config keeps of the one it replaces: the scheme of the KV cache, transforms, other keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.base.errors import ConfigError
from octavo.store.kv_scales import KV_CACHE_SCHEME

# Said anew by whoever writes the config, or spelled differently there.
_REPLACED = frozenset(
    {"quant_method", "quantization_status", "format", "config_groups", "ignore", "global_compression_ratio"}
    | {"fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers"}
    | {"quant_algo", "exclude_modules", "kv_cache_scheme", "kv_cache_quant_algo", "quantization", "producer"}
)


def carry_over(
    old: Mapping[str, Any], new: dict[str, Any], *, powers_of_two: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """`new` with all of `old` that it can hold, and the keys that it cannot.

    powers_of_two: the new scales are as the old ones were, or powers of two: what `scale_fmt` says of them stays true.
    ConfigError where leaving a key out would change what the model computes.
    """
    result, lost = dict(new), []
    scheme = kv_cache_scheme(old)
    if scheme is not None and new["quant_method"] == "compressed-tensors":
        result["kv_cache_scheme"] = scheme
    elif scheme is not None and scheme.get("strategy", "tensor") == "tensor" and not scheme.get("dynamic"):
        result["kv_cache_quant_algo"] = "FP8"
    elif scheme is not None:
        lost.append("kv_cache_scheme")
    same = old.get("quant_method") == new["quant_method"]
    for key in sorted(set(old) - _REPLACED):
        if same and key not in new and (powers_of_two or key != "scale_fmt"):
            result[key] = old[key]
        elif old[key] and key in ("transform_config", "sparsity_config"):
            fix = "Keep --layout ct."
            raise ConfigError(f"layout of quant_method {new['quant_method']}", got=f"a model with {key}", fix=fix)
        elif old[key] not in (None, {}, [], "", False) and key not in new:
            lost.append(key)
    return result, lost


def kv_cache_scheme(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The declared scheme of an FP8 KV cache as compressed-tensors spells it, or None."""
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        return {**KV_CACHE_SCHEME, **scheme}
    algo = config.get("kv_cache_quant_algo")
    return dict(KV_CACHE_SCHEME) if isinstance(algo, str) and algo.upper() == "FP8" else None
