"""Why a site was not, or only partly, fused: stable codes with a sentence and a way out.

`explain`, the report and the docs share this list. A code never changes its meaning; new ones are added at the end, and
each has a small graph that produces it in `docs/code_examples.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

_REPORT = "report it with the output of `ort-moe explain MODEL --json`, which holds the nodes around it and no weights"


@dataclass(frozen=True)
class Reason:
    """A stable code.

    Attributes:
        code: `OM` and three digits.
        slug: The code in words, as in `topk-not-a-router`.
        sentence: What it means.
        remedy: What the user can do about it; a finding may know better.
    """

    code: str
    slug: str
    sentence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.code} {self.slug}"


_ALL = (
    Reason(
        "OM001",
        "topk-not-a-router",
        "The indices of this TopK or ArgMax do not select experts.",
        "Nothing: sampling, classification and look-ups keep their TopK. Should it route to experts after all, "
        f"{_REPORT}.",
    ),
    Reason(
        "OM002",
        "topk-in-subgraph",
        "This choice is in a function that cannot be inlined, and functions are not rewritten.",
        "Give the functions and the model one version of each operator set, or export without functions.",
    ),
    Reason(
        "OM003",
        "expert-count-unknown",
        "The number of ranked elements is not fixed in the graph.",
        "Export with a fixed number of experts, or run shape inference on the model first.",
    ),
    Reason(
        "OM004",
        "topk-form",
        "This router makes its choice in a form that FusedRouter does not cover.",
        "Export the router with a TopK of the largest logits over the last axis and a constant k.",
    ),
    Reason(
        "OM005",
        "router-did-not-grow",
        "Nothing next to this router could be absorbed, so its TopK was kept.",
        "Nothing: a node that only ranks gains nothing from being replaced.",
    ),
    Reason(
        "OM006",
        "left-over-before",
        "Router arithmetic before the choice was not absorbed.",
        f"The model is right as it is. To have this arithmetic covered, {_REPORT}.",
    ),
    Reason(
        "OM007",
        "left-over-after",
        "Router arithmetic on the chosen weights was not absorbed.",
        f"The model is right as it is. To have this arithmetic covered, {_REPORT}.",
    ),
    Reason(
        "OM008",
        "rule-left-out",
        "The rule that makes a FusedRouter of this choice, or a FusedExperts of its experts, was switched off.",
        "Run again without --skip and --rules.",
    ),
    Reason(
        "OM009",
        "shape-inference-failed",
        "ONNX shape inference failed on this model, so rules that need types or shapes could not apply.",
        "Repair what the message names, or infer the shapes with another tool first.",
    ),
    Reason(
        "OM010",
        "read-by-others",
        "Another node, or an output of the model, reads a value that a fused node no longer computes.",
        "Export without what reads it, for example without router probabilities as outputs.",
    ),
    Reason(
        "OM011",
        "argmax-form",
        "This ArgMax selects an expert in a way that FusedRouter does not cover.",
        "Export the router with a TopK of its scores.",
    ),
    Reason(
        "OM012",
        "shared-normaliser",
        "The chosen weights are normalised together with others, such as those of shared experts.",
        "Nothing: FusedRouter normalises the chosen alone, so this step stays outside.",
    ),
    Reason(
        "OM013",
        "expert-loop-baked-in",
        "The model is right for its export's example input alone: the exporter wrote down which experts, or how many, "
        "that input chose.",
        "Export again without a loop over the experts that are hit: transformers' `experts_implementation` batched_mm "
        "or grouped_mm, not eager.",
    ),
    Reason(
        "OM014",
        "weights-as-inputs",
        "The experts' weights are also inputs of the graph, so that whoever runs the model may replace them.",
        "Export without keep_initializers_as_inputs=True.",
    ),
    Reason(
        "OM015",
        "experts-form",
        "What is computed with the chosen experts is not in a form that FusedExperts covers.",
        f"The model is right as it is. To have these experts covered, {_REPORT}.",
    ),
    Reason(
        "OM016",
        "experts-activation",
        "What stands between the two layers of the experts is no activation of FusedExperts.",
        f"The model is right as it is. To have this activation covered, {_REPORT}.",
    ),
    Reason(
        "OM017",
        "expert-weights-computed",
        "The experts' weights are no constants of the graph: they are computed, or fed, while the model runs.",
        "Export with the weights as constants, and fold what is computed of constants alone.",
    ),
    Reason(
        "OM018",
        "expert-weights-shared",
        "The experts' weights would have to be stored a second time, for something else reads them as they are.",
        "Nothing: two copies of the weights cost more than the fused experts gain.",
    ),
    Reason(
        "OM019",
        "experts-mismatch",
        "The experts do not belong to this choice: their number, or that of the choices of a token, is another.",
        "See that the router and the experts are of one layer, and of one configuration.",
    ),
    Reason(
        "OM020",
        "experts-in-subgraph",
        "This contrib node of experts is in a body of If, Loop or Scan, or in a function that cannot be inlined, where "
        "those are not rewritten.",
        "Export without control flow around the layer, and with one version of each operator set throughout.",
    ),
    Reason(
        "OM021",
        "contrib-layout",
        "How the weights of this contrib node lie cannot be told from the model.",
        "Build the model anew with weights in an order that it names: of onnxruntime-genai's builder, with "
        "`--extra_options qmoe_weights_prepacked=0`.",
    ),
    Reason(
        "OM022",
        "contrib-form",
        "FusedExperts does not compute what this contrib node does, or ONNX Runtime's own kernels disagree on it.",
        f"The model is right as it is. To have this node covered, {_REPORT}.",
    ),
    Reason(
        "OM023",
        "contrib-is-faster",
        "ONNX Runtime's own kernel for this contrib node is faster, or ours was not measured beside it.",
        "Nothing: the node stays as it is.",
    ),
    Reason(
        "OM024",
        "no-contrib-form",
        "For `--target contrib`: no contrib node computes this block in one way on every device.",
        "Use `--target cuda` or `--target cpu`, for which FusedRouter and FusedExperts are made.",
    ),
)

REASONS: dict[str, Reason] = {reason.slug: reason for reason in _ALL}
"""Every reason by its slug."""
