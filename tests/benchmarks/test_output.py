"""The table and the JSON file of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.output import Measured, beside_peer, publish, wrong_answers


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


@pytest.mark.parametrize(
    ("recorded", "measured", "expected"),
    [
        pytest.param(None, [], (None, None, None), id="none"),
        pytest.param((3.0, "vLLM"), [], (3.0, "vLLM", "recorded"), id="recorded"),
        pytest.param((3.0, "vLLM"), [Measured("vLLM", "1.2", 4.0)], (4.0, "vLLM 1.2", "measured"), id="measured"),
        pytest.param((3.0, "vLLM"), [Measured("PyTorch", "2.11", 4.0)], (3.0, "vLLM", "recorded"), id="another"),
        pytest.param((3.0, "vLLM"), [Measured("PyTorch", "2.11", 2.0)], (2.0, "PyTorch 2.11", "measured"), id="faster"),
    ],
)
def test_a_measured_time_stands_for_the_recorded(
    recorded: tuple[float, str] | None, measured: list[Measured], expected: tuple[object, ...]
) -> None:
    row = beside_peer(1.0, recorded, 4e6, 4000.0, measured)
    assert (row["peer_us"], row["peer"], row["peer_is"]) == expected
    assert row["ratio_to_peer"] == (None if expected[0] is None else round(1 / row["peer_us"], 2))
    assert row["measured_us"] == {peer.label: peer.us for peer in measured}
    assert row["percent_of_copy"] == 100.0


def test_peers_that_are_wrong_are_told_of() -> None:
    answers = [(0.01, 1), (0.12, 64), (0.02, 8192)]
    rows = [
        {"shape": "8/2", "tokens": tokens, **beside_peer(1.0, None, 1, 1, [Measured("a", "1", 2.0, wrong)])}
        for wrong, tokens in answers
    ]
    assert wrong_answers(rows) == ["a 1 gets up to 12 % of rows wrong: 8/2, T = 64"]
    assert wrong_answers([{"wrong_rows": {}}]) == []
