"""A library that reads the weight of a FrozenFloat8Linear as numbers would work on raw bytes: stop it by name.

PEFT wraps the layer like any nn.Linear. Its own merge then fails with a dtype error, or, with safe_merge, adds the
adapter to the bytes as zeros and returns as if all were well; DoRA and the initialisations that decompose the weight
take the bytes for numbers (peft 0.21). PEFT walks down to a layer with `hasattr(layer, "base_layer")` before it touches
the weight, and that question is the one place where the layer itself can see who asks.
"""

from __future__ import annotations

import sys

from octavo.base.errors import RefusedError

_MERGES = ("merge", "unmerge")


def refuse_readers_of_codes(depth: int = 2) -> None:
    """RefusedError if the function `depth` frames up was called by a PEFT routine that reads or writes the weight."""
    asker = sys._getframe(depth)
    if asker.f_code.co_name != "get_base_layer" or asker.f_back is None:
        return
    routine = asker.f_back.f_code.co_name
    if routine in _MERGES:
        raise RefusedError(
            f"PEFT's own {routine} reads the FP8 codes of this layer as weights and would lose the adapter",
            fix="Make adapters with get_peft_model of octavo.integrations.peft, further ones with its register, or "
            "export the run with octavo export.",
        )
    if routine == "init" or (routine.endswith("_init") and routine != "__init__"):
        raise RefusedError(
            f"PEFT's {routine} reads the FP8 codes of this layer as weights",
            need="an adapter that leaves the base weight alone: LoRA or rank-stabilised LoRA",
            fix="DoRA, PiSSA, OLoRA, orthogonal and LoftQ belong to the 16-bit model: use mode two-stage.",
        )


def refuse_adapters_of_experts(depth: int = 2) -> None:
    """RefusedError if a wrapper of PEFT's is the caller: it adds to a stack of experts, here codes, in every pass."""
    if sys._getframe(depth).f_code.co_name == "get_base_layer":
        raise RefusedError(
            "an adapter over stacked experts",
            got="FP8 codes",
            need="adapters of the attention alone",
            fix="target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj'], or experts in 16 bit by the recipe's skip.",
        )
