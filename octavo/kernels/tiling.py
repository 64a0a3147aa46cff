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
    """A block of a kernel that holds one row: 8 values a thread and round."""

    threads: int
    rounds: int


def row_block(k: int) -> RowBlock:
    """For a row of k <= MAX_TOKEN_WIDTH values: 128 to 512 threads, four rounds or, where that is not enough, eight."""
    vectors = max(1, -(-k // 8))
    threads = 128
    while vectors > 4 * threads and threads < 512:
        threads *= 2
    return RowBlock(threads, -(-vectors // threads))


GROUP_ROUNDS = 4  # of 16 groups of 128 a block of 256 threads


def group_blocks(m: int, k: int) -> int:
    """Blocks of quantize.cu for x [m, k] per group of 128."""
    return -(-m * -(-k // 128) // (16 * GROUP_ROUNDS))
