"""What `ort-moe verify` prints."""

from __future__ import annotations

from ort_moe.json_schemas.form import array, count, document, flag, number, one_of, or_null, record, text
from ort_moe.verification.result import SCHEMA

STATUS = one_of("The outcome.", "passed", "failed", "skipped")

VERIFICATION_KEYS = {
    "passed": flag("Whether the optimised model computes what the original does."),
    "failure": or_null(text("Why it failed."), "it passed"),
    "reference": text("Path of the original."),
    "optimized": text("Path of the other."),
    "tolerance": number("What was allowed end to end, relative."),
    "measure": one_of(
        "What differences end to end are relative to: the largest magnitude, or the norm, where weights were packed.",
        *("largest", "norm"),
    ),
    "notes": array("How it was run.", text("A clause.")),
    "sites": array(
        "One check for each fused node.",
        record(
            "A check of one node on the original's own values.",
            {
                "node": text("Its name."),
                "status": STATUS,
                "rows": count("Rows compared."),
                "near_ties": count("Of these, rows whose experts are too close to tell apart and that differ by it."),
                "difference": or_null(number("Largest difference, relative to the largest magnitude."), "not finite"),
                "change": or_null(
                    number(
                        "What packed weights make of the rows of the original's experts, by norm, relative; its limit "
                        "is a coarse one, for a format bounds the error of each weight, but not that of rows."
                    ),
                    "not packed, or not finite",
                ),
                "detail": text("Why it failed or was skipped."),
            },
        ),
    ),
    "shapes": array(
        "One check end to end for each shape.",
        record(
            "A check of the outputs.",
            {
                "batch": count("Sequences."),
                "tokens": count("Tokens of each."),
                "past": count("Tokens of each that went before, whose keys and values are inputs."),
                "status": STATUS,
                "difference": or_null(number("Largest difference, relative as `measure` says."), "not finite"),
                "redraws": count("Inputs drawn again because of a near tie."),
                "detail": text("Why it failed or was skipped."),
            },
        ),
    ),
}

VERIFY = document("verify", SCHEMA, "What `ort-moe verify REF OPT --json` prints.", VERIFICATION_KEYS)
