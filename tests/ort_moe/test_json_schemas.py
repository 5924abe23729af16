"""What is printed and written as JSON is what the published schemas say, for every fixture."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

import models.fixtures
import ort_moe
from docs.code_examples import EXAMPLES
from ort_moe.inspection.explain import Explanation
from ort_moe.inspection.inspect import Changes
from ort_moe.json_schemas import SCHEMAS
from ort_moe.rewrites import rewrite
from tests.ort_moe.published_schemas import PUBLISHED, check
from tests.ort_moe.tiny_models import fused, original, save


def test_schemas_are_schemas() -> None:
    assert set(PUBLISHED) == set(SCHEMAS)
    for schema in PUBLISHED.values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("fixture", models.fixtures.all(), ids=lambda fixture: fixture.name)
def test_fixture(fixture: models.fixtures.Fixture) -> None:
    report = ort_moe.optimize(fixture.path)
    check("report", report.to_dict())
    check("explain", report.explanation.to_dict())
    check("inspect", ort_moe.inspect(fixture.path).to_dict())


@pytest.mark.parametrize("slug", EXAMPLES)
def test_every_finding(slug: str) -> None:
    result = rewrite(EXAMPLES[slug].model(), skip=EXAMPLES[slug].skip, target=EXAMPLES[slug].target)
    check("explain", Explanation(result.sites, result.findings).to_dict())


@pytest.mark.parametrize("wrong", [None, "weights", "elsewhere"])
def test_verification(tmp_path: Path, wrong: str | None) -> None:
    reference = save(original(), tmp_path / "reference.onnx")
    check("verify", ort_moe.verify(reference, save(fused(wrong=wrong), tmp_path / "optimized.onnx")).to_dict())


def test_verified_report(tmp_path: Path) -> None:
    source = save(original(), tmp_path / "model.onnx")
    report = ort_moe.optimize(source, tmp_path / "out.onnx")
    assert report.verification is not None
    check("report", report.to_dict())
    check("changes", Changes(ort_moe.inspect(source), ort_moe.inspect(tmp_path / "out.onnx")).to_dict())


def test_diagnosis() -> None:
    check("doctor", ort_moe.diagnose().to_dict())


@pytest.mark.parametrize("name", SCHEMAS)
def test_closed_and_complete(name: str) -> None:
    """Every object of a schema names all its keys, requires them, and tells what each is."""

    def look(schema: Any, path: str) -> None:
        if isinstance(schema, dict):
            if "properties" in schema:
                assert schema["additionalProperties"] is False, path
                assert set(schema["required"]) >= set(schema["properties"]) - {"mixer_threshold"}, path
                assert all(value.get("description") for value in schema["properties"].values()), path
            for key, value in schema.items():
                look(value, f"{path}/{key}")

    look(PUBLISHED[name], "")


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    document = ort_moe.inspect(save(original(), tmp_path / "model.onnx")).to_dict()
    check("inspect", document)
    for place in (lambda d: d, lambda d: d["layers"][0], lambda d: d["layers"][0]["weights"][0]):
        changed = copy.deepcopy(document)
        place(changed)["surprise"] = 1
        with pytest.raises(ValidationError, match="surprise"):
            check("inspect", changed)
