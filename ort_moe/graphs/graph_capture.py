"""What keeps a model out of a CUDA graph: nodes that need the host between two kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ort_moe.printing.wording import some_of

if TYPE_CHECKING:
    import onnx_ir as ir

_CONTROL_FLOW = {"If", "Loop", "Scan"}
_OUTPUT_SIZE_FROM_DATA = {"NonZero", "Compress", "Unique", "NonMaxSuppression"}
_NO_CUDA_KERNEL = {
    *("AffineGrid", "BitShift", "Celu", "Col2Im", "DFT", "Det", "Hardmax", "MelWeightMatrix", "Multinomial", "STFT"),
    *("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
}
"""Standard operators without a kernel in ORT's CUDA provider; ORT copies to the host and back around them."""

_OF_SHAPES = ("Shape", "Size")
"""What they return does not depend on the data that they are given."""

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


def off_device(graph: ir.Graph, on_cpu: Iterable[tuple[str, str]]) -> Iterator[CaptureBlocker]:
    """Those of the nodes that run on the CPU that take values from the device, or that the graph does not know.

    ONNX Runtime lets nodes that compute shapes run on the CPU beside a captured graph; those come from no data.

    Args:
        graph: Of the model.
        on_cpu: Name and operator of each node that ONNX Runtime gives to the CPU provider.
    """
    known: dict[ir.Value, bool] = {}
    nodes = {node.name: node for node in graph.all_nodes() if node.name}
    for name, operator in on_cpu:
        node = nodes.get(name)
        if node is None or (
            operator not in _OF_SHAPES
            and any(_depends_on_data(value, known) for value in node.inputs if value is not None)
        ):
            yield CaptureBlocker(name, operator, "it runs on the CPU")


def summary(blockers: Iterable[CaptureBlocker]) -> list[str]:
    """`If (control flow): branch, other and 3 more`, one text for each operator and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for blocker in blockers:
        groups.setdefault((blocker.operator, blocker.why), []).append(blocker.node or "(no name)")
    return [f"{operator} ({why}): {some_of(nodes, 4)}" for (operator, why), nodes in groups.items()]


def in_words(blockers: Iterable[CaptureBlocker]) -> str:
    """The summary on one line; empty where there are none."""
    return "; ".join(summary(blockers))


def refusal(what: str, blockers: Iterable[CaptureBlocker]) -> str:
    """That something cannot be captured for these nodes; empty where there are none."""
    told = in_words(blockers)
    return f"{what} cannot be captured in a CUDA graph, in the way are {told}" if told else ""


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
        if producer.op_type in _OF_SHAPES or producer.op_type == "Constant":
            known[top] = False
            continue
        inputs = [v for v in producer.inputs if v is not None]
        unknown = [v for v in inputs if v not in known]
        if unknown:
            stack += unknown
        else:
            known[top] = any(known[v] for v in inputs)
    return known[value]
