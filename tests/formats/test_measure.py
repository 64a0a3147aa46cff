import math

import torch

from octavo.formats.granularity import PerBlock, PerTensor
from octavo.formats.measure import delta_kept, saturation, sqnr_db, underflow
from octavo.formats.reference import dequantize_ref, quantize_ref
from octavo.formats.spec import E4M3, E5M2


def test_sqnr():
    x = torch.tensor([3.0, 4.0])
    assert sqnr_db(x, x) == math.inf
    assert math.isclose(sqnr_db(torch.tensor([3.0, 4.5]), x), 20.0)
    assert sqnr_db(torch.tensor([3.0, torch.nan]), x) == -math.inf
    assert sqnr_db(torch.ones(2), torch.zeros(2)) == -math.inf


def test_cast_noise_of_a_gaussian():
    """31.6 dB for E4M3 and 25.6 dB for E5M2 on N(0, 1): a lost mantissa bit costs 6 dB."""
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(4))
    for spec, want in ((E4M3, 31.6), (E5M2, 25.6)):
        assert abs(sqnr_db(dequantize_ref(quantize_ref(x, spec, PerTensor())), x) - want) < 0.3


def test_saturation_and_underflow():
    x = torch.tensor([[448.0, 1.0, 1e-4, 0.0]])
    q = quantize_ref(x, E4M3, PerTensor())
    assert saturation(q) == 0.25
    assert math.isclose(underflow(q, x), 1 / 3, rel_tol=1e-6)


def test_small_deltas_vanish_on_an_on_grid_base():
    """A merge onto weights that already lie on the grid: 10 % of the norm survives, 1 % mostly does not."""
    generator = torch.Generator().manual_seed(5)
    base = dequantize_ref(quantize_ref(torch.randn(512, 512, generator=generator), E4M3, PerBlock()))
    delta = torch.randn(512, 512, generator=generator)
    kept = {}
    for share in (0.10, 0.01):
        target = base + delta * (share * base.norm() / delta.norm())
        kept[share] = delta_kept(base, target, quantize_ref(target, E4M3, PerBlock()))
    assert kept[0.10] > 0.95 and 0.2 < kept[0.01] < 0.6
    assert math.isnan(delta_kept(base, base, quantize_ref(base, E4M3, PerBlock())))
