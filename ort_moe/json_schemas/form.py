"""What the schemas are built of: each part with what it is about in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ort_moe.ops import Attribute

Schema = dict[str, Any]


def text(about: str, **more: Any) -> Schema:
    """A string."""
    return {"type": "string", "description": about, **more}


def one_of(about: str, *values: str) -> Schema:
    """One of some strings."""
    return {"enum": list(values), "description": about}


def count(about: str) -> Schema:
    """A whole number from 0 on."""
    return {"type": "integer", "minimum": 0, "description": about}


def number(about: str) -> Schema:
    """Any number."""
    return {"type": "number", "description": about}


def flag(about: str) -> Schema:
    """True or false."""
    return {"type": "boolean", "description": about}


def array(about: str, items: Schema) -> Schema:
    """A list of items of one form."""
    return {"type": "array", "items": items, "description": about}


def mapping(about: str, values: Schema) -> Schema:
    """An object of any keys whose values are of one form."""
    return {"type": "object", "additionalProperties": values, "description": about}


def record(about: str, keys: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object of these keys and no others."""
    return {
        "type": "object",
        "description": about,
        "properties": {**keys, **(optional or {})},
        "required": list(keys),
        "additionalProperties": False,
    }


def or_null(schema: Schema, when: str) -> Schema:
    """What the schema says, or null where that holds."""
    about = f"{schema['description'].rstrip('.')}; null: {when}."
    return {"anyOf": [{**schema, "description": about}, {"type": "null"}], "description": about}


def reference(name: str, about: str) -> Schema:
    """A form among the `$defs` of the document."""
    return {"$ref": f"#/$defs/{name}", "description": about}


def attribute_value(attribute: Attribute) -> Schema:
    """A value of an attribute of an op; infinities are strings."""
    if attribute.choices and attribute.kind != "float":
        return {"enum": list(attribute.choices), "description": attribute.doc}
    if attribute.kind == "float":
        return {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf"]}], "description": attribute.doc}
    return {"type": {"int": "integer", "string": "string"}[attribute.kind], "description": attribute.doc}


def version(number: int) -> Schema:
    """The number of a document's form."""
    return {"const": number, "description": "Version of this form; any change raises it."}


def document(name: str, form: int, about: str, keys: Mapping[str, Schema], **defs: Schema) -> Schema:
    """The schema of a whole document, whose first key is the number of its form."""
    made = record(about, {"schema": version(form), **keys})
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:ort-moe:{name}:{form}"}
    return {**head, "title": f"ort-moe {name}", **made, **({"$defs": defs} if defs else {})}


BEFORE_AFTER = record("Number of nodes.", {"before": count("In the input."), "after": count("In the output.")})
"""Of an operator, in two models."""
