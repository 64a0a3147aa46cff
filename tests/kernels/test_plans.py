"""Which kernel and tile backend w8a16 takes: for GPUs nobody here has."""

import pytest

from octavo.kernels.plans import (
    SHARED,
    Block,
    Operands,
    Panels,
    Ring,
    TermBlock,
    Terms,
    Tokens,
    gpu_named,
    plan_dx,
    plan_product,
)

GPUS = pytest.mark.parametrize("sm", SHARED, ids=lambda sm: f"sm{sm[0]}{sm[1]}")
SHAPES = [(28672, 4096), (4096, 14336), (4096, 4096), (576, 1536), (192, 576), (8, 16), (152064, 8192)]


@GPUS
@pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 17, 33, 64, 65, 128])
def test_every_tile_fits_its_gpu(m, sm):
    gpu = gpu_named(sm)
    for n, k in SHAPES:
        plan = plan_product(m, n, k, Operands(), gpu, Tokens())
        assert isinstance(plan, Ring if m <= 16 else Block)
        assert plan.dynamic_bytes(m, k) <= gpu.shared and plan.threads <= 1024
        if isinstance(plan, Ring):
            assert m <= plan.tokens and plan.grid(n, gpu.multiprocessors)[0] <= gpu.multiprocessors
        else:
            rows, groups, splits = plan.grid(m, n)
            assert rows * plan.rows >= n and groups * plan.tokens >= m and 1 <= splits <= -(-k // 128)


def test_few_rows_share_k_among_blocks():
    gpu = gpu_named((9, 0))
    wide, narrow = (plan_product(64, n, 8192, Operands(), gpu, Tokens()) for n in (28672, 2048))
    assert wide.splits == 1 and narrow.splits > 1


def test_what_two_terms_need():
    tokens, hopper = Tokens(terms=256), gpu_named((9, 0))
    assert plan_product(64, 4096, 4096, Operands(), hopper, tokens) == Terms()
    assert plan_product(257, 4096, 4096, Operands(), hopper, tokens) == Panels(4096)
    for operands, gpu, n in (
        (Operands(bf16=False), hopper, 4096),
        (Operands(e4m3=False), hopper, 4096),
        (Operands(), gpu_named((8, 0)), 4096),
        (Operands(scales=2), gpu_named((8, 9)), 4096),
        (Operands(scales=2), hopper, 4112),
        (Operands(), hopper, 4104),
    ):
        assert isinstance(plan_product(64, n, 4096, operands, gpu, tokens), Block)


def test_two_terms_in_one_kernel():
    """One wave of blocks; where rows are few they share K; with scales per block a tile is one of 128 rows."""
    tokens, hopper = Tokens(term_blocks=256, terms=768), gpu_named((9, 0))
    assert plan_product(64, 28672, 4096, Operands(), hopper, tokens) == TermBlock(224)
    for n, k in SHAPES:
        for scales in (0, 1, 2):
            plan = plan_product(64, n, k, Operands(scales=scales), hopper, tokens)
            assert isinstance(plan, TermBlock) and plan.dynamic_bytes(64, k) <= hopper.shared
            assert (plan.columns, plan.short) == (128, 1) or scales < 2
            groups, rows, splits = plan.grid(64, n)
            assert groups == 1 and rows * plan.columns >= n and splits <= -(-k // 128)
    assert plan_product(64, 4096, 14336, Operands(), hopper, tokens).splits > 1
    assert plan_product(256, 28672, 4096, Operands(), hopper, tokens) == TermBlock(224, 128, 3)
    assert plan_product(256, 4096, 4096, Operands(), hopper, tokens) == Terms()  # too few blocks
    assert plan_product(257, 28672, 4096, Operands(), hopper, tokens) == Terms()
    assert plan_product(64, 4096, 4096, Operands(), gpu_named((10, 0)), tokens) == Terms()


def test_few_tokens_of_a_wide_weight_take_the_ring_or_two_terms():
    tokens, hopper = Tokens(ring=8, term_blocks=256), gpu_named((9, 0))
    assert isinstance(plan_product(8, 28672, 4096, Operands(), hopper, tokens), Ring)
    assert isinstance(plan_product(9, 28672, 4096, Operands(), hopper, tokens), TermBlock)
    assert isinstance(plan_product(9, 4096, 4096, Operands(), hopper, tokens), Ring)  # two launches more cost more
    assert isinstance(plan_product(9, 28672, 4096, Operands(bf16=False), hopper, tokens), Ring)


def test_decoded_weights():
    tokens, gpu = Tokens(), gpu_named((9, 0))
    assert plan_product(1, 40, 200, Operands(), gpu, tokens) == Panels(40)  # 16 does not divide K
    assert plan_product(2048, 28672, 4096, Operands(), gpu, tokens) == Panels(2048)
    assert plan_dx(2048, 14336, tokens) == Panels(2048) and plan_dx(2048, 4096, tokens) == Panels(4096)
    assert plan_dx(64, 14336, tokens) == Panels(14336)
