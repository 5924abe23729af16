"""The generated pages are those that the tables give."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from docs import generate, performance_tables
from docs.performance import performance


@pytest.mark.parametrize("name", generate.PAGES)
def test_page_is_up_to_date(name: str) -> None:
    page = Path(generate.__file__).parent / name
    assert page.read_text(encoding="utf-8") == generate.PAGES[name](), "run `make docs`"


def test_recorded_experts_have_their_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = performance_tables.RESULTS
    for path in recorded.glob("*.json"):
        shutil.copy(path, tmp_path)
    environment = json.loads((recorded / "router.json").read_text(encoding="utf-8"))["environment"]
    shape = {"shape": "nvfp4 bfloat16 8/2/64/32", "tokens": 1, "ratio_to_contrib": 0.25}
    rows = {
        "experts": {"layer_us": 12.5, "layer_ort_us": 13.25, "contrib_us": 53, "percent_of_copy": 51.04}
        | {"contrib_kernels_us": {"gemv": 40.125, "topk": 8.0}}
        | shape,
        "expert_cycles": {"layers": 48, "cycle_ms": 0.75, "contrib_ms": 3.0} | shape,
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"environment": environment, "rows": [row]}))
    monkeypatch.setattr(performance_tables, "RESULTS", tmp_path)
    page = performance()
    assert "| nvfp4 bfloat16 8/2/64/32 | 1 |  |  | 12.50 | 13.25 | 53.00 | 0.25 | 51.0 |\n" in page
    assert "| nvfp4 bfloat16 8/2/64/32 | 1 | gemv 40.12, topk 8.00 |\n" in page
    assert "| nvfp4 bfloat16 8/2/64/32 | 1 | 48 | 0.750 | 3.000 | 0.25 |\n" in page


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


def test_the_readme_quotes_the_recorded_layers() -> None:
    root = Path(__file__).parents[2]
    sweep = json.loads((root / "benchmarks/results/expert_sweep.json").read_text(encoding="utf-8"))["rows"]
    recorded = [row for row in sweep if row["load"] == "uniform" and "contrib_us" in row]
    page = (root / "README.md").read_text(encoding="utf-8")
    head, _, *lines = page[page.index("| weights, experts / chosen") :].split("\n\n", 1)[0].splitlines()
    tokens = [int(cell) for cell in re.findall(r"\d+", head)]
    quoted = [[tuple(map(int, re.findall(r"\d+", cell))) for cell in line.split("|")[2:-1]] for line in lines]
    times = {(r["shape"], r["tokens"]): (round(r["layer_us"]), round(r["contrib_us"])) for r in recorded}
    shapes = {shape for shape, _ in times if all((shape, count) in times for count in tokens)}
    assert quoted
    assert sorted(quoted) == sorted([times[shape, count] for count in tokens] for shape in shapes)


def test_the_readme_quotes_the_recorded_models() -> None:
    root = Path(__file__).parents[2]
    variants = json.loads((root / "benchmarks/results/end_to_end.json").read_text(encoding="utf-8"))["variants"]
    page = (root / "README.md").read_text(encoding="utf-8")
    _, _, *lines = page[page.index("| tokens | as exported |") :].split("\n\n", 1)[0].splitlines()
    quoted = {int(cells[1]): [float(cell) for cell in cells[2:-1]] for cells in (line.split("|") for line in lines)}
    recorded = {
        timing["tokens"]: [float(f"{variant['timings'][n]['graph_ms']:.3g}") for variant in variants]
        for n, timing in enumerate(variants[0]["timings"])
    }
    assert quoted == recorded
