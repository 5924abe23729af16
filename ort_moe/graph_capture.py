"""What keeps a model out of a CUDA graph: nodes that need the host between two kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

_CONTROL_FLOW = {"If", "Loop", "Scan"}
_OUTPUT_SIZE_FROM_DATA = {"NonZero", "Compress", "Unique", "NonMaxSuppression"}
_NO_CUDA_KERNEL = {
    *("AffineGrid", "BitShift", "Celu", "Col2Im", "DFT", "Det", "Hardmax", "MelWeightMatrix", "Multinomial", "STFT"),
    *("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
}
"""Standard operators without a kernel in ORT's CUDA provider; ORT copies to the host and back around them."""

_SIZE_OPERANDS = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "OneHot": (1,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Slice": (1, 2),
    "Split": (1,),
    "Tile": (1,),
    "TopK": (1,),
}
"""Inputs that decide the size of the output."""


@dataclass(frozen=True)
class CaptureBlocker:
    """A node that cannot be captured.

    Attributes:
        node: Its name.
        operator: Its type.
        why: In a few words.
    """

    node: str
    operator: str
    why: str


def capture_blockers(graph: ir.Graph) -> Iterator[CaptureBlocker]:
    """The nodes of the graph and its subgraphs that cannot be captured in a CUDA graph."""
    known: dict[ir.Value, bool] = {}
    for node in graph.all_nodes():
        if node.domain not in ("", "ai.onnx"):
            continue
        why = None
        if node.op_type in _CONTROL_FLOW:
            why = "control flow"
        elif node.op_type in _OUTPUT_SIZE_FROM_DATA:
            why = "the size of its output depends on data"
        elif node.op_type in _NO_CUDA_KERNEL:
            why = "no CUDA kernel"
        else:
            operands = (node.inputs[i] for i in _SIZE_OPERANDS.get(node.op_type, ()) if i < len(node.inputs))
            if any(value is not None and _depends_on_data(value, known) for value in operands):
                why = "the size of its output depends on data"
        if why is not None:
            yield CaptureBlocker(node.name or "", node.op_type, why)


def _depends_on_data(value: ir.Value, known: dict[ir.Value, bool]) -> bool:
    """Whether a value follows from more than constants and shapes; iterative, for graphs are deep."""
    stack = [value]
    while stack:
        top = stack[-1]
        if top in known:
            stack.pop()
            continue
        producer = top.producer()
        if producer is None:
            known[top] = top.const_value is None
            continue
        if producer.op_type in ("Shape", "Size", "Constant"):
            known[top] = False
            continue
        inputs = [v for v in producer.inputs if v is not None]
        unknown = [v for v in inputs if v not in known]
        if unknown:
            stack += unknown
        else:
            known[top] = any(known[v] for v in inputs)
    return known[value]
