"""How attention.cu is cut for a problem: pure functions, testable for GPUs nobody here has."""

from __future__ import annotations

from dataclasses import dataclass

HEADS_AT_ONCE = 8  # query heads of a block, the columns of an mma
MOST_SPLITS = 64
WIDEST_HEAD, WIDEST_16_BIT = 256, 128  # what fits a thread's registers


@dataclass(frozen=True)
class AttentionBlock:
    """warps of a block, tiles of 16 tokens that each takes at once, and how many blocks a multiprocessor runs."""

    warps: int
    tiles: int
    resident: int

    @property
    def tokens(self) -> int:
        return 16 * self.warps * self.tiles


def attention_block(head: int, scales: int, sixteen_bit: bool) -> AttentionBlock:
    """For heads of this width and `scales` a token: as many keys and values in flight as the registers allow."""
    wide = head * (1 + sixteen_bit) > 128
    return AttentionBlock(4, 1 if wide else 2, 2 if head > 128 or head * scales >= 128 else 3)


def most_splits(blocks: int, processors: int, resident: int) -> int:
    """Into how many the tokens are split where `blocks` is what is there without: no more than run at once.

    One block more than that would run alone, when all others have ended.
    """
    return max(1, min(MOST_SPLITS, resident * processors // max(1, blocks)))
