"""The column loop on a CPU against the oracle: the codes of EagerColumns, whatever the block, and thread by thread."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from octavo.formats.codec import encode
from octavo.formats.granularity import PerBlock, PerRow
from octavo.formats.reference import quantize_ref
from octavo.formats.rounding import Curvature, EagerColumns, compensated
from octavo.formats.spec import E4M3, E5M2
from octavo.ops.columns import PanelColumns, columns_for

CPU = torch.device("cpu")
DIFFER = 0.01  # of the codes, at most: a float32 sum that differs in its last bit changes what follows in its row


def problem(n, k, granularity, spec=E4M3):
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(2 * k, k, generator=generator) @ torch.randn(k, k, generator=generator) / k**0.5
    x[:, 3] *= 30
    x[:, [1, k - 2]] = 0
    weight = torch.randn(n, k, generator=generator) * 0.05
    weight[1:2] = 0
    return weight, Curvature.of(x.T @ x), quantize_ref(weight, spec, granularity).scale, granularity, spec


@pytest.mark.parametrize("spec", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    "n, k, granularity",
    [(40, 300, PerRow()), (40, 128, PerBlock(16, 48)), (1, 20, PerRow())],
    ids=lambda value: str(value),
)
def test_codes_of_the_oracle(n, k, granularity, spec):
    given = problem(n, k, granularity, spec)
    want = compensated(*given, columns=EagerColumns())
    got = compensated(*given, columns=columns_for(CPU))
    zero = encode(torch.tensor([0.0, -0.0]), spec)
    same = (got.codes == want.codes) | (torch.isin(got.codes, zero) & torch.isin(want.codes, zero))
    assert (~same).float().mean() <= DIFFER
    torch.testing.assert_close(got.error_nearest, want.error_nearest)
    assert float(got.error.sum()) == pytest.approx(float(want.error.sum()), rel=0.01)


def test_two_threads_give_what_one_does():
    """The loops take turns, and each matrix has memory of its own."""
    problems = [problem(32, 160 + 8 * i, PerRow()) for i in range(6)]
    alone = [compensated(*given, columns=columns_for(CPU)).codes for given in problems]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda given: compensated(*given, columns=columns_for(CPU)).codes, problems))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_panel_serves_blocks_of_any_size():
    columns = PanelColumns()
    for given in (problem(24, 300, PerRow()), problem(8, 140, PerRow())):
        again = compensated(*given, columns=columns).codes
        assert torch.equal(again, compensated(*given, columns=PanelColumns()).codes)
