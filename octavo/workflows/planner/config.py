"""Reading a config.json: where the language model's part is, and its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.base.errors import ConfigError

TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json about the language model."""
    for key in TEXT_CONFIGS:
        inner = config.get(key)
        if isinstance(inner, dict):
            deeper = inner.get("text_config")
            return deeper if isinstance(deeper, dict) else inner
    return config


def number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these keys that holds a positive whole number. ConfigError for none without a default."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if value is not None and default is None:
            raise ConfigError(f"config.json: {name}", got=repr(value), need="a positive whole number")
    if default is None:
        raise ConfigError(f"config.json has no {names[0]}", need="the config.json of a language model")
    return default


def head_dim(text: Mapping[str, Any]) -> int:
    heads = number(text, "num_attention_heads")
    return number(text, "head_dim", default=number(text, "hidden_size") // heads)
