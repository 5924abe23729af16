"""What `ort-moe optimize` writes, of a model and of a folder."""

from __future__ import annotations

from ort_moe.choices import TARGETS
from ort_moe.json_schemas.explain import ALL_EXPERTS, EXPERTS, FINDING, FINDINGS, SITE, SITES
from ort_moe.json_schemas.form import (
    BEFORE_AFTER,
    array,
    count,
    document,
    flag,
    mapping,
    number,
    one_of,
    or_null,
    record,
    reference,
    text,
    version,
)
from ort_moe.json_schemas.verify import VERIFICATION_KEYS
from ort_moe.optimization.folder_report import SCHEMA as FOLDER_FORM
from ort_moe.optimization.report import SCHEMA as REPORT_FORM
from ort_moe.verification.result import SCHEMA as VERIFY_FORM

CONVERSION = record(
    "What became of the weights of a FusedExperts that were to be packed.",
    {
        "node": text("Name of the FusedExperts."),
        "packing": text("How they were to be packed, in words."),
        "layers": array(
            "fc1 and fc2; empty where they are left.",
            record(
                "A layer that was packed.",
                {
                    "layer": one_of("Which.", "fc1", "fc2"),
                    "weights": text("Name of what held the weights."),
                    "shape": array("Experts, rows, elements along the reduction.", count("A length.")),
                    "bytes_before": count("Bytes as they were."),
                    "bytes_after": count("Bytes of codes, scales and zero points."),
                    "largest_error": number("Largest difference of a weight from what it now stands for."),
                    "largest_weight": number("Largest magnitude of a weight."),
                    "relative_error": number("Norm of the differences, relative to that of the weights."),
                },
            ),
        ),
        "why_left": text("Why the weights are left as they are; empty where they were packed."),
    },
)

REPORT_KEYS = {
    "source": text("Path of the input."),
    "output": or_null(text("Path of the output."), "nothing was written"),
    "target": one_of("Where the model shall run, or whose nodes it has.", *TARGETS),
    "matched": flag("Whether anything was fused that was not before."),
    "already_fused": count("FusedRouter nodes that the input held already."),
    "operators": mapping("Every operator of either model.", BEFORE_AFTER),
    "passes": array(
        "In their order.",
        record(
            "A pass.",
            {
                "name": text("Its name."),
                "applied": count("How often it changed something."),
                "seconds": number("Wall time."),
            },
        ),
    ),
    "sites": SITES,
    "experts": ALL_EXPERTS,
    "conversions": array("Of weights that were to be packed.", reference("conversion", "Those of a layer.")),
    "findings": FINDINGS,
    "verification": or_null(reference("verification", "The proof"), "not verified"),
    "warnings": array("What the user should know.", text("A sentence.")),
}

REPORT_PARTS = {
    "site": SITE,
    "experts": EXPERTS,
    "conversion": CONVERSION,
    "finding": FINDING,
    "verification": record("A verification.", {"schema": version(VERIFY_FORM), **VERIFICATION_KEYS}),
}

REPORT = document(
    "report",
    REPORT_FORM,
    "What `ort-moe optimize MODEL --report FILE.json` writes.",
    REPORT_KEYS,
    **REPORT_PARTS,
)

FOLDER = document(
    "folder",
    FOLDER_FORM,
    "What `ort-moe optimize FOLDER --report FILE.json` writes, of a model folder of onnxruntime-genai.",
    {
        "source": text("Path of the input."),
        "output": or_null(text("Path of the output."), "nothing was written"),
        "target": one_of("Where the models shall run, or whose nodes they have.", *TARGETS),
        "matched": flag("Whether anything was fused in any model that was not before."),
        "models": array("Each that genai_config.json names, in its order.", reference("report", "Of one model.")),
        "library": or_null(
            text("Name of the copy of our library in the output."), "no model needs it, or nothing was written"
        ),
        "carried": count("Files that are in the output as they were."),
        "warnings": array("What the user should know of the folder.", text("A sentence.")),
    },
    report=record("A report.", {"schema": version(REPORT_FORM), **REPORT_KEYS}),
    **REPORT_PARTS,
)
