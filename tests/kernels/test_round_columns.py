"""round_columns.cu on the host: the codes of torch's column loops, on ragged blocks, views, dead and loud inputs."""

import pytest
import torch

from octavo.formats.granularity import PerBlock, PerRow
from octavo.formats.reference import quantize_ref
from octavo.formats.rounding import Curvature, compensated
from octavo.formats.spec import E4M3, E5M2
from octavo.ops.columns import KernelColumns, columns_for

pytestmark = pytest.mark.usefixtures("on_host")


def problem(n, k):
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(2 * k, k, generator=generator) @ torch.randn(k, k, generator=generator) / k**0.5
    x[:, 3] *= 30
    x[:, [1, k - 2]] = 0
    weight = torch.randn(n, k, generator=generator) * 0.05
    weight[1:2] = 0
    return weight, Curvature.of(x.T @ x)


@pytest.mark.parametrize("spec", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    "n, k, granularity",
    [(9, 150, PerRow()), (8, 128, PerBlock(4, 48)), (1, 20, PerRow())],
    ids=lambda value: str(value),
)
def test_codes_of_the_oracle(n, k, granularity, spec):
    """Bit for bit: this compiler fuses no multiply-add, and a GPU that does moves single codes."""
    weight, curvature = problem(n, k)
    scale = quantize_ref(weight, spec, granularity).scale
    want = compensated(weight, curvature, scale, granularity, spec)
    got = compensated(weight, curvature, scale, granularity, spec, columns=KernelColumns())
    assert torch.equal(got.codes, want.codes) and torch.equal(got.error, want.error)
    assert got.error.sum() < 0.6 * got.error_nearest.sum()


def test_no_rows():
    empty = torch.empty(0, 8)
    assert [x.shape for x in KernelColumns().compensate(empty, empty, torch.eye(8), E4M3)] == [(0, 8), (0, 8)]


def test_a_cpu_takes_torch():
    assert not isinstance(columns_for(torch.device("cpu")), KernelColumns)
