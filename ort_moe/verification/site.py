"""One fused node of an optimised model: what it stands for in the original, and how it runs by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ort_moe.ops import DOMAIN, SCALED
from ort_moe.verification.runnable_model import Run, RunnableModel, open_session

if TYPE_CHECKING:
    import onnx_ir as ir

Status = Literal["passed", "failed", "skipped"]

MOST_ROWS_BY_BODY = 4
"""Rows for which a function body runs: it copies the matrices of every choice of each."""

RUNS_NOWHERE = "it has no function body, and our library is not there"
"""Why a node is skipped that has no way to run."""


@dataclass(frozen=True)
class SiteCheck:
    """The outcome for one node.

    Attributes:
        node: Its name.
        status: `skipped` where its values could not be found in the original.
        rows: Rows compared.
        near_ties: Of these, rows in which the original chose otherwise among experts too close to tell apart.
        difference: Largest difference of a router's weights or of the experts' rows, relative to the largest of them.
        detail: Why it failed or was skipped.
        what: What kind of node it is, in words.
        change: Of experts whose weights were packed: how far what they stand for makes rows, without a residual, differ
            from the original's, by norm, relative. `difference` is then held against what they stand for.
    """

    node: str
    status: Status
    rows: int = 0
    near_ties: int = 0
    difference: float = 0.0
    detail: str = ""
    what: str = "router"
    change: float | None = None


def names_in(model: ir.Model) -> set[str | None]:
    """Names of the values of the graph that a run can be asked for."""
    return {value.name for node in model.graph for value in node.outputs} | {v.name for v in model.graph.inputs}


def named_alike(value: ir.Value, known: set[str | None]) -> str | None:
    """Name of the value, or of one that it is cast to, that the original has too."""
    if value.name in known:
        return value.name
    for user in value.consumers():
        if user.op_type == "Cast" and (found := named_alike(user.outputs[0], known)) is not None:
            return found
    return None


def unscaled(node: ir.Node) -> tuple[str, float] | None:
    """Name of the weights of a router that took its experts' constant factor over, without it, and the factor."""
    factor, _, name = node.metadata_props.get(SCALED, "").partition(" ")
    return (name, float(factor)) if name else None


def has_body(node: ir.Node, model: ir.Model) -> bool:
    """Whether a node of ours comes with the function that runs where our library is not registered."""
    return node.op_identifier() in model.functions


def ways_to_run(node: ir.Node, model: ir.Model, libraries: Sequence[bool]) -> dict[bool, str]:
    """Of the ways asked for, those that the node has, in words.

    Args:
        node: Of the model.
        model: Which holds the function bodies.
        libraries: True: by our kernels; False: by its function body.
    """
    words = {True: "our kernel", False: "its function body"}
    return {with_library: words[with_library] for with_library in libraries if with_library or has_body(node, model)}


def run_alone(
    node: ir.Node,
    name: str,
    feed: Callable[[int, ir.Value], tuple[str, ir.DataType]],
    outputs: Mapping[str, ir.DataType],
    optimized: RunnableModel,
    with_library: bool,
) -> Run:
    """A session of a model that holds the node, its constants and its function, and nothing else.

    Args:
        node: Of the optimised model.
        name: How the user finds it.
        feed: Name and type under which an input is fed that is no constant, by its place and value.
        outputs: Names and types of what the node returns, the first ones of the op.
        optimized: Where the node, its constants and its function are taken from.
        with_library: Whether it runs by our kernels; else by its function body.
    """
    import onnx_ir as ir

    inputs: list[ir.Value | None] = []
    constants: dict[ir.Value, ir.Value] = {}
    fed: list[ir.Value] = []
    for place, value in enumerate(node.inputs):
        if value is None:
            inputs.append(None)
        elif value.const_value is None:
            fed_as, dtype = feed(place, value)
            fed.append(ir.Value(name=fed_as, type=ir.TensorType(dtype)))
            inputs.append(fed[-1])
        else:
            copy = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
            inputs.append(constants.setdefault(value, copy))
    returned = [ir.Value(name=output, type=ir.TensorType(dtype)) for output, dtype in outputs.items()]
    alone = ir.Node(
        DOMAIN, node.op_type, inputs, node.attributes.values(), overload=node.overload, outputs=returned, name=name
    )
    model = optimized.model
    graph = ir.Graph(
        fed, returned, nodes=[alone], initializers=[*constants.values()], opset_imports=model.opset_imports, name="site"
    )
    functions = [function for key, function in model.functions.items() if key == alone.op_identifier()]
    proto = ir.to_proto(ir.Model(graph, ir_version=model.ir_version, functions=functions))
    what = f"the node '{name}' by itself"
    return open_session(
        proto, what, with_library=with_library, data_folder=optimized.data_folder, sparing=optimized.is_large
    )
