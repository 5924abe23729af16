"""The page's section on every number of tokens, and its plot."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from docs import sweep
from docs.line_plots import Line, Panel, Style, line_plots

STYLES = (Style("a", "#000000"), Style("b < c", "#ff0000", "4 2"))


def row(shape: str, load: str, tokens: int, us: float, **more: Any) -> dict[str, Any]:
    return {"shape": shape, "load": load, "tokens": tokens, "layer_us": us, **more}


ROWS = [
    row(
        "dense", "uniform", 4, 20.0, contrib_us=40.0, ratio_to_contrib=0.5, gbps=1000.4, percent_of_copy=25.0, tflops=2
    ),
    row("dense", "uniform", 1, 10.0, contrib_us=30.0, ratio_to_contrib=0.33, gbps=900, percent_of_copy=22.5, tflops=1),
    row("dense", "zipf", 1, 12.345),
    row("fp8", "one", 2, 7.0),
]


def test_a_line_has_what_was_measured() -> None:
    shapes = sweep.by_shape(ROWS)
    assert {shape: list(by_tokens) for shape, by_tokens in shapes.items()} == {"dense": [1, 4], "fp8": [2]}
    assert sweep.table(shapes["dense"]) == (
        ("tokens", "even", "Zipf", "contrib", "even / contrib", "GB/s", "% of copy", "TFLOP/s"),
        [
            ("1", "10.00", "12.35", "30.00", "0.33", "900", "22.5", "1.0"),
            ("4", "20.00", "", "40.00", "0.50", "1000", "25.0", "2.0"),
        ],
    )
    assert sweep.table(shapes["fp8"]) == (("tokens", "one first"), [("2", "7.00")])


def test_findings_are_listed() -> None:
    assert sweep.findings([]) == "Ours takes at no number of tokens longer than at the next larger one.\n"
    assert sweep.findings(["T = 2", "T = 8"]).endswith("\n- T = 2.\n- T = 8.\n")


def test_the_plot_has_a_panel_for_each_shape_and_a_line_for_each_load() -> None:
    text = sweep.plot(ROWS)
    assert text == sweep.plot(ROWS)
    root = ElementTree.fromstring(text)
    panels = root.findall("{*}g")
    titles = [panel.findall("{*}text")[0].text for panel in panels]
    assert titles == ["dense", "fp8"]
    colored = [
        [path.get("stroke") for path in panel.findall("{*}path") if path.get("stroke") != "#dddddd"] for panel in panels
    ]
    assert [len(lines) for lines in colored] == [3, 1]


def test_equal_factors_are_equal_distances() -> None:
    text = line_plots([Panel("a & b", [Line("b < c", [(1, 10), (4, 100), (16, 1000)])])], STYLES, "x", "y")
    ElementTree.fromstring(text)  # well-formed
    (data,) = re.findall(r'd="M([^"]*)" fill="none" stroke="#ff0000" stroke-width="1.8" stroke-dasharray="4 2"', text)[
        1:
    ]
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, point.split())) for point in data.split("L")]
    assert abs((x1 - x0) - (x2 - x1)) < 0.2
    assert abs((y1 - y0) - (y2 - y1)) < 0.2
    assert x0 < x2
    assert y0 > y2
