"""What a benchmark says in the end: a table for the reader, and the same rows as JSON for `benchmarks/results/`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def beside_peer(ours_us: float, peer: tuple[float, str] | None, moved_bytes: float, copy_gbps: float) -> dict[str, Any]:
    """Keys of a row that set our time beside the recorded peer's, and beside the bandwidth of a large copy.

    Args:
        ours_us: Our time in us.
        peer: The best peer's time in us, and its name; None: none is recorded.
        moved_bytes: What the kernel reads and writes.
        copy_gbps: The bandwidth of a large copy in GB/s.
    """
    gbps = moved_bytes / ours_us / 1e3
    return {
        "peer_us": peer[0] if peer else None,
        "peer": peer[1] if peer else None,
        "ratio_to_peer": round(ours_us / peer[0], 2) if peer else None,
        "gbps": round(gbps, 1),
        "percent_of_copy": round(100 * gbps / copy_gbps, 1),
    }


def publish(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    environment: Mapping[str, Any],
    path: Path | None,
    findings: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Prints the environment, a table and the findings, and writes them with all that the rows hold.

    Args:
        rows: The results; a value that is missing or None is shown as `-`.
        columns: Keys of the rows by heading, the row's name first.
        environment: Where they were measured.
        path: The JSON file; None: none.
        findings: Sentences about the rows, by their key in the file.
    """
    print(", ".join(f"{key} {value}" for key, value in environment.items()))
    values = [[row.get(key) for key in columns.values()] for row in rows]
    lines = [list(columns), *(["-" if value is None else str(value) for value in line] for line in values)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))
    for sentences in (findings or {}).values():
        for sentence in sentences:
            print(sentence)
    if path is not None:
        path.write_text(json.dumps({"environment": environment, "rows": rows, **(findings or {})}, indent=1) + "\n")
