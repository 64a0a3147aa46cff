"""The oracles users test with."""

import pytest
import torch

from octavo.base.hardware import CPU
from octavo.testing import FLOOR_DB, assert_sqnr, fake_caps


def test_assert_sqnr():
    x = torch.ones(100)
    assert assert_sqnr(x + 0.1, x, 19.9) == pytest.approx(20, abs=1e-3)
    with pytest.raises(AssertionError, match=r"here: 20\.00 dB, floor 20\.10 dB"):
        assert_sqnr(x + 0.1, x, 20.1, "here")
    with pytest.raises(AssertionError, match="shape"):
        assert_sqnr(x[None], x, 0)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(AssertionError):
            assert_sqnr(torch.full((100,), bad), x, -1000)
    with pytest.raises(AssertionError):
        assert_sqnr(x, x, float("nan"))


def test_fake_caps():
    assert fake_caps("RTX 3090").sm == (8, 6) and not fake_caps("a100").native_fp8
    assert fake_caps("sm100", 180).memory == 180 * 2**30
    assert fake_caps("cpu") == CPU


def test_floors_keep_their_order():
    """E5M2 has one mantissa bit less than E4M3: 6.02 dB. Two noisy operands cost 3.01 dB more than one."""
    for what in ("cast", "linear", "scaled_mm"):
        assert FLOOR_DB[what, "e4m3", "normal"] - FLOOR_DB[what, "e5m2", "normal"] == pytest.approx(6.02, abs=0.05)
    assert FLOOR_DB["linear", "e4m3", "normal"] - FLOOR_DB["scaled_mm", "e4m3", "normal"] == pytest.approx(
        3.01, abs=0.05
    )
