"""Who decides on the segments of CUDA's allocator: the user, else Octavo."""

import pytest

from octavo.base.allocator import EXPANDABLE, VARIABLES, expandable_segments, prefer_expandable_segments


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")


def test_without_a_setting_segments_grow():
    assert not expandable_segments()
    assert prefer_expandable_segments() == f"{VARIABLES[0]}={EXPANDABLE}"
    assert expandable_segments()


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize(("value", "grow"), [("max_split_size_mb:128", False), ("expandable_segments: true", True)])
def test_a_users_own_setting_stays(monkeypatch, name, value, grow):
    monkeypatch.setenv(name, value)
    assert prefer_expandable_segments() == f"{name}={value}"
    assert expandable_segments() is grow
