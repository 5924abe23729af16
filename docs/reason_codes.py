"""The page of reason codes, from their table and an example of each."""

from __future__ import annotations

from docs.code_examples import EXAMPLES
from ort_moe.reasons import REASONS, Reason

_HEADER = """\
# Reason codes

<!-- Generated from ort_moe/reasons.py and docs/code_examples.py by `make docs`; edit them instead. -->

`ort-moe explain MODEL` and the report of `ort-moe optimize` name one of these wherever a router was left alone or only
partly fused, or its experts were left. A code never changes its meaning. Each comes with a small model that produces
it, in ONNX's text form; what is declared in it without a number is a weight.
"""


def reason_codes() -> str:
    """The page of reason codes, in Markdown."""
    return "\n".join([_HEADER, *(_reason_section(reason) for reason in REASONS.values())])


def _reason_section(reason: Reason) -> str:
    example = EXAMPLES[reason.slug]
    return (
        f"## {reason}\n\n{reason.sentence}\n\n**What to do:** {reason.remedy}\n\n"
        f"An example. {example.about}\n\n```text\n{example.text}\n```\n"
    )
