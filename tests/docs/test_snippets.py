"""Runs every command and snippet of the documentation, top to bottom, one folder per page.

A fence's language says what it is: `sh` and `python` are run; `sh gpu` and `python gpu` need a CUDA device, `python
torch` PyTorch; `make` lines are checked against the Makefile without being run, for they run this very test. Any other
language is only shown: `console` is for what builds in the checkout.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
RUN = ("sh", "python")
SHOWN = ("text", "cpp", "cmake", "json", "console")
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One fence: where it starts, its language, what it needs ("", "gpu" or "torch"), and its text."""

    page: Path
    line: int
    language: str
    needs: str
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
        language, *rest = match["info"].split() or ["text"]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Snippet(page, line, language, " ".join(rest), match["body"]))
    return found


def run_page(page: Path, folder: Path, *here: str) -> None:
    """Runs the page's snippets whose needs are here in one folder with models and benchmarks, as in a checkout."""
    for name in ("models", "benchmarks", "docs"):
        (folder / name).symlink_to(ROOT / name)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for snippet in snippets(page):
        if snippet.language in RUN and snippet.needs in ("", *here):
            snippet.run(folder, environment)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_names_a_known_language(page: Path) -> None:
    unknown = [f"{s.line}: {s.language}" for s in snippets(page) if s.language not in RUN + SHOWN]
    assert not unknown
    assert {s.needs for s in snippets(page)} <= {"", "gpu", "torch"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", FENCE.sub("", page.read_text()))
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_code_hides_in_indentation(page: Path) -> None:
    """Indented blocks are code to Markdown, too, and would not be run."""
    assert not re.findall(r"(?<=\n\n) {4}.*", FENCE.sub("", page.read_text()))


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if any(s.language in RUN and not s.needs for s in snippets(p))],
    ids=lambda page: page.name,
)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    assert shutil.which("make")
    run_page(page, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(s.needs == "gpu" for s in snippets(p))], ids=lambda page: page.name
)
def test_gpu_snippets_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, "gpu")


@pytest.mark.export
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(s.needs == "torch" for s in snippets(p))], ids=lambda p: p.name
)
def test_torch_snippets_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, "torch")
