"""Why a site was not, or only partly, fused: stable codes with a sentence and a way out.

`explain`, the report and the docs share this list. A code never changes its meaning; new ones are added at the end.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """A stable code.

    Attributes:
        code: `OM` and three digits.
        slug: The code in words, as in `topk-not-a-router`.
        sentence: What it means.
        remedy: What the user can do about it.
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
        "The indices of this TopK do not select experts.",
        "Nothing to do: sampling, classification and look-ups keep their TopK.",
    ),
    Reason(
        "OM002",
        "topk-in-subgraph",
        "This TopK is in a subgraph or a function, and only the main graph is rewritten.",
        "Inline the functions, or export without control flow around the MoE blocks.",
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
        "The TopK of this router has a form that FusedRouter does not cover.",
        "Export the router with a TopK of the largest logits over the last axis and a constant k.",
    ),
    Reason(
        "OM005",
        "router-did-not-grow",
        "Nothing next to this router could be absorbed, so its TopK was kept.",
        "See the other findings of the site; a node that only ranks gains nothing from being replaced.",
    ),
    Reason(
        "OM006",
        "left-over-before",
        "Router arithmetic before the choice was not absorbed.",
        "The site is right as it is; report the router's formula if you want it to be covered.",
    ),
    Reason(
        "OM007",
        "left-over-after",
        "Router arithmetic on the chosen weights was not absorbed.",
        "Where other nodes read the value in between, export without them, for example without router outputs.",
    ),
    Reason(
        "OM008",
        "rule-refused",
        "A rule matched, but its identity does not hold here.",
        "Nothing to do: the graph means something else than the rule's formula.",
    ),
    Reason(
        "OM009",
        "shape-inference-failed",
        "ONNX shape inference failed on this model, so rules that need types or shapes could not apply.",
        "Repair what the message names, or infer the shapes with another tool first.",
    ),
)

REASONS: dict[str, Reason] = {reason.slug: reason for reason in _ALL}
"""Every reason by its slug."""
