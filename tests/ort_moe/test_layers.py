"""Imports go one way: from the command down to the table of ops."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ort_moe

ROOT = Path(ort_moe.__file__).parent

LAYERS = (
    ("choices", "errors", "reasons"),
    ("ops",),
    ("installation", "printing"),
    ("graphs",),
    ("files", "kernels", "packing"),
    ("reference", "rewrites", "running", "torch"),
    ("verification",),
    ("inspection",),
    ("optimization",),
    ("benchmarking", "diagnosis", "exporting"),
    ("json_schemas",),
    ("cli",),
)
"""Modules and packages, lowest first; each imports from those before it and from itself."""

PLACES = {name: place for place, layer in enumerate(LAYERS) for name in layer}


def parts() -> list[str]:
    return sorted(path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())


def imported(path: Path) -> Iterator[str]:
    """What a module imports of ort_moe, by the names in PLACES; what only type checkers see does not count."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            pending += node.orelse
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, *rest = name.split(".")
            if package == "ort_moe" and rest and rest[0] in PLACES:
                yield rest[0]
        pending += ast.iter_child_nodes(node)


def test_every_part_has_a_place() -> None:
    assert parts() == sorted({*PLACES, "__init__"})


@pytest.mark.parametrize("part", PLACES)
def test_imports_go_down(part: str) -> None:
    folder = ROOT / part
    modules = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    assert modules
    back = [
        f"{module.relative_to(ROOT)} imports ort_moe.{name}"
        for module in modules
        for name in imported(module)
        if name != part and PLACES[name] >= PLACES[part]
    ]
    assert back == []
