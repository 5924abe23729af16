"""JSON Schemas (draft 2020-12) of the documents that `ort-moe` prints and writes.

Each is published as a file beside the modules, written from them by `make docs`. They are closed: a key that they do
not name is an error, and any change of a document's form raises its `schema`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ort_moe.json_schemas.bench import BENCH
from ort_moe.json_schemas.doctor import DOCTOR
from ort_moe.json_schemas.explain import EXPLAIN
from ort_moe.json_schemas.form import Schema
from ort_moe.json_schemas.inspect import CHANGES, INSPECT
from ort_moe.json_schemas.optimize import FOLDER, REPORT
from ort_moe.json_schemas.verify import VERIFY

SCHEMAS: Mapping[str, Schema] = {
    "inspect": INSPECT,
    "changes": CHANGES,
    "explain": EXPLAIN,
    "report": REPORT,
    "folder": FOLDER,
    "verify": VERIFY,
    "bench": BENCH,
    "doctor": DOCTOR,
}
"""By the name of the document, which is that of its file."""
