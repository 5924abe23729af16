"""The page of environment variables has those that the code reads, and no others."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_variable_that_is_read_has_its_row() -> None:
    read = set()
    for folder, pattern in (("ort_moe", "*.py"), ("custom_ops", "*.cc"), ("custom_ops", "*.cu")):
        for path in (ROOT / folder).rglob(pattern):
            read |= set(re.findall(r'"(ORT_MOE_[A-Z0-9_]+)"', path.read_text(encoding="utf-8")))
    page = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
    assert read == set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
