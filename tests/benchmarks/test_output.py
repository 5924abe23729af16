"""The table and the JSON file of a benchmark."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.output import Measured, add_json, beside_peer, publish, wrong_answers


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


def test_an_interrupt_leaves_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    path.write_text("recorded before")

    def half(self: Path, text: str, **_: object) -> None:
        self.write_bytes(text.encode()[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        publish([{"shape": "128/8"}], {"shape": "shape"}, {}, path)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("out.json", b"recorded before")]


def test_no_place_for_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.ArgumentParser()
    add_json(options)
    assert options.parse_args(["--json", str(tmp_path / "out.json")]).json == tmp_path / "out.json"
    for place, told in (
        (tmp_path / "none" / "out.json", f"there is no folder {tmp_path / 'none'}"),
        (tmp_path, "it is a folder"),
        (Path("/dev/null"), "it is a device or a pipe, and a file would take its place"),
    ):
        with pytest.raises(SystemExit) as refused:
            options.parse_args(["--json", str(place)])
        assert refused.value.code == 2
        assert f"cannot write {place}: {told}" in capsys.readouterr().err


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
