"""Writes the pages that are derived from tables and recorded results: `python docs/generate.py` renews them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from docs.json_documents import json_documents, schema_file
from docs.op_reference import op_reference
from docs.performance import performance, sweep_plot
from docs.reason_codes import reason_codes
from ort_moe.json_schemas import SCHEMAS

PAGES: Mapping[str, Callable[[], str]] = {
    "ops.md": op_reference,
    "codes.md": reason_codes,
    "performance.md": performance,
    "performance_sweep.svg": sweep_plot,
    "json.md": json_documents,
    **{f"../ort_moe/json_schemas/{name}.json": partial(schema_file, schema) for name, schema in SCHEMAS.items()},
}
"""Each generated file, from this folder, and what writes it."""

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8")
