"""How attention.cu is cut for a problem: pure functions, testable for GPUs nobody here has."""

from __future__ import annotations

from dataclasses import dataclass

HEADS_AT_ONCE = 8  # query heads of a block, the columns of an mma
MOST_SPLITS = 64
BLOCKS = 3  # of a multiprocessor
WIDEST_HEAD, WIDEST_16_BIT = 256, 128  # what fits a thread's registers


@dataclass(frozen=True)
class AttentionBlock:
    """warps of a block, and tiles of 16 tokens that each takes at once."""

    warps: int
    tiles: int

    @property
    def tokens(self) -> int:
        return 16 * self.warps * self.tiles


def attention_block(head: int, sixteen_bit: bool) -> AttentionBlock:
    """For heads of this width: as many keys and values in flight as leave BLOCKS a multiprocessor."""
    return AttentionBlock(4, 2 if head * (1 + sixteen_bit) <= 128 else 1)


def most_splits(blocks: int, processors: int) -> int:
    """Into how many the tokens are split where `blocks` is what is there without: BLOCKS a multiprocessor."""
    return max(1, min(MOST_SPLITS, -(-BLOCKS * processors // max(1, blocks))))
