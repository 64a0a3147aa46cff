"""Which variant of a kernel a problem takes: pure functions, testable for GPUs nobody here has."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOKENS = 16


@dataclass(frozen=True)
class Tile:
    """A block of w8a16.cu: warps_n x warps_k warps, 16 * tiles_n rows of W for each of the warps_n, 8 * tiles_m tokens.

    depth: chunks of 128 codes a row that a lane has in flight.
    """

    tiles_n: int
    tiles_m: int
    warps_n: int
    warps_k: int
    depth: int

    @property
    def rows(self) -> int:
        return 16 * self.tiles_n * self.warps_n

    @property
    def tokens(self) -> int:
        return 8 * self.tiles_m

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    @property
    def shared_bytes(self) -> int:
        """Partial sums of one block, float32."""
        return self.warps_k * self.tokens * (self.rows + 4) * 4

    def grid(self, m: int, n: int) -> tuple[int, int]:
        return -(-n // self.rows), -(-m // self.tokens)


# Up to 8 tokens cost what one costs. Many rows fill the GPU with blocks, and then little in flight a warp is best
# (measured on an H200, 28672 x 4096); few rows need more of K in flight. Beyond 8 tokens x is read again for every
# block of rows: more rows a block.
FEW, FEW_ROWS, MORE = Tile(1, 1, 1, 4, 1), Tile(1, 1, 1, 8, 2), Tile(2, 2, 1, 8, 1)
MANY_ROWS = 8192


def w8a16_tile(m: int, n: int, k: int) -> Tile | None:
    """The tile for m >= 1 tokens and a weight [n, k], None where w8a16.cu does not take them."""
    if m > MAX_TOKENS or k % 16:
        return None
    if m > FEW.tokens:
        return MORE
    return FEW if n >= MANY_ROWS else FEW_ROWS


MAX_TOKEN_WIDTH = 512 * 8 * 8  # values of a row: threads, rounds of registers, values a load


@dataclass(frozen=True)
class RowBlock:
    """A block of a kernel that takes whole rows: 8 values a thread and round.

    stages: 1, or how many rows are on their way into its shared memory or worked on at once; then it takes every
    `grid`-th row. blocks: as many as are to fit a multiprocessor. flags: further macros that are 1.
    """

    threads: int
    rounds: int
    stages: int = 1
    blocks: int = 1
    flags: tuple[str, ...] = ()

    def shared_bytes(self, matrices: int) -> int:
        """Dynamic shared memory for rows of so many 16-bit matrices."""
        return 16 * matrices * self.threads * self.rounds * self.stages if self.stages > 1 else 0

    def grid(self, m: int, multiprocessors: int) -> tuple[int]:
        return (m if self.stages == 1 else min(m, self.blocks * multiprocessors),)

    def defines(self, flags: tuple[str, ...] = ()) -> dict[str, int]:
        sizes = {"THREADS": self.threads, "ROUNDS": self.rounds, "STAGES": self.stages, "BLOCKS": self.blocks}
        return sizes | {flag: int(flag in self.flags) for flag in flags}


def row_block(k: int, fold: bool = False) -> RowBlock:
    """For a row of k <= MAX_TOKEN_WIDTH values: 128 to 512 threads, four rounds or, where that is not enough, eight."""
    vectors = max(1, -(-k // 8))
    threads = 128
    while vectors > 4 * threads and threads < 512:
        threads *= 2
    return RowBlock(threads, -(-vectors // threads))


def gated_block(k: int, backward: bool, shared: int) -> RowBlock:
    """For a row of k values a matrix. shared: bytes of shared memory that a block can have."""
    vectors = max(1, -(-k // 8))
    return RowBlock(512, -(-vectors // 512))


@dataclass(frozen=True)
class GroupBlock:
    """A block of quantize.cu per group of 128: `rows` rows, 16 threads a group."""

    threads: int
    rows: int

    def grid(self, m: int, k: int) -> tuple[int, int]:
        return -(-m // self.rows), -(-k // (8 * self.threads))


def group_block(k: int) -> GroupBlock:
    return GroupBlock(min(256, 32 * -(-k // 256)), 4)
