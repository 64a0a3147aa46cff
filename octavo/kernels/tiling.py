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

    source = "w8a16.cu"

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return _defines(self, "tiles_n", "tiles_m", "warps_n", "warps_k", "depth")

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

    def dynamic_bytes(self, m: int, k: int) -> int:
        return 0

    def grid(self, m: int, n: int) -> tuple[int, int]:
        return -(-n // self.rows), -(-m // self.tokens)


@dataclass(frozen=True)
class Ring:
    """A block of w8a16_ring.cu: like Tile, but its grid is the GPU's size and depth - 1 chunks are under way.

    staged: x as FP16 in shared memory. blocks: of them on a multiprocessor at once. overlap: may start early, and
    then copies codes (1) or has the L2 cache fetch them (2).
    """

    tiles_n: int
    tiles_m: int
    warps_n: int
    warps_k: int
    depth: int
    staged: int = 1
    blocks: int = 1
    overlap: int = 0

    source = "w8a16_ring.cu"

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        names = "tiles_n", "tiles_m", "warps_n", "warps_k", "depth", "staged"
        return *_defines(self, *names), ("EARLY", self.overlap)

    @property
    def rows(self) -> int:
        return 16 * self.tiles_n * self.warps_n

    @property
    def tokens(self) -> int:
        return 8 * self.tiles_m

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    def dynamic_bytes(self, m: int, k: int) -> int:
        """The rings, two sets of partial sums in float32, and x with its rows padded by 16 bytes."""
        ring = self.warps_n * self.warps_k * self.depth * self.tiles_n * 2048
        partial = 2 * self.warps_k * self.tokens * (self.rows + 4) * 4
        return ring + partial + self.staged * m * (-(-k // 128) * 128 + 8) * 2

    def grid(self, n: int, multiprocessors: int) -> tuple[int]:
        return (min(-(-n // self.rows), self.blocks * multiprocessors),)


@dataclass(frozen=True)
class Block:
    """A block of w8a16_tile.cu: `warps` times 16 * tiles_n rows of W, 8 * tiles_m tokens, steps of 64 codes in a ring.

    splits: parts of K that blocks of their own take.
    """

    tiles_n: int
    tiles_m: int
    warps: int
    depth: int
    splits: int = 1

    source = "w8a16_tile.cu"

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return *_defines(self, "tiles_n", "tiles_m", "warps", "depth"), ("SPLIT", int(self.splits > 1))

    @property
    def rows(self) -> int:
        return 16 * self.tiles_n * self.warps

    @property
    def tokens(self) -> int:
        return 8 * self.tiles_m

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def dynamic_bytes(self, m: int, k: int) -> int:
        """The ring; at the end 32 tokens of sums in float32."""
        ring = self.depth * (self.warps * self.tiles_n * 1024 + self.tokens * 144)
        return max(ring, 32 * (self.rows + 4) * 4)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        return -(-n // self.rows), -(-m // self.tokens), self.splits


# Up to 8 tokens cost what one costs. Many rows fill the GPU with blocks, and then little in flight a warp is best
# (measured on an H200, 28672 x 4096); few rows need more of K in flight. Beyond 8 tokens x is read again for every
# block of rows: more rows a block.
FEW, FEW_ROWS, MORE = Tile(1, 1, 1, 4, 1), Tile(1, 1, 1, 8, 2), Tile(2, 2, 1, 8, 1)
MANY_ROWS = 8192


@dataclass(frozen=True)
class Panels:
    """The weight decoded to 16 bit, so many rows (for dX columns) at a time, and torch's product."""

    size: int = 1 << 31


@dataclass(frozen=True)
class Terms:
    """x as two E4M3 terms, one product of FP8 tensor cores over twice as many rows."""


Plan = Tile | Ring | Block | Terms | Panels


def w8a16_plan(m: int, n: int, k: int) -> Plan:
    """For m >= 1 tokens and a weight [n, k]."""
    if m > MAX_TOKENS or k % 16:
        return Panels()
    if m > FEW.tokens:
        return MORE
    return FEW if n >= MANY_ROWS else FEW_ROWS


def w8a16_dx_plan(m: int, n: int, k: int) -> Panels:
    """For m gradients [m, n] and a weight [n, k]."""
    return Panels()


def _defines(tile: object, *names: str) -> tuple[tuple[str, int], ...]:
    """A kernel's macros are its tile's fields."""
    return tuple((name.upper(), getattr(tile, name)) for name in names)


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


@dataclass(frozen=True)
class CastBlock:
    """A block of cast.cu: a row, or 8 * threads * rounds values of it."""

    threads: int
    rounds: int

    @property
    def macros(self) -> tuple[tuple[str, int], ...]:
        return _defines(self, "threads", "rounds")

    def grid(self, m: int, k: int) -> tuple[int, int]:
        return m, -(-k // (8 * self.threads * self.rounds))


def cast_block(k: int) -> CastBlock:
    vectors = max(1, -(-k // 8))
    threads = min(256, 32 * -(-vectors // 32))
    return CastBlock(threads, min(4, -(-vectors // threads)))
