"""Which variant of a kernel a problem takes: pure functions, testable for GPUs nobody here has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

MAX_TOKENS = 16  # that w8a16_ring.cu takes
MAX_TOKEN_WIDTH = 512 * 8 * 8  # values of a row: threads, rounds of registers, values a load


@dataclass(frozen=True)
class RowBlock:
    """A block of a kernel that takes whole rows: 8 values a thread and round.

    stages: 1, or how many rows are on their way into its shared memory or worked on at once; then it takes every
    `grid`-th row and keeps columns in registers. blocks: as many as are to fit a multiprocessor.
    """

    threads: int
    rounds: int
    stages: int = 1
    blocks: int = 1

    def shared_bytes(self, matrices: int) -> int:
        """Dynamic shared memory for rows of so many 16-bit matrices."""
        return 16 * matrices * self.threads * self.rounds * self.stages if self.stages > 1 else 0

    def grid(self, m: int, multiprocessors: int) -> tuple[int]:
        return (m if self.stages == 1 else min(m, self.blocks * multiprocessors),)

    @property
    def defines(self) -> dict[str, int]:
        return {"THREADS": self.threads, "ROUNDS": self.rounds, "STAGES": self.stages, "BLOCKS": self.blocks}


# Measured on an H200 (benchmarks/log.md): bound by arithmetic; columns in registers are worth having few warps.


@lru_cache(maxsize=1024)
def row_block(k: int, fold: bool = False) -> RowBlock:
    """For a row of k <= MAX_TOKEN_WIDTH values: 128 to 512 threads, four rounds or, where that is not enough, eight.

    fold: columns are multiplied in, and stay in registers where those are enough: 64 a thread for two rounds, 80 for
    three.
    """
    vectors = max(1, -(-k // 8))
    if fold and vectors <= 3 * 640:
        rounds, fit = (2, 1024) if vectors <= 512 else (3, 768)
        return _staged(vectors, rounds, fit)
    threads = 128
    while vectors > 4 * threads and threads < 512:
        threads *= 2
    return RowBlock(threads, -(-vectors // threads))


@lru_cache(maxsize=1024)
def gated_block(k: int, backward: bool, shared: int) -> RowBlock:
    """For a row of k values a matrix. shared: bytes of shared memory that a block can have.

    Backward: the columns in registers, 128 a thread, where those are enough.
    """
    vectors = max(1, -(-k // 8))
    staged = _staged(vectors, 4, 512)
    if backward and staged.threads <= 512 and staged.shared_bytes(2) <= shared:
        return staged
    return RowBlock(384, -(-vectors // 384), 1, 3)


def _staged(vectors: int, rounds: int, fit: int) -> RowBlock:
    """Two rows at a time; `fit` threads on a multiprocessor."""
    threads = 32 * -(-vectors // (32 * rounds))
    return RowBlock(threads, -(-vectors // threads), 2, min(8, max(1, fit // threads)))


@dataclass(frozen=True)
class GroupBlock:
    """A block of quantize.cu per group of 128: `rows` rows, 16 threads a group."""

    threads: int
    rows: int

    def grid(self, m: int, k: int) -> tuple[int, int]:
        return -(-m // self.rows), -(-k // (8 * self.threads))


def group_block(k: int) -> GroupBlock:
    return GroupBlock(min(256, 32 * -(-k // 256)), 4)


@dataclass(frozen=True)
class CastBlock:
    """A block of cast.cu: a row, or 8 * threads * rounds values of it."""

    threads: int
    rounds: int

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        return ("THREADS", self.threads), ("ROUNDS", self.rounds)

    def grid(self, m: int, k: int) -> tuple[int, int]:
        return m, -(-k // (8 * self.threads * self.rounds))


def cast_block(k: int) -> CastBlock:
    vectors = max(1, -(-k // 8))
    threads = min(256, 32 * -(-vectors // 32))
    return CastBlock(threads, min(4, -(-vectors // threads)))
