"""torch's CUDA allocator: segments that grow, so that what is reserved follows what is allocated.

A training step asks for blocks of many sizes; in segments of a fixed size their gaps add up to a tenth and more of the
memory (benchmarks/replay.py). The setting is read once, when CUDA starts.
"""

from __future__ import annotations

import os

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the first that is set counts
EXPANDABLE = "expandable_segments:True"


def prefer_expandable_segments() -> str:
    """Ask for them in this process and its children, unless the user has set either variable. Returns what holds."""
    if not any(os.environ.get(name) for name in VARIABLES):
        for name in VARIABLES:
            os.environ[name] = EXPANDABLE
    return setting()


def setting() -> str:
    """`NAME=value` of the variable that counts, or an empty text."""
    return next((f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)), "")


def expandable_segments() -> bool:
    """Whether the environment asks for them."""
    return EXPANDABLE.lower() in setting().replace(" ", "").lower()
