"""Text for pipes keeps sentences whole; tables break phrases before names."""

from __future__ import annotations

from io import StringIO
from itertools import pairwise

import pytest
from rich.console import Console, Group, RenderableType
from rich.text import Text

from ort_moe.printing.printable import Printable, paragraph, plain, table

SENTENCE = "a sentence that is longer than a narrow terminal " * 5
NAME = "/model/layers.0/mlp/gate/TopK"
PHRASE = "sigmoid + bias, top 8 in the best 4 of 8 groups, normalised, times 2.5"


class Result(Printable):
    def __rich__(self) -> RenderableType:
        listing = table("node", "E", "router", numbers=("E",), prose=("router",))
        listing.add_row(NAME, "256", PHRASE)
        return Group(Text(SENTENCE), paragraph(SENTENCE, indent=4), listing, listing, Text("the end"))


def drawn(width: int) -> list[str]:
    file = StringIO()
    Console(file=file, width=width).print(Result())
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_plain_text_does_not_wrap_prose() -> None:
    lines = str(Result()).splitlines()
    assert lines[:2] == [SENTENCE, f"    {SENTENCE}"]
    assert lines[-1] == "the end"


def test_plain_text_has_no_trailing_blanks() -> None:
    lines = str(Result()).splitlines()[2:]
    assert [line.rstrip() for line in lines] == lines
    assert not any(first == second == "" for first, second in pairwise(lines))


def test_a_terminal_wraps_prose_and_keeps_its_indent() -> None:
    lines = drawn(60)
    assert max(map(len, lines)) <= 60
    indented = [line for line in lines if line.startswith("    ") and "sentence" in line]
    assert len(indented) > 3


@pytest.mark.parametrize("width", [80, 60])
def test_the_phrase_gives_way_before_the_name(width: int) -> None:
    for lines in (drawn(width), plain(Result(), width).splitlines()):
        rows = [line for line in lines if NAME in line]
        assert len(rows) == 2
        assert all("256" in row and len(row) <= width for row in rows)
        words = {word for line in lines for word in line.split()}
        assert set(PHRASE.split()) <= words  # none is broken


def test_too_narrow_for_the_name() -> None:
    lines = plain(Result(), 30).splitlines()[2:]
    assert max(map(len, lines)) <= 30
    assert "".join("".join(line[:12].split()) for line in lines).count("layers")  # broken, but there
    assert any("256" in line for line in lines)
