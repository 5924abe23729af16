"""JSON Schemas (draft 2020-12) of the documents that `ort-moe` prints and writes.

Each is published as a file beside this one, written from here by `make docs`. They are closed: a key that they do not
name is an error, and any change of a document's form raises its `schema`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ort_moe.benchmarking.result import SCHEMA as BENCH
from ort_moe.choices import TARGETS
from ort_moe.diagnosis.doctor import SCHEMA as DOCTOR
from ort_moe.inspection.explain import SCHEMA as EXPLAIN
from ort_moe.inspection.inspect import SCHEMA as INSPECT
from ort_moe.ops import FUSED_EXPERTS, FUSED_ROUTER, Attribute
from ort_moe.optimization.folder_report import SCHEMA as FOLDER
from ort_moe.optimization.report import SCHEMA as REPORT
from ort_moe.verification.result import SCHEMA as VERIFY

Schema = dict[str, Any]


def _text(about: str, **more: Any) -> Schema:
    return {"type": "string", "description": about, **more}


def _one_of(about: str, *values: str) -> Schema:
    return {"enum": list(values), "description": about}


def _count(about: str) -> Schema:
    return {"type": "integer", "minimum": 0, "description": about}


def _number(about: str) -> Schema:
    return {"type": "number", "description": about}


def _flag(about: str) -> Schema:
    return {"type": "boolean", "description": about}


def _list(about: str, items: Schema) -> Schema:
    return {"type": "array", "items": items, "description": about}


def _map(about: str, values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values, "description": about}


def _object(about: str, keys: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "description": about,
        "properties": {**keys, **(optional or {})},
        "required": list(keys),
        "additionalProperties": False,
    }


def _or_null(schema: Schema, when: str) -> Schema:
    about = f"{schema['description'].rstrip('.')}; null: {when}."
    return {"anyOf": [{**schema, "description": about}, {"type": "null"}], "description": about}


def _ref(name: str, about: str) -> Schema:
    return {"$ref": f"#/$defs/{name}", "description": about}


def _attribute(attribute: Attribute) -> Schema:
    if attribute.choices and attribute.kind != "float":
        return {"enum": list(attribute.choices), "description": attribute.doc}
    if attribute.kind == "float":
        return {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf"]}], "description": attribute.doc}
    return {"type": {"int": "integer", "string": "string"}[attribute.kind], "description": attribute.doc}


_BEFORE_AFTER = _object("Number of nodes.", {"before": _count("In the input."), "after": _count("In the output.")})

_FINDING = _object(
    "Something that stands in the way.",
    {
        "code": _text("Its stable code.", pattern="^OM[0-9]{3}$"),
        "slug": _text("The code in words."),
        "node": _text("Name of the node it is about; empty where there is none."),
        "detail": _text("What was expected and what is there."),
        "consumers": _list("The other consumers of the value in question.", _text("By operator and name.")),
        "remedy": _text("What the user can do about it."),
    },
)

_SITE = _object(
    "A router, or another node that chooses the largest.",
    {
        "node": _text("Name of the node, which is that of the original's TopK."),
        "graph": _text("Name of the graph or function it is in."),
        "status": _one_of(
            "`whole`: nothing of the router is left beside the fused node; `partly`: something is; `left`: not fused.",
            *("whole", "partly", "left"),
        ),
        "experts": _or_null(_count("Number of experts."), "not known"),
        "k": _or_null(_count("Experts chosen per token."), "not known"),
        "attributes": _or_null(
            _object(
                "Attributes of the FusedRouter; infinities are strings.",
                {a.name: _attribute(a) for a in FUSED_ROUTER.attributes if a.only_with is None},
                {a.name: _attribute(a) for a in FUSED_ROUTER.attributes if a.only_with is not None},
            ),
            "not fused",
        ),
        "inputs": _list(
            "Inputs that the FusedRouter has.",
            _one_of("Its name in the op reference.", *(t.name for t in FUSED_ROUTER.inputs)),
        ),
        "absorbed": _list("What it absorbed, in order.", _text("Name of a rule.")),
        "findings": _list("Why it is not whole.", _ref("finding", "A finding.")),
        "surroundings": _list(
            "Of a site that is not whole, the nodes around it, without weights.",
            _text("A node in the manner of ONNX's text form."),
        ),
    },
)

_EXPERTS = _object(
    "The experts behind a choice.",
    {
        "node": _text("Name of the FusedExperts, or of the node that makes the choice."),
        "graph": _text("Name of the graph it is in."),
        "status": _one_of("`whole`: one FusedExperts computes them; `left`: not fused.", *("whole", "left")),
        "block": _one_of(
            "`whole`: router and experts are fused whole; `partly`: something is left; `left`: neither is fused.",
            *("whole", "partly", "left"),
        ),
        "router": _text("Name of the site that makes the choice; empty where it is not known."),
        "form": _text("Name of the rule that read them; empty where none did."),
        "experts": _or_null(_count("Number of experts."), "not known"),
        "k": _or_null(_count("Experts chosen per token."), "not known"),
        "hidden": _or_null(_count("Elements of a token's row."), "not known"),
        "inner": _or_null(_count("Elements between the layers."), "not known"),
        "attributes": _or_null(
            _object("Attributes of the FusedExperts.", {a.name: _attribute(a) for a in FUSED_EXPERTS.attributes}),
            "not fused",
        ),
        "residual": _one_of(
            "What the FusedExperts adds to their results: `shared` experts, shared ones behind a sigmoid gate of their "
            "own (`gated`), or any `other` value.",
            *("none", "shared", "gated", "other"),
        ),
        "findings": _list("Why they are left.", _ref("finding", "A finding.")),
        "surroundings": _list(
            "Of experts that are left, the nodes around where they end, without weights.",
            _text("A node in the manner of ONNX's text form."),
        ),
    },
)

_CONVERSION = _object(
    "What became of the weights of a FusedExperts that were to be packed.",
    {
        "node": _text("Name of the FusedExperts."),
        "packing": _text("How they were to be packed, in words."),
        "layers": _list(
            "fc1 and fc2; empty where they are left.",
            _object(
                "A layer that was packed.",
                {
                    "layer": _one_of("Which.", "fc1", "fc2"),
                    "weights": _text("Name of what held the weights."),
                    "shape": _list("Experts, rows, elements along the reduction.", _count("A length.")),
                    "bytes_before": _count("Bytes as they were."),
                    "bytes_after": _count("Bytes of codes, scales and zero points."),
                    "largest_error": _number("Largest difference of a weight from what it now stands for."),
                    "largest_weight": _number("Largest magnitude of a weight."),
                    "relative_error": _number("Norm of the differences, relative to that of the weights."),
                },
            ),
        ),
        "why_left": _text("Why the weights are left as they are; empty where they were packed."),
    },
)

_ALL_EXPERTS = _list("The experts behind the choices, in graph order.", _ref("experts", "The experts of a layer."))
_SITES = _list("In graph order.", _ref("site", "A site."))
_FINDINGS = _list("What concerns the model as a whole.", _ref("finding", "A finding."))
_STATUS = _one_of("The outcome.", "passed", "failed", "skipped")
_DIFFERENCE = _or_null(_number("Largest difference, relative to the largest magnitude."), "not finite")

_INSPECTION_KEYS = {
    "model": _text("Path of the model."),
    "weight_bytes": _count("Bytes of all weights."),
    "expert_bytes_per_token": _or_null(
        _count("Bytes of experts' weights that one token reads, in the layers of which they are known."),
        "known of no layer",
    ),
    "optimized_expert_bytes_per_token": _or_null(
        _count("The same of the model that `optimize` makes of it, with the weights as they are."), "known of no layer"
    ),
    "operators": _map("Number of nodes by operator.", _count("Nodes.")),
    "layers": _list("MoE layers in graph order.", _ref("layer", "A layer.")),
    "cuda_graph_blockers": _list(
        "Nodes that keep the model out of a CUDA graph.",
        _object(
            "A node.",
            {"node": _text("Its name."), "operator": _text("Its type."), "why": _text("Why, in a few words.")},
        ),
    ),
}

_LAYER = _object(
    "An MoE layer.",
    {
        "node": _text("Name of the router's node, or of the contrib node."),
        "kind": _text("`router`, `fused router`, or `contrib` and the operator."),
        "experts": _or_null(_count("Number of experts."), "not known"),
        "k": _or_null(_count("Experts chosen per token."), "not known"),
        "router": _text("Its arithmetic in a phrase."),
        "weights": _list(
            "Stacks of experts' weights behind the choice.",
            _object(
                "A stack.",
                {
                    "shape": _list("Its shape; the experts come first.", _count("A length.")),
                    "dtype": _text("Element type, as ONNX names it."),
                    "nbytes": _count("Bytes of the whole."),
                },
            ),
        ),
        "all_experts": _flag("Whether every token goes through all experts."),
        "copied": _flag("Whether the weights of each choice of each token are copied before they are multiplied."),
        "bytes_per_token": _or_null(_count("Bytes of experts' weights that one token reads."), "not known"),
        "optimized_bytes_per_token": _or_null(
            _count("The same of what `optimize` makes of the layer, with the weights as they are."), "the experts stay"
        ),
    },
)

_VERIFICATION_KEYS = {
    "passed": _flag("Whether the optimised model computes what the original does."),
    "failure": _or_null(_text("Why it failed."), "it passed"),
    "reference": _text("Path of the original."),
    "optimized": _text("Path of the other."),
    "tolerance": _number("What was allowed end to end, relative."),
    "measure": _one_of(
        "What differences end to end are relative to: the largest magnitude, or the norm, where weights were packed.",
        *("largest", "norm"),
    ),
    "notes": _list("How it was run.", _text("A clause.")),
    "sites": _list(
        "One check for each fused node.",
        _object(
            "A check of one node on the original's own values.",
            {
                "node": _text("Its name."),
                "status": _STATUS,
                "rows": _count("Rows compared."),
                "near_ties": _count("Of these, rows whose experts are too close to tell apart and that differ by it."),
                "difference": _DIFFERENCE,
                "change": _or_null(
                    _number("What packed weights make of the rows of the original's experts, by norm, relative."),
                    "not packed, or not finite",
                ),
                "detail": _text("Why it failed or was skipped."),
            },
        ),
    ),
    "shapes": _list(
        "One check end to end for each shape.",
        _object(
            "A check of the outputs.",
            {
                "batch": _count("Sequences."),
                "tokens": _count("Tokens of each."),
                "past": _count("Tokens of each that went before, whose keys and values are inputs."),
                "status": _STATUS,
                "difference": _DIFFERENCE,
                "redraws": _count("Inputs drawn again because of a near tie."),
                "detail": _text("Why it failed or was skipped."),
            },
        ),
    ),
}

_MS = "Milliseconds"
_TIMING = _object(
    "Runs of one model at one number of tokens.",
    {
        "tokens": _or_null(_count("Of one sequence."), "the model's inputs have fixed lengths"),
        "steps": _count(
            "Runs that were timed, each with other inputs than the one before but for a cache, which goes on."
        ),
        "step_ms": _or_null(
            _number(f"{_MS} of a run with what it copies of its state, the median of the steps."), "it does not run"
        ),
        "fastest_ms": _or_null(_number(f"{_MS} of the fastest."), "it does not run"),
        "graph_ms": _or_null(_number(f"{_MS} of a replay of its CUDA graph, the median."), "there is no graph"),
        "why": _text("Why it does not run; empty where it does."),
        "why_no_graph": _text("Why there is no CUDA graph; empty where there is."),
        "expert_gbps": _or_null(
            _number("Bytes of experts' weights read by one token, in 10^9 a second of the shorter median."),
            "not known, or more than one token",
        ),
        "times_faster": _or_null(
            _number("The shorter median of the model as given, by this one's."), "it is that one, or one does not run"
        ),
    },
)

_VARIANT = _object(
    "One of the models.",
    {
        "name": _text("`as given`, `contrib`, or `ours`, with a format where weights were packed on the way."),
        "model": _or_null(_text("Its path."), "made for the measurement"),
        "status": _one_of(
            "`failed`: it does not load or run; `impossible`: there is no such model.",
            *("measured", "failed", "impossible"),
        ),
        "why": _text("Why it was not measured; empty where it was."),
        "remark": _text("What else one should know; mostly empty."),
        "weight_bytes": _or_null(_count("Bytes of all weights."), "there is no such model"),
        "expert_bytes_per_token": _or_null(_count("Bytes of experts' weights that one token reads."), "not known"),
        "load_seconds": _or_null(_number("Creation of the session."), "not measured"),
        "host_bytes": _or_null(_count("Most memory of the process, with Python and mapped files."), "not measured"),
        "host_bytes_before": _or_null(_count("The same before the session was created."), "not measured"),
        "device_bytes": _or_null(
            _count("What more of the GPU's memory is in use behind the runs than before the session."),
            "not measured, or on the CPU",
        ),
        "timings": _list("At each number of tokens.", _ref("timing", "The runs.")),
    },
)


def _version(number: int) -> Schema:
    return {"const": number, "description": "Version of this form; any change raises it."}


def _document(name: str, version: int, about: str, keys: Mapping[str, Schema], **defs: Schema) -> Schema:
    made = _object(about, {"schema": _version(version), **keys})
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:ort-moe:{name}:{version}"}
    return {**head, "title": f"ort-moe {name}", **made, **({"$defs": defs} if defs else {})}


_REPORT_KEYS = {
    "source": _text("Path of the input."),
    "output": _or_null(_text("Path of the output."), "nothing was written"),
    "target": _one_of("Where the model shall run, or whose nodes it has.", *TARGETS),
    "matched": _flag("Whether anything was fused that was not before."),
    "already_fused": _count("FusedRouter nodes that the input held already."),
    "operators": _map("Every operator of either model.", _BEFORE_AFTER),
    "passes": _list(
        "In their order.",
        _object(
            "A pass.",
            {
                "name": _text("Its name."),
                "applied": _count("How often it changed something."),
                "seconds": _number("Wall time."),
            },
        ),
    ),
    "sites": _SITES,
    "experts": _ALL_EXPERTS,
    "conversions": _list("Of weights that were to be packed.", _ref("conversion", "Those of a layer.")),
    "findings": _FINDINGS,
    "verification": _or_null(_ref("verification", "The proof"), "not verified"),
    "warnings": _list("What the user should know.", _text("A sentence.")),
}

_REPORT_PARTS = {
    "site": _SITE,
    "experts": _EXPERTS,
    "conversion": _CONVERSION,
    "finding": _FINDING,
    "verification": _object("A verification.", {"schema": _version(VERIFY), **_VERIFICATION_KEYS}),
}

_INSPECTION = _object("One model.", {"schema": _version(INSPECT), **_INSPECTION_KEYS})

SCHEMAS: Mapping[str, Schema] = {
    "inspect": _document(
        "inspect", INSPECT, "What `ort-moe inspect MODEL --json` prints.", _INSPECTION_KEYS, layer=_LAYER
    ),
    "changes": _document(
        "changes",
        INSPECT,
        "What `ort-moe inspect MODEL OTHER --json` prints.",
        {
            "before": _ref("inspection", "The first model."),
            "after": _ref("inspection", "The second model."),
            "operators": _map("Operators of which the number of nodes changed.", _BEFORE_AFTER),
            "layers": _list("Layers that changed.", _count("Number of the layer, from 0.")),
        },
        inspection=_INSPECTION,
        layer=_LAYER,
    ),
    "explain": _document(
        "explain",
        EXPLAIN,
        "What `ort-moe explain MODEL --json` prints.",
        {"sites": _SITES, "experts": _ALL_EXPERTS, "findings": _FINDINGS},
        site=_SITE,
        experts=_EXPERTS,
        finding=_FINDING,
    ),
    "report": _document(
        "report",
        REPORT,
        "What `ort-moe optimize MODEL --report FILE.json` writes.",
        _REPORT_KEYS,
        **_REPORT_PARTS,
    ),
    "folder": _document(
        "folder",
        FOLDER,
        "What `ort-moe optimize FOLDER --report FILE.json` writes, of a model folder of onnxruntime-genai.",
        {
            "source": _text("Path of the input."),
            "output": _or_null(_text("Path of the output."), "nothing was written"),
            "target": _one_of("Where the models shall run, or whose nodes they have.", *TARGETS),
            "matched": _flag("Whether anything was fused in any model that was not before."),
            "models": _list("Each that genai_config.json names, in its order.", _ref("report", "Of one model.")),
            "library": _or_null(
                _text("Name of the copy of our library in the output."), "no model needs it, or nothing was written"
            ),
            "carried": _count("Files that are in the output as they were."),
            "warnings": _list("What the user should know of the folder.", _text("A sentence.")),
        },
        report=_object("A report.", {"schema": _version(REPORT), **_REPORT_KEYS}),
        **_REPORT_PARTS,
    ),
    "verify": _document("verify", VERIFY, "What `ort-moe verify REF OPT --json` prints.", _VERIFICATION_KEYS),
    "bench": _document(
        "bench",
        BENCH,
        "What `ort-moe bench IN --json` prints.",
        {
            "source": _text("Path of the model as given."),
            "provider": _text("Name of the execution provider."),
            "device": _text("What it ran on."),
            "onnxruntime": _text("Version of ONNX Runtime."),
            "steps": _count("Runs asked for at each number of tokens."),
            "past": _count("Tokens that went before, where the model's inputs hold a past."),
            "variants": _list("The model as given first.", _ref("variant", "A model.")),
        },
        variant=_VARIANT,
        timing=_TIMING,
    ),
    "doctor": _document(
        "doctor",
        DOCTOR,
        "What `ort-moe doctor --json` prints.",
        {
            "fit": _flag("Whether fused models run here."),
            "examinations": _list(
                "All that was looked at.",
                _object(
                    "One thing.",
                    {
                        "subject": _text("What."),
                        "status": _one_of("`note` is worth knowing and harmless.", "ok", "note", "unfit"),
                        "finding": _text("What was found; where unfit, what to do about it."),
                    },
                ),
            ),
        },
    ),
}
"""By the name of the document, which is that of its file."""
