import pytest
import torch

from octavo.base.errors import ConfigError, ShapeError
from octavo.formats.granularity import PerBlock, PerGroup, PerRow, PerTensor, from_tile
from octavo.formats.scaled import ScaledTensor
from octavo.formats.spec import E4M3, E5M2, E8M0

ALL = [PerTensor(), PerRow(), PerGroup(64), PerBlock(128, 128), PerBlock(3, 5)]


@pytest.mark.parametrize(
    ("granularity", "shape", "want"),
    [
        (PerTensor(), (576, 200), ()),
        (PerRow(), (576, 200), (576, 1)),
        (PerGroup(128), (576, 200), (576, 2)),
        (PerBlock(128, 128), (576, 200), (5, 2)),
        (PerBlock(128, 128), (3, 576, 200), (3, 5, 2)),
        (PerRow(), (7,), (1,)),
        (PerGroup(4), (7,), (2,)),
        (PerBlock(128, 128), (0, 200), (0, 2)),
    ],
    ids=str,
)
def test_scale_shape(granularity, shape, want):
    assert granularity.scale_shape(shape) == want


@pytest.mark.parametrize("granularity", ALL, ids=str)
def test_tile_round_trip(granularity):
    assert from_tile(*granularity.tile) == granularity


@pytest.mark.parametrize("granularity", ALL, ids=str)
def test_expand_puts_each_scale_over_its_tile(granularity):
    shape = (7, 11)
    scale = torch.arange(1.0, 1 + torch.Size(granularity.scale_shape(shape)).numel()).reshape(
        granularity.scale_shape(shape)
    )
    wide = granularity.expand(scale, shape) * torch.ones(shape)
    rows, cols = granularity.tile
    grid = scale.reshape(1, 1) if scale.dim() == 0 else scale
    for i in range(shape[0]):
        for j in range(shape[1]):
            assert wide[i, j] == grid[i // rows if rows else 0, j // cols if cols else 0]


def test_expand_refuses_a_scale_of_another_grid():
    with pytest.raises(ShapeError, match=r"need \[2, 1\]"):
        PerBlock(4, 8).expand(torch.ones(1, 2), (8, 8))


def test_amax_ignores_inf_and_nan():
    x = torch.tensor([[1.0, -3.0, torch.inf, torch.nan], [torch.inf, torch.nan, -torch.inf, torch.nan]])
    assert PerRow().amax(x).tolist() == [[3.0], [0.0]]
    assert PerTensor().amax(x) == 3.0
    assert PerTensor().amax(torch.zeros(0, 4)) == 0.0


@pytest.mark.parametrize("make", [lambda: PerGroup(0), lambda: PerBlock(0, 4), lambda: PerBlock(4, -1)])
def test_sizes_are_positive(make):
    with pytest.raises(ConfigError, match="at least 1"):
        make()


@pytest.mark.parametrize(
    ("spec", "largest", "normal", "subnormal"),
    [(E4M3, 448.0, 2.0**-6, 2.0**-9), (E5M2, 57344.0, 2.0**-14, 2.0**-16), (E8M0, 2.0**127, 2.0**-127, 2.0**-127)],
    ids=str,
)
def test_limits_follow_from_the_layout(spec, largest, normal, subnormal):
    assert (spec.max, spec.min_normal, spec.min_subnormal) == (largest, normal, subnormal)
    info = torch.finfo(spec.dtype)
    assert spec.max == info.max and spec.min_normal == info.smallest_normal


def test_scaled_tensor_checks_what_it_carries():
    codes = torch.zeros(4, 8, dtype=torch.uint8)
    q = ScaledTensor(codes, torch.ones(4, 1))
    assert q.nbytes == 32 + 16 and q.as_float8().dtype == torch.float8_e4m3fn and q.to("cpu").shape == (4, 8)
    with pytest.raises(ShapeError, match=r"need \[4, 1\]"):
        ScaledTensor(codes, torch.ones(4))
    with pytest.raises(ShapeError, match="float32"):
        ScaledTensor(codes, torch.ones(4, 1, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="uint8"):
        ScaledTensor(codes.view(torch.float8_e4m3fn), torch.ones(4, 1))


def test_per_row_from_per_tensor_is_lossless():
    q = ScaledTensor(torch.randint(0, 126, (4, 8), dtype=torch.uint8), torch.tensor(0.5), granularity=PerTensor())
    rows = q.per_row()
    assert rows.granularity == PerRow() and torch.equal(rows.scale, torch.full((4, 1), 0.5))
    assert rows.per_row() is rows
    with pytest.raises(ShapeError, match="tensor or row"):
        ScaledTensor(q.codes, torch.ones(1, 1), granularity=PerBlock(128, 128)).per_row()
