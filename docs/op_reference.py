"""The op reference, from the table of ops."""

from __future__ import annotations

from docs.markdown_table import markdown_table
from ort_moe.ops import DOMAIN, OPS, VERSION, Attribute, Op, Tensor

_HEADER = f"""\
# Ops

<!-- Generated from ort_moe/ops/table.py and training_rows.py by `make docs`; edit their rows instead. -->

Every op lives in the domain `{DOMAIN}`, version {VERSION}, and has a kernel for the CPU. On a node every attribute must
be written out, because ONNX Runtime reads a misspelt optional attribute as absent; the last column is the value that
changes nothing.
"""


def op_reference() -> str:
    """The op reference, in Markdown."""
    return "\n".join([_HEADER, *(op_section(op) for op in OPS.values())])


def op_section(op: Op) -> str:
    """The section of one op, in Markdown."""
    parts = [
        f"## {op.name}\n",
        f"{op.doc}\n",
        "### Inputs\n",
        markdown_table(("input", "type", "shape", ""), map(_tensor_row, op.inputs)),
        "### Outputs\n",
        markdown_table(("output", "type", "shape", ""), map(_tensor_row, op.outputs)),
    ]
    if op.attributes:
        rows = map(_attribute_row, op.attributes)
        parts += ["### Attributes\n", markdown_table(("attribute", "kind", "", "neutral"), rows)]
    return "\n".join(parts)


def _tensor_row(tensor: Tensor) -> tuple[str, ...]:
    doc = f"Optional. {tensor.doc}" if tensor.optional else tensor.doc
    return f"`{tensor.name}`", ", ".join(tensor.types), f"`{tensor.shape}`", doc


def _attribute_row(attribute: Attribute) -> tuple[str, ...]:
    doc = attribute.doc
    if attribute.choices:
        doc += f" One of {', '.join(f'`{choice}`' for choice in attribute.choices)}."
    if attribute.only_with:
        doc += " Only with `{} = {}`.".format(*attribute.only_with)
    neutral = "to be chosen" if attribute.neutral is None else f"`{attribute.neutral}`"
    return f"`{attribute.name}`", attribute.kind, doc, neutral
