"""The generated pages are those that the tables give."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs import generate


@pytest.mark.parametrize("name", generate.PAGES)
def test_page_is_up_to_date(name: str) -> None:
    page = Path(generate.__file__).parent / name
    assert page.read_text(encoding="utf-8") == generate.PAGES[name](), "run `make docs`"


def test_the_readme_quotes_the_recorded_times() -> None:
    root = Path(__file__).parents[2]
    rows = json.loads((root / "benchmarks/results/router.json").read_text(encoding="utf-8"))["rows"]
    quoted = re.findall(
        r"^\| (\d+) / (\d+)(,[^|]*)? ((?:\| [\d.]+ ){3})\|$", (root / "README.md").read_text(), re.MULTILINE
    )
    assert quoted
    for experts, k, grouped, times in quoted:
        shape = f"{experts}/{k} bfloat16" + (" grouped sigmoid + bias" if grouped else "")
        (row,) = [row for row in rows if (row["shape"], row["tokens"]) == (shape, 1)]
        assert re.findall(r"[\d.]+", times) == [
            f"{row[name]:.1f}" for name in ("unfused_ort_us", "ours_ort_us", "peer_us")
        ]
