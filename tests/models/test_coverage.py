"""docs/coverage.md tells what the rewrites make of the fixtures."""

from fnmatch import fnmatch
from pathlib import Path

import onnx_ir as ir
import pytest

import models.fixtures
from models.coverage import PAGE, WHOLE, Outcome, Part, outcome, page
from models.fixtures import Fixture
from tests.rewrites.test_fixtures import NOT_WHOLE


def expected_outcome(fixture: Fixture) -> Outcome:
    """Of the fixtures that are not listed there, tests/rewrites/test_fixtures.py shows that they are whole."""
    return outcome(fixture) if any(fnmatch(fixture.name, pattern) for pattern in NOT_WHOLE) else WHOLE


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(expected_outcome), "run `make docs`"


def test_page_names_every_fixture() -> None:
    """As many results as fixtures, each under its architecture."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for name in {fixture.architecture for fixture in models.fixtures.all()}:
        cells = [cell for line in lines if line.startswith(f"| {name} |") for cell in line.split("|")]
        results = [cell for cell in cells if cell.strip().startswith("*")]
        assert len(results) == sum(fixture.architecture == name for fixture in models.fixtures.all())


def test_most_are_whole() -> None:
    text = PAGE.read_text(encoding="utf-8")
    cells = [cell.strip() for line in text.splitlines() if line.startswith("| ") for cell in line.split("|")]
    results = [cell for cell in cells if cell.startswith("*")]
    assert len(results) == len(models.fixtures.all())
    assert all(result == "**whole**" or " / " in result for result in results)
    for part in (0, -1):
        whole = sum(result.split(" / ")[part] == "**whole**" for result in results)
        assert whole >= 0.95 * len(results)


def test_outcomes(tmp_path: Path) -> None:
    fixture = models.fixtures.get("mixtral_block_dynamo_fp32")
    assert str(outcome(fixture)) == "**whole**"

    # Another reader of the weights before they are divided by their sum stops that rule.
    model = ir.load(fixture.path)
    (top_k,) = [node for node in model.graph if node.op_type == "TopK"]
    model.graph.outputs.append(top_k.outputs[0])
    changed = tmp_path / "model.onnx"
    ir.save(model, changed)
    found = outcome(Fixture(**{**vars(fixture), "path": changed}))
    assert (found.routers.status, found.experts.status) == ("partly", "whole")
    assert str(found).startswith("*partly* ([read-by-others](codes.md#om010-")
    assert str(found).endswith(") / **whole**")


@pytest.mark.parametrize(("status", "text"), [("refused", "*refused* (none found)")])
def test_part_without_a_site(status: str, text: str) -> None:
    assert str(Part(status)) == text
