"""How backend `w8a16` multiplies: pure functions from a problem and a GPU to a kernel, its tile and its grid.

What was measured is in ops/table.json: up to how many tokens each way is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import ClassVar

from octavo.kernels.tiling import MAX_TOKEN_WIDTH, MAX_TOKENS

# CUDA C++ Programming Guide, technical specifications per compute capability; multiprocessors of A100, RTX 3090, L40S,
# H100, B200 and RTX 5090.
SHARED = {
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (12, 0): 99 << 10,
}
MULTIPROCESSORS = {(8, 0): 108, (8, 6): 82, (8, 9): 142, (9, 0): 132, (10, 0): 148, (12, 0): 170}


@dataclass(frozen=True)
class Gpu:
    """shared: bytes of shared memory that one block can ask for."""

    sm: tuple[int, int]
    multiprocessors: int
    shared: int


@dataclass(frozen=True)
class Operands:
    """x in BF16 or FP16; the codes' format; scales: 0 per tensor, 1 per row, 2 per block 128 x 128."""

    bf16: bool = True
    e4m3: bool = True
    scales: int = 1


@dataclass(frozen=True)
class Tokens:
    """Up to how many tokens the ring, two terms in our kernel, two terms in torch's (where they are possible) and tiles
    are taken; the ring up to 16 where two terms in our kernel are not.

    long: tokens from which the weight is decoded `panel` rows at a time; for dX `panel` columns, if there are over
    twice as many.
    """

    ring: int = 16
    term_blocks: int = 0
    terms: int = 0
    tile: int = 128
    long: int = 2048
    panel: int = 2048


