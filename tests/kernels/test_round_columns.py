"""round_columns.cu on the host: the codes of torch's column loops, on ragged blocks, views, dead and loud inputs."""

import pytest
import torch

from octavo.formats.granularity import PerBlock, PerRow
from octavo.formats.rounding import compensated
from octavo.formats.spec import E4M3, E5M2
from octavo.ops.columns import KernelColumns, columns_for
from tests.ops.test_stacked import problem

pytestmark = pytest.mark.usefixtures("on_host")


@pytest.mark.parametrize("spec", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    "n, k, granularity",
    [(9, 150, PerRow()), (8, 128, PerBlock(4, 48)), (1, 20, PerRow())],
    ids=lambda value: str(value),
)
def test_codes_of_the_oracle(n, k, granularity, spec):
    """Bit for bit: this compiler fuses no multiply-add, and a GPU that does moves single codes."""
    given = problem(n, k, granularity, spec)
    want, got = compensated(*given), compensated(*given, columns=KernelColumns())
    assert torch.equal(got.codes, want.codes) and torch.equal(got.error, want.error)
    assert got.error.sum() < 0.6 * got.error_nearest.sum()


def test_no_rows():
    empty = torch.empty(0, 8)
    assert [x.shape for x in KernelColumns().compensate(empty, empty, torch.eye(8), E4M3)] == [(0, 8), (0, 8)]


def test_a_cpu_takes_torch():
    assert not isinstance(columns_for(torch.device("cpu")), KernelColumns)
