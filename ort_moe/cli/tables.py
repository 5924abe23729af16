"""`ort-moe ops` and `ort-moe rules`: the two tables that everything is derived from, readable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import typer

from ort_moe.cli.console import show
from ort_moe.ops import DOMAIN, OPS, VERSION, Attribute, Op, Tensor

Row = TypeVar("Row")


def ops(name: Annotated[str | None, typer.Argument(metavar="NAME", help="One operator, in full.")] = None) -> None:
    """List the operators, or show one."""
    from ort_moe.printing.printable import table

    if name is not None:
        _print_op(_find(OPS, name, "operator"))
        return
    listing = table("operator", "what it does", prose=("what it does",), title=f"Domain {DOMAIN}, version {VERSION}")
    for op in OPS.values():
        listing.add_row(op.name, _plain(op.doc.split("\n\n")[0]))
    show(listing)


def rules(name: Annotated[str | None, typer.Argument(metavar="NAME", help="One rule, in full.")] = None) -> None:
    """List the rewrite rules, or show one."""
    from rich.text import Text

    from ort_moe.printing.printable import table
    from ort_moe.rewrites import RULES

    if name is not None:
        rule = _find(RULES, name, "rule")
        show(Text(f"{rule.name}\n{rule.identity}\n\n{rule.doc.strip()}"))
        return
    listing = table("rule", "identity", prose=("identity",))
    for rule in RULES.values():
        listing.add_row(rule.name, _plain(rule.identity))
    show(listing)


def _find(rows: Mapping[str, Row], name: str, what: str) -> Row:
    if name not in rows:
        raise typer.BadParameter(f"there is no {what} '{name}'; there are {', '.join(rows)}", param_hint="NAME")
    return rows[name]


def _print_op(op: Op) -> None:
    from rich.markdown import Markdown
    from rich.text import Text

    from ort_moe.printing.printable import table

    show(Text(f"{DOMAIN}::{op.name}, version {VERSION}\n", style="bold"))
    show(Markdown(op.doc))
    show(Text())
    for title, tensors in (("Inputs", op.inputs), ("Outputs", op.outputs)):
        listing = table("name", "types", "shape", "", prose=("types", ""), title=title)
        for tensor in tensors:
            listing.add_row(*_tensor_row(tensor))
        show(listing)
    if not op.attributes:
        return
    listing = table(
        *("name", "type", "neutral", "values", ""),
        prose=("values", ""),
        title="Attributes (a node states every one)",
    )
    for attribute in op.attributes:
        listing.add_row(*_attribute_row(attribute))
    show(listing)


def _tensor_row(tensor: Tensor) -> tuple[str, ...]:
    optional = " (optional)" if tensor.optional else ""
    return tensor.name + optional, ", ".join(tensor.types), tensor.shape, _plain(tensor.doc)


def _attribute_row(attribute: Attribute) -> tuple[str, ...]:
    neutral = "" if attribute.neutral is None else str(attribute.neutral)
    only = f" Only with {attribute.only_with[0]} = {attribute.only_with[1]}." if attribute.only_with else ""
    return attribute.name, attribute.kind, neutral, ", ".join(map(str, attribute.choices)), _plain(attribute.doc + only)


def _plain(text: str) -> str:
    """Text in which rich sees no markup: `[E]` is a shape, not a style."""
    from rich.markup import escape

    return escape(text)
