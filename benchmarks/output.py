"""What a benchmark says in the end: a table for the reader, and the same rows as JSON for `benchmarks/results/`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ort_moe.errors import OutputError
from ort_moe.files.staging import check_file_place, staged_file


@dataclass(frozen=True)
class Measured:
    """A peer that ran beside ours.

    Attributes:
        name: Under which its times are recorded, too.
        version: Of what is installed.
        us: Its time.
        wrong: The share of rows that it got wrong.
    """

    name: str
    version: str
    us: float
    wrong: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"


def beside_peer(
    ours_us: float,
    recorded: tuple[float, str] | None,
    moved_bytes: float,
    copy_gbps: float,
    measured: Sequence[Measured] = (),
) -> dict[str, Any]:
    """Keys of a row that set our time beside the best peer's, and beside the bandwidth of a large copy.

    Args:
        ours_us: Our time in us.
        recorded: The best peer's time in us as recorded, and its name; it counts unless that peer was measured.
        moved_bytes: What the kernel reads and writes.
        copy_gbps: The bandwidth of a large copy in GB/s.
        measured: Peers that ran in this run.
    """
    times = [(peer.us, peer.label, "measured") for peer in measured]
    if recorded is not None and recorded[1] not in [peer.name for peer in measured]:
        times.append((*recorded, "recorded"))
    us, peer, how = min(times) if times else (None, None, None)
    gbps = moved_bytes / ours_us / 1e3
    return {
        "peer_us": us if us is None or how == "recorded" else round(us, 3),
        "peer": peer,
        "peer_is": how,
        "ratio_to_peer": round(ours_us / us, 2) if us else None,
        "gbps": round(gbps, 1),
        "percent_of_copy": round(100 * gbps / copy_gbps, 1),
        "measured_us": {peer.label: round(peer.us, 3) for peer in measured},
        "wrong_rows": {peer.label: round(peer.wrong, 6) for peer in measured if peer.wrong},
    }


def wrong_answers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence on each peer that was wrong somewhere."""
    worst: dict[str, tuple[float, str]] = {}
    for row in rows:
        for peer, share in row["wrong_rows"].items():
            worst[peer] = max(worst.get(peer, (0.0, "")), (share, f"{row['shape']}, T = {row['tokens']}"))
    return [f"{peer} gets up to {100 * share:.3g} % of rows wrong: {where}" for peer, (share, where) in worst.items()]


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
        write_json({"environment": environment, "rows": rows, **(findings or {})}, path)


def add_json(options: argparse.ArgumentParser) -> None:
    """The option `--json OUT`; a place that no file can be put to is refused before anything is measured."""
    options.add_argument("--json", type=_file_place, metavar="OUT", help="also write the results here")


def _file_place(text: str) -> Path:
    path = Path(text)
    try:
        check_file_place(path.absolute())
    except OutputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def write_json(document: Mapping[str, Any], path: Path) -> None:
    """Writes a benchmark's results beside their place and moves them there: an interrupt leaves what was there before.

    Raises:
        OSError: They cannot be written.
    """
    with staged_file(path) as staged:
        staged.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
