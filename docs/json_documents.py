"""The page of JSON documents, from their schemas, and the files of these."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from docs.markdown_table import markdown_table
from ort_moe.json_schemas import SCHEMAS

_HEADER = """\
# JSON documents

<!-- Generated from the modules in ort_moe/json_schemas/ by `make docs`; edit them instead. -->

What `--json` prints on stdout and `--report` writes has a JSON Schema (draft 2020-12) in the package, in the folder
`ort_moe/json_schemas/`. The schemas are closed: every key is always there, and there are no others. Any change of a
document's form raises the number in its `schema`.

```sh
ort-moe optimize models/fixtures/mixtral_block_dynamo_fp32.onnx -o optimized.onnx --report report.json
ort-moe explain models/fixtures/mixtral_block_dynamo_fp32.onnx --json > explain.json
```

```python
import importlib.resources
import json

schemas = importlib.resources.files("ort_moe.json_schemas")
schema = json.loads((schemas / "report.json").read_text())
report = json.loads(open("report.json").read())
assert report["schema"] == schema["properties"]["schema"]["const"]
for site in report["sites"]:
    print(site["node"], site["status"], [finding["code"] for finding in site["findings"]])
```

In the tables, `a[].b` is the key `b` of each member of the list `a`, and `a.*.b` of each value of the object `a`.
"""


def json_documents() -> str:
    """The page of JSON documents, in Markdown."""
    shared: dict[str, Mapping[str, Any]] = {}
    parts = [_HEADER]
    for name, schema in SCHEMAS.items():
        parts.append(f"## {name}.json\n\n{schema['description']}\n\n{_keys_table(schema)}")
        shared.update(schema.get("$defs", {}))
    for name, schema in shared.items():
        parts.append(f"## {name}\n\n{schema['description']}\n\n{_keys_table(schema)}")
    return "\n".join(parts)


def _keys_table(schema: Mapping[str, Any]) -> str:
    return markdown_table(("key", "type", ""), _key_rows(schema, ""))


def _key_rows(schema: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, ...]]:
    for key, value in schema["properties"].items():
        path, nullable = f"{prefix}{key}", ""
        if "anyOf" in value and value["anyOf"][-1] == {"type": "null"}:
            value, nullable = value["anyOf"][0], " or null"
        yield f"`{path}`", _type_of(value) + nullable, value["description"]
        if value.get("type") == "array":
            path, value = f"{path}[]", value["items"]
        if isinstance(value.get("additionalProperties"), dict):
            path, value = f"{path}.*", value["additionalProperties"]
        if "properties" in value:
            yield from _key_rows(value, f"{path}.")


def _type_of(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name})"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{choice}`" for choice in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type_of(each) for each in schema["anyOf"])
    if schema["type"] == "array":
        return f"list of {_type_of(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type_of(schema['additionalProperties'])}"
    return str(schema["type"])


def schema_file(schema: Mapping[str, Any]) -> str:
    """A schema as its file has it."""
    return json.dumps(schema, indent=2) + "\n"
