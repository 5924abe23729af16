"""The table and the JSON file of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.output import publish


def test_table_and_file_hold_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"shape": "128/8", "tokens": 1, "ours_us": 1.5}, {"shape": "8/2", "tokens": 8192, "ours_us": None}]
    publish(rows, {"shape": "shape", "T": "tokens", "ours": "ours_us"}, {"gpu": "none"}, tmp_path / "out.json")
    assert capsys.readouterr().out.splitlines() == [
        "gpu none",
        "shape     T  ours",
        "128/8     1   1.5",
        "8/2    8192     -",
    ]
    assert json.loads((tmp_path / "out.json").read_text()) == {"environment": {"gpu": "none"}, "rows": rows}
