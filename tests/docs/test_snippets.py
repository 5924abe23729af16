"""Runs every command and snippet of the documentation, top to bottom, one folder per page.

A fence's language says what it is: `sh` and `python` are run. What a fence needs follows the language: `gpu` is a CUDA
device, `torch` PyTorch and transformers, and it may be both. A page runs once for each set of needs that a fence of it
has, with all fences that need no more. `make` lines are checked against the Makefile without being run, for they run
this very test. Any other language is only shown: `console` is for what builds in the checkout.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
RUN = ("sh", "python")
SHOWN = ("text", "cpp", "cmake", "json", "console")
NEEDS = {"gpu": pytest.mark.gpu, "torch": pytest.mark.export}
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One fence: where it starts, its language, what it needs of `NEEDS`, and its text."""

    page: Path
    line: int
    language: str
    needs: frozenset[str]
    body: str

    def run(self, folder: Path, environment: dict[str, str]) -> None:
        """Runs it in `folder`; a failure shows the page, the line and the output."""
        if self.language == "python":
            command = [sys.executable, "-c", self.body]
        else:
            lines = [re.sub(r"^make\b", f"make --dry-run -C {ROOT}", line) for line in self.body.splitlines()]
            command = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{self.page.name}:{self.line}\n{self.body}\n{done.stdout}\n{done.stderr}"


def snippets(page: Path) -> list[Snippet]:
    """All fences of a page, in order."""
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        language, *needs = match["info"].split() or ["text"]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Snippet(page, line, language, frozenset(needs), match["body"]))
    return found


def _runs() -> list[Any]:
    """Each page with each set of needs, marked with them."""
    runs = []
    for page in PAGES:
        for needs in sorted({s.needs for s in snippets(page) if s.language in RUN}, key=sorted):
            marks = [NEEDS[need] for need in sorted(needs)]
            runs.append(pytest.param(page, needs, marks=marks, id="-".join([page.name, *sorted(needs)])))
    return runs


def _search_path(folder: Path) -> str:
    """Where this `python` is found, and `ort-moe`: in the new `folder` where ort_moe is on PYTHONPATH alone."""
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("ort-moe", path=search):
        return search
    folder.mkdir()
    script = folder / "ort-moe"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ort_moe.cli "$@"\n')
    script.chmod(0o755)
    return f"{search}{os.pathsep}{folder}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_names_a_known_language(page: Path) -> None:
    unknown = [f"{s.line}: {s.language}" for s in snippets(page) if s.language not in RUN + SHOWN]
    assert not unknown
    assert {need for s in snippets(page) for need in s.needs} <= NEEDS.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_code_hides_in_indentation(page: Path) -> None:
    """Indented blocks are code to Markdown, too, and would not be run."""
    assert not re.findall(r"(?<=\n\n) {4}.*", FENCE.sub("", page.read_text()))


@pytest.mark.parametrize(("page", "here"), _runs())
def test_snippets_run(page: Path, here: frozenset[str], tmp_path: Path) -> None:
    """From top to bottom in one folder, which has models and benchmarks as a checkout has."""
    assert shutil.which("make")
    for name in ("models", "benchmarks", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {"PATH": _search_path(tmp_path / "bin")}
    for snippet in snippets(page):
        if snippet.language in RUN and snippet.needs <= here:
            snippet.run(tmp_path, environment)
