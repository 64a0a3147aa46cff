"""Reading a config.json: where the language model's part is, and its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.base.errors import ConfigError

LARGEST = 2**31  # of any number in a config.json that counts something
MOST_LAYERS = 10_000
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
    """The first of these keys that holds a positive whole number; with a default, null and 0 stand for it.

    ConfigError for a missing one without a default, for another value, and for a number that no model has: sizes are
    multiplied, layers are walked through one by one.
    """
    for name in names:
        value = config.get(name)
        if value is None or (type(value) is int and value == 0 and default is not None):
            continue
        if type(value) is not int or value <= 0:
            raise ConfigError(f"config.json: {name}", got=repr(value)[:60], need="a positive whole number")
        most = MOST_LAYERS if name in ("num_hidden_layers", "n_layer") else LARGEST
        if value > most:
            raise ConfigError(f"config.json: {name}", got=f"a number of {value.bit_length()} bits", need=f"<= {most:,}")
        return value
    if default is None:
        raise ConfigError(f"config.json has no {names[0]}", need="the config.json of a language model")
    return default


def head_dim(text: Mapping[str, Any]) -> int:
    """Width of one attention head. ConfigError for more heads than hidden_size."""
    heads, hidden = number(text, "num_attention_heads"), number(text, "hidden_size")
    width = number(text, "head_dim", default=hidden // heads)
    if width == 0:
        raise ConfigError("config.json: num_attention_heads", got=str(heads), need=f"at most hidden_size, {hidden}")
    return width


def numbers(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The whole numbers under a key, such as layers; none where it is missing. ConfigError for another value."""
    value = config.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(n) is int for n in value):
        raise ConfigError(f"config.json: {name}", got=repr(value)[:60], need="a list of whole numbers")
    return tuple(value)