@dataclass(frozen=True)
class Ring:
    """A block of w8a16_ring.cu: warps_n x warps_k warps, 8 * tiles_m tokens, 16 * tiles_n rows of W for each warps_n.

    depth: chunks of 128 codes a row in a warp's ring. staged: x as FP16 in shared memory. overlap: may start before
    the kernel before has ended.
    """

    tiles_n: int
    tiles_m: int
    warps_n: int
    warps_k: int
    depth: int
    staged: int = 1
    overlap: int = 1

    source = "w8a16_ring.cu"
    why = "one pass over the codes, copied ahead through shared memory (w8a16_ring.cu)"

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        names = "tiles_n", "tiles_m", "warps_n", "warps_k", "depth", "staged"
        return _defines(self, *names)

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
        """The rings, two sets of partial sums, a factor and exponents per token, and x, its rows padded by 16 bytes.

        For a power of two of tokens: each size is a kernel of its own to load.
        """
        warps, m = self.warps_n * self.warps_k, 1 << (m - 1).bit_length()
        ring = warps * self.depth * self.tiles_n * 2048
        sums = 2 * self.warps_k * m * (self.rows + 4) * 4
        return ring + sums + self.tokens * (1 + warps) * 4 + self.staged * m * (-(-k // 128) * 128 + 8) * 2

    def grid(self, n: int, multiprocessors: int) -> tuple[int]:
        return (min(-(-n // self.rows), multiprocessors),)


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
    why = "codes decoded into tensor core operands, once for up to 64 tokens (w8a16_tile.cu)"

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


@dataclass(frozen=True)
class Panels:
    """The weight decoded to 16 bit, so many rows (for dX columns) at a time, and torch's product."""

    size: int
    why: ClassVar[str] = "the weight decoded to 16 bit for one product of cuBLAS (dequantize.cu)"


@dataclass(frozen=True)
class Terms:
    """x as two E4M3 terms, one product of FP8 tensor cores over twice as many rows."""

    why: ClassVar[str] = "inputs as two E4M3 terms through FP8 tensor cores (split.cu)"


@dataclass(frozen=True)
class TermBlock:
    """A block of w8a16_terms.cu: `tokens` as two E4M3 terms, `columns` rows of W, steps of 128 of K in a ring.

    short: steps whose sums the tensor cores keep. splits: parts of K that blocks of their own take.
    """

    columns: int = 224
    tokens: int = 64
    depth: int = 4
    short: int = 4
    splits: int = 1

    source = "w8a16_terms.cu"
    why = "inputs as two E4M3 terms, both through FP8 tensor cores with one look at the codes (w8a16_terms.cu)"
    threads = 256

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return *_defines(self, "columns", "tokens", "depth", "short"), ("SPLIT", int(self.splits > 1))

    def dynamic_bytes(self, m: int, k: int) -> int:
        """The ring; at the end the sums in float32."""
        return max(self.depth * (self.columns + 2 * self.tokens) * 128, self.tokens * (self.columns + 8) * 4)

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        return -(-m // self.tokens), -(-n // self.columns), self.splits


Plan = Ring | Block | TermBlock | Terms | Panels


def gpu_named(sm: tuple[int, int]) -> Gpu:
    """A GPU of this compute capability: the shared memory a block can ask for, and usual multiprocessors."""
    return Gpu(sm, MULTIPROCESSORS.get(sm, 128), SHARED.get(sm, 99 << 10))


def plan_product(m: int, n: int, k: int, operands: Operands, gpu: Gpu, tokens: Tokens) -> Plan:
    """For m >= 1 tokens and a weight [n, k]."""
    if k % 16 == 0 and m <= min(tokens.ring, MAX_TOKENS):
        return few_tokens(m, n, k, gpu)
    if m <= tokens.term_blocks and takes_term_blocks(m, n, k, operands, gpu):
        return term_block(m, n, k, operands, gpu)
    if k % 16 == 0 and m <= MAX_TOKENS:
        return few_tokens(m, n, k, gpu)
    if m <= tokens.terms and takes_terms(n, k, operands, gpu):
        return Terms()
    if k % 16 == 0 and m <= tokens.tile:
        return some_tokens(m, n, k, gpu)
    return Panels(tokens.panel if m >= tokens.long and n > 2 * tokens.panel else n)


def plan_dx(m: int, k: int, tokens: Tokens) -> Panels:
    """For m gradients and a weight of k columns."""
    return Panels(tokens.panel if m >= tokens.long and k > 2 * tokens.panel else k)


def few_tokens(m: int, n: int, k: int, gpu: Gpu) -> Ring:
    """The first that fits the shared memory: with x in it, unless it is much for the rows a block has, or from L1.

    With more than 8 tokens from L1 a warp takes twice the rows, which read x half as often.
    """
    groups, much = -(-m // 8), 2 * m * k > 1 << 16 and n < 64 * gpu.multiprocessors
    rings = [Ring(1, groups, 2, 8, depth) for depth in (3, 2)] if groups == 1 else [Ring(1, groups, 1, 8, 4)]
    rings += [Ring(1, groups, 1, 8, depth) for depth in (3, 2)]
    from_l1 = [Ring(tiles, groups, 2 if groups == 1 else 1, 8, depth, 0) for tiles in (groups, 1) for depth in (3, 2)]
    return next(ring for ring in [*([] if much else rings), *from_l1] if ring.dynamic_bytes(m, k) <= gpu.shared)


def some_tokens(m: int, n: int, k: int, gpu: Gpu) -> Block:
    """As many blocks as run at once, sharing K where there are few rows: the best of a sweep on an H200."""
    block = Block(2, 4 if m <= 32 else 8, 4, 4)
    rows, groups, _ = block.grid(m, n)
    at_once = min(3, gpu.shared // block.dynamic_bytes(m, k)) * gpu.multiprocessors
    return replace(block, splits=min(16, -(-k // 128), max(1, at_once // (rows * groups))))


def term_block(m: int, n: int, k: int, operands: Operands, gpu: Gpu) -> TermBlock:
    """The quickest by what an H200 can: us of a step by memory, L2 cache and tensor cores, of a wave, of the sums."""
    if m > 64:
        return TermBlock(224, 128, 3)
    steps, found = -(-k // 128), []
    for columns, splits in product((128,) if operands.scales == 2 else (224, 128), range(1, min(16, steps) + 1)):
        block = TermBlock(columns, 64, 4 if columns == 224 else 6, 1 if operands.scales == 2 else 4, splits)
        waves = -(-prod(block.grid(m, n)) // gpu.multiprocessors)
        step = max(columns * 128 / 31800, (columns + 2 * m) * 128 / 41700, columns * 0.53 / 224)
        sums = 1.5 + (4 * splits + 2) * m * n / 4e6 if splits > 1 else 0.0
        found.append((waves * (-(-steps // splits) * step + 2.0) + sums, splits, block))
    return min(found, key=lambda entry: entry[:2])[2]


def takes_term_blocks(m: int, n: int, k: int, operands: Operands, gpu: Gpu) -> bool:
    """Whether w8a16_terms.cu takes the weight and x is BF16, whose two terms are exact; and is quicker than others.

    It is not for up to 16 tokens where two launches more cost more than they save, nor for more than 64 where its
    blocks leave multiprocessors idle.
    """
    can = operands.bf16 and operands.e4m3 and k % 16 == 0 and k <= MAX_TOKEN_WIDTH and gpu.sm == (9, 0)
    if m <= 64:
        return can and (m > MAX_TOKENS or n * k >= 1 << 25)
    blocks = prod(TermBlock(224, 128, 3).grid(m, n))
    return can and operands.scales < 2 and blocks >= 0.9 * -(-blocks // gpu.multiprocessors) * gpu.multiprocessors


def takes_terms(n: int, k: int, operands: Operands, gpu: Gpu) -> bool:
    """Whether the FP8 tensor cores take the weight, and x is BF16, whose two terms are exact."""
    least, multiple = ((9, 0), 128) if operands.scales == 2 else ((8, 9), 16)
    fits = n % multiple == 0 and k % multiple == 0 and k <= MAX_TOKEN_WIDTH
    return operands.bf16 and operands.e4m3 and fits and gpu.sm >= least


def _defines(tile: object, *names: str) -> tuple[tuple[str, int], ...]:
    """A kernel's macros are its tile's fields."""
    return tuple((name.upper(), getattr(tile, name)) for name in names)
