"""The generated pages are those that the tables give."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate


@pytest.mark.parametrize("name", generate.PAGES)
def test_page_is_up_to_date(name: str) -> None:
    page = Path(generate.__file__).parent / name
    assert page.read_text(encoding="utf-8") == generate.PAGES[name](), "run `make docs`"
