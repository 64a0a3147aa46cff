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


# Up to 8 tokens cost what one costs. Beyond, x is read again for every block of rows: more rows a block.
FEW, MORE = Tile(1, 1, 1, 8, 2), Tile(2, 2, 1, 8, 1)


def w8a16_tile(m: int, k: int) -> Tile | None:
    """The tile for m >= 1 tokens, None where w8a16.cu does not take them.

    By arithmetic (loads in flight, registers), not yet measured.
    """
    if m > MAX_TOKENS or k % 16:
        return None
    return FEW if m <= FEW.tokens else MORE


@dataclass(frozen=True)
class QuantizeGrid:
    """A launch of quantize.cu: blocks of 256 threads, 8 values a thread and round."""

    blocks: int
    rounds: int


MAX_TOKEN_WIDTH = 2048 * 16  # 16 rounds of registers


def quantize_grid(m: int, k: int, grouped: bool) -> QuantizeGrid:
    """x [m, k] per group of 128 (16 groups a block and round), or one block a token: k <= MAX_TOKEN_WIDTH."""
    if not grouped:
        return QuantizeGrid(m, max(1, -(-k // 2048)))
    rounds = 4
    return QuantizeGrid(-(-m * -(-k // 128) // (16 * rounds)), rounds)
