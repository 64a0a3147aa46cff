"""The page is well-formed, needs nothing from elsewhere, and draws what it was given."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from octavo.base.page import Bar, bar_chart, heading, page, table, verdict


def rendered(*parts):
    text = page("A <title> & more", parts).decode()
    return ET.fromstring(re.sub(r"<!doctype html>|<meta [^>]*>", "", text)), text


def test_one_file_well_formed_and_alone():
    root, text = rendered(heading("h"), verdict("v < w"), table(("a", "b"), [("1 & 2", "<b>")]), table((), [("x",)]))
    assert root.find("body/h1").text == "A <title> & more" and root.find("body/p").text == "v < w"
    assert [cell.text for cell in root.iter("td")] == ["1 & 2", "<b>", "x"]
    assert not re.search(r"https?://|src=|href=|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text


def test_bars_have_the_height_of_their_values():
    bars = [Bar(str(i), value, 0.1, marked=i == 1) for i, value in enumerate((0.0, 4.0, 2.0))]
    root, _ = rendered(bar_chart("KL by layer", "layer", "nats", bars))
    heights = [float(rect.get("height")) for rect in root.iter("rect")]
    assert heights[0] == 0 and heights[1] == pytest.approx(2 * heights[2], abs=0.2) and heights[1] > 100
    assert [rect.get("class") for rect in root.iter("rect")] == ["bar", "mark", "bar"]
    texts = [node.text for node in root.iter("text")]
    assert {"layer", "nats", "0", "1", "2"} <= set(texts)
    assert len([line for line in root.iter("line") if line.get("class") == "error"]) == 3


@pytest.mark.parametrize("values", [[], [0.0], [1e-9, 3e-9], [float("nan")], [7e6] * 200], ids=lambda v: str(len(v)))
def test_any_values(values):
    root, text = rendered(bar_chart("t", "x", "y", [Bar(f"layer {i}", v) for i, v in enumerate(values)]))
    assert len(list(root.iter("rect"))) == len(values)
    labels = [node for node in root.iter("text") if (node.text or "").startswith("layer")]
    places = [float(node.get("x")) for node in labels]
    assert all(b - a > 40 for a, b in pairwise(places))  # no label over another
    assert not re.search(r'(height|y|y1|y2)="nan', text)
