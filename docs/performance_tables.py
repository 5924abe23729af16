"""What benchmarks recorded, as tables of the performance page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from docs.markdown_table import markdown_table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def is_recorded(name: str) -> bool:
    """Whether a benchmark has recorded anything."""
    return (RESULTS / f"{name}.json").exists()


def record(name: str) -> Mapping[str, Any]:
    """What one benchmark recorded."""
    document: Mapping[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return document


def machine(document: Mapping[str, Any]) -> str:
    """A sentence on the GPU that it ran on, what that ran under, and when."""
    on = document["environment"]
    runtime = f" ONNX Runtime {on['onnxruntime']}," if "onnxruntime" in on else ""
    kept = f" The columns of ONNX Runtime are kept from another run: {on['in_ort']}." if "in_ort" in on else ""
    return (
        f"{on['gpu']}, driver {on['driver']}, CUDA {on['cuda']},{runtime} SM clock {on['sm_mhz']} MHz, copy bandwidth"
        f" {on['copy_gbps']:.0f} GB/s, {on['date']}.{kept}\n"
    )


def recorded(name: str, head: tuple[str, ...], cells: Callable[[Mapping[str, Any]], tuple[str, ...]]) -> str:
    """What one benchmark recorded: its machine, the cells of each row, and which peers were wrong."""
    document = record(name)
    wrong = [f"{sentence}.\n" for sentence in document.get("wrong_peers", ())]
    return "\n".join([machine(document), markdown_table(head, map(cells, document["rows"])), *wrong])


def beside_peer(times: tuple[str, ...], row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a row with a peer: its name, and whether it was measured, before the share of the bandwidth."""
    *cells, percent = timed_cells(times, row)
    peer = f"{row['peer']}, {row.get('peer_is', 'recorded')}" if row["peer"] else ""
    return *cells, peer, percent


def timed_cells(times: tuple[str, ...], row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a row: the times of these keys, of which any may be missing, and the share of the bandwidth."""
    us = ("" if row.get(name) is None else f"{row[name]:.2f}" for name in times)
    return row["shape"], str(row["tokens"]), *us, f"{row['percent_of_copy']:.1f}"
