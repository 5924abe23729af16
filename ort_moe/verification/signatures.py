"""Whether two models have the same inputs and outputs, without which they cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ort_moe.errors import ModelError

if TYPE_CHECKING:
    import onnx_ir as ir


def check_signatures(original: ir.Model, candidate: ir.Model) -> None:
    """Looks whether the two can be fed the same.

    Raises:
        ModelError: Their inputs or outputs differ in names, order, types or fixed lengths.
    """
    import onnx_ir as ir

    for what, ours, theirs in (
        ("inputs", original.graph.inputs, candidate.graph.inputs),
        ("outputs", original.graph.outputs, candidate.graph.outputs),
    ):
        a, b = ([value.name for value in values] for values in (ours, theirs))
        if a != b:
            raise ModelError(f"the models cannot be compared: {_names_apart(what, a, b)}")
        for value, other in zip(ours, theirs, strict=True):
            if value.type is not None and not isinstance(value.type, ir.TensorType):
                raise ModelError(f"the models cannot be compared: '{value.name}' is {value.type}, expected a tensor")
            if not _agree(value, other):
                raise ModelError(
                    f"the models cannot be compared: '{value.name}' is {value.type}{value.shape} in the original, "
                    f"{other.type}{other.shape} in the other"
                )


def _names_apart(what: str, ours: Sequence[str | None], theirs: Sequence[str | None], most: int = 5) -> str:
    """In what two lists of names of inputs or outputs differ."""
    clauses = []
    for who, names, others in (("the original", ours, theirs), ("the other", theirs, ours)):
        alone = [f"'{name}'" for name in names if name not in others]
        if alone:
            shown = ", ".join(alone[:most]) + (", ..." if len(alone) > most else "")
            clauses.append(f"{who} alone has the {what} {shown}")
    return ", ".join(clauses) or f"their {what} are in another order"


def _agree(value: ir.Value, other: ir.Value) -> bool:
    """Whether both have one type, and one length wherever both lengths are fixed."""
    if value.dtype != other.dtype and None not in (value.dtype, other.dtype):
        return False
    if value.shape is None or other.shape is None:
        return True
    pairs = zip(value.shape, other.shape, strict=False)
    fixed = [(a, b) for a, b in pairs if isinstance(a, int) and isinstance(b, int)]
    return value.shape.rank() == other.shape.rank() and all(a == b for a, b in fixed)
