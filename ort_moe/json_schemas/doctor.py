"""What `ort-moe doctor` prints."""

from __future__ import annotations

from ort_moe.diagnosis.doctor import SCHEMA
from ort_moe.json_schemas.form import array, document, flag, one_of, record, text

DOCTOR = document(
    "doctor",
    SCHEMA,
    "What `ort-moe doctor --json` prints.",
    {
        "fit": flag("Whether fused models run here."),
        "examinations": array(
            "All that was looked at.",
            record(
                "One thing.",
                {
                    "subject": text("What."),
                    "status": one_of("`note` is worth knowing and harmless.", "ok", "note", "unfit"),
                    "finding": text("What was found; where unfit, what to do about it."),
                },
            ),
        ),
    },
)
