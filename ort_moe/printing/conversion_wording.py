"""What became of the experts' weights, in words, as a table and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ort_moe.printing.printable import byte_size, paragraph, table
from ort_moe.printing.wording import counted, some_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ort_moe.rewrites.conversion import Conversion


def conversion_to_dict(conversion: Conversion) -> dict[str, Any]:
    """The conversion of a FusedExperts as JSON-ready values."""
    return {
        "node": conversion.node,
        "packing": conversion.packing,
        "layers": [{**asdict(layer), "shape": list(layer.shape)} for layer in conversion.layers],
        "why_left": conversion.why_left,
    }


def conversion_lines(conversions: Sequence[Conversion]) -> list[RenderableType]:
    """What was packed and what it cost, in a line; and one for all layers that were left for one reason."""
    packed = [layer for each in conversions for layer in each.layers]
    lines: list[RenderableType] = []
    if packed:
        before, after = sum(layer.bytes_before for layer in packed), sum(layer.bytes_after for layer in packed)
        worst = max(layer.relative_error for layer in packed)
        count = sum(bool(each.layers) for each in conversions)
        lines.append(
            paragraph(
                f"weights of {counted(count, 'layer')} of experts packed to {conversions[0].packing}: "
                f"{byte_size(before)} to {byte_size(after)}, with an error of {worst:.1e} of their norm at most"
            )
        )
    left: dict[str, list[str]] = {}
    for each in conversions:
        if each.why_left:
            left.setdefault(each.why_left, []).append(each.node)
    for why, nodes in left.items():
        lines.append(paragraph(f"weights not packed: {why} ({some_of(nodes, 1)})", style="yellow"))
    return lines


def conversions_table(conversions: Sequence[Conversion]) -> RenderableType:
    """A row for each layer that was packed."""
    from rich.text import Text

    numbers = ("E", "N", "D", "before", "after", "largest error", "of", "error of the norm")
    listing = table("experts", "", *numbers, numbers=numbers)
    for each in conversions:
        for layer in each.layers:
            sizes = (*map(str, layer.shape), byte_size(layer.bytes_before), byte_size(layer.bytes_after))
            errors = (f"{layer.largest_error:.1e}", f"{layer.largest_weight:.1e}", f"{layer.relative_error:.1e}")
            listing.add_row(Text(each.node), layer.layer, *sizes, *errors)
    return listing
