"""The section on whole models: what a record gives, and that there is one where there is a record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from docs import end_to_end, performance_tables
from docs.performance import performance
from ort_moe.benchmarking import Benchmark, Timing, Variant

NO_GRAPH = Timing(1, 50, 4.0, 3.9, why_no_graph="If 'branch': control flow")
REPLAYED = Timing(1, 50, 0.5, 0.4, 0.25, expert_gbps=1234.5)
SIZES = {"host_bytes": 3 << 30, "host_bytes_before": 1 << 27, "device_bytes": 5 << 30}
GIVEN = Variant(
    *("as given", None, "measured"), load_seconds=2.5, timings=(NO_GRAPH, Timing(512, why="out of memory")), **SIZES
)
OURS = Variant(
    *("ours", None, "measured"), load_seconds=1.25, timings=(REPLAYED, Timing(512, 50, 2.0, 1.9, 1.0)), **SIZES
)
CONTRIB = Variant("contrib", None, "impossible", "nothing matched")
RECORD = {
    "environment": {"date": "2026-12-01"},
    **Benchmark("4 layers", "CUDAExecutionProvider", "H200", "1.31.1", 50, 0, (GIVEN, CONTRIB, OURS)).to_dict(),
}


def test_table() -> None:
    head, lines = end_to_end.table(RECORD)
    assert {len(line) for line in lines} == {len(head)}
    assert lines == [
        ("as given", "1", "4", "", "", "", "2.5", "3.0", "5.0"),
        ("as given", "512", "", "", "", "", "", "", ""),
        ("ours", "1", "0.5", "0.25", "16", "1234", "1.25", "3.0", "5.0"),
        ("ours", "512", "2", "1", "", "", "", "", ""),
    ]


def test_what_was_not_measured_is_told() -> None:
    assert end_to_end.findings(RECORD).splitlines() == [
        "- contrib: nothing matched",
        "- as given, tokens 1, no CUDA graph: If 'branch': control flow",
        "- as given, tokens 512: out of memory",
    ]
    assert end_to_end.findings({**RECORD, "variants": [RECORD["variants"][2]]}) == ""


def test_the_page_has_what_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = performance_tables.RESULTS
    for path in recorded.glob("*.json"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(performance_tables, "RESULTS", tmp_path)
    (tmp_path / "end_to_end.json").write_text(json.dumps(RECORD))
    page = performance()
    assert "4 layers; H200, ONNX Runtime 1.31.1, 2026-12-01.\n" in page
    assert "| ours | 1 | 0.5 | 0.25 | 16 | 1234 | 1.25 | 3.0 | 5.0 |\n" in page
    (tmp_path / "end_to_end.json").unlink()
    assert end_to_end.HEADER not in performance()


def test_a_recorded_run_has_its_plot() -> None:
    docs = Path(end_to_end.__file__).parent
    record = docs.parent / "benchmarks/results/end_to_end.json"
    assert record.exists() == (docs / end_to_end.PLOT).exists()
