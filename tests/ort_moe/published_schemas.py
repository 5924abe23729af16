"""The JSON Schemas as they are published, to hold documents against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from ort_moe import json_schemas

PUBLISHED = {path.stem: json.loads(path.read_text()) for path in Path(json_schemas.__file__).parent.glob("*.json")}


def check(name: str, document: dict[str, Any]) -> None:
    """Holds a document, as it comes out of JSON, against the published schema."""
    Draft202012Validator(PUBLISHED[name]).validate(json.loads(json.dumps(document, allow_nan=False)))
