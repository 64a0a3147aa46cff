"""F5: the only folder that imports transformers, peft, trl, accelerate, datasets and lm_eval, on call."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.integrations.snapshots import SnapshotCallback as SnapshotCallback

__all__ = ["SnapshotCallback"]


def __getattr__(name: str) -> object:
    if name != "SnapshotCallback":
        raise AttributeError(f"module 'octavo.integrations' has no attribute '{name}'")
    from octavo.integrations.snapshots import SnapshotCallback

    return SnapshotCallback
