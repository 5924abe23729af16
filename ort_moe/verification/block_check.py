"""The check of a whole MoE block that a contrib node computes in one of two models: rows and logits in, rows out.

The routing is inside the contrib node, so what stands for it in the other model is held against it as a whole: the
nodes between values of the original, alone, on the original's own values.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ort_moe.errors import ModelError
from ort_moe.graphs.node_kinds import is_contrib_moe
from ort_moe.graphs.operators import integer_attribute
from ort_moe.verification.packed_reference import is_converted
from ort_moe.verification.runnable_model import Run, RunnableModel, open_session
from ort_moe.verification.site import MOST_ROWS_BY_BODY, RUNS_NOWHERE, SiteCheck, has_body, names_in
from ort_moe.verification.tolerance import Tolerance, as_rows, coarsest, near_tied, told

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

WHAT = "contrib block"

_BY_BODIES = "their function bodies"

_MOST_NODES = 64
"""Nodes that stand for a contrib node: a router before it grew, and its experts, take a dozen."""


@dataclass(frozen=True)
class BlockSite:
    """A block that one of the models computes by a contrib node.

    Attributes:
        name: How the user finds it.
        nodes: The nodes of the optimised model that compute it, in order.
        fed: Names of the original's values that they read.
        returned: Name of what they return, in both models.
        ranked: Name of the logits that the contrib node ranks, in the original.
        k: Choices of a token.
        tolerance: What may differ, with the same weights.
        contrib: Name of what the contrib node returns.
        packed: Of the nodes, the FusedExperts whose weights were packed, and the contrib node's are not.
    """

    name: str
    nodes: tuple[ir.Node, ...]
    fed: tuple[str, ...]
    returned: str
    ranked: str
    k: int
    tolerance: Tolerance
    contrib: str
    packed: tuple[ir.Node, ...] = ()

    @property
    def values(self) -> tuple[str, ...]:
        """The values that the check needs."""
        return (*self.fed, self.ranked, self.returned)

    def near_ties(self, values: Mapping[str, Any], tie: float | None = None) -> Any:
        """For each row, whether its logits leave open which experts it chooses.

        Args:
            values: The original's, by name.
            tie: As `Tolerance` has it; None: of equal logits in both models, whose type alone then counts.
        """
        logits = values[self.ranked]
        tie = coarsest({str(logits.dtype)}).tie if tie is None else tie
        return near_tied(as_rows(logits), self.k, tie)


def find_blocks(original: ir.Model, optimized: ir.Model) -> list[BlockSite | SiteCheck]:
    """The blocks that one model alone computes by a contrib node; a skipped check where one cannot be looked at."""
    known = names_in(original)
    made = {value.name: value for node in optimized.graph for value in node.outputs}
    before = {node.outputs[0].name: node for node in original.graph if is_contrib_moe(node)}
    after = {node.outputs[0].name: node for node in optimized.graph if is_contrib_moe(node)}
    sites: list[BlockSite | SiteCheck] = []
    for name, node in {**after, **before}.items():
        if name in before and name in after:
            continue
        behind = _first_among(node.outputs[0], made if name in before else known)
        site = None if behind is None else _site(node, made[behind.name], known)
        if site is None:
            detail = f"its output '{name}' is not a value of both models"
            sites.append(SiteCheck(node.name or "", "skipped", detail=detail, what=WHAT))
        else:
            sites.append(site)
    return sites


def _first_among(value: ir.Value, names: Container[str | None]) -> ir.Value | None:
    """The value, or the first that alone is made of it, such as a sum, whose name is among these."""
    while value.name not in names:
        users = value.consumers()
        if len(users) != 1 or value.is_graph_output():
            return None
        value = users[0].outputs[0]
    return value


def _site(contrib: ir.Node, result: ir.Value | None, known: set[str | None]) -> BlockSite | None:
    nodes, fed = _between(result, known)
    ranked = contrib.inputs[1] if len(contrib.inputs) > 1 else None
    while ranked is not None and ranked.name not in known:  # behind a view or a cast that the rewrite put there
        before = ranked.producer()
        ranked = None if before is None or before.op_type not in ("Cast", "Reshape") else before.inputs[0]
    if result is None or not nodes or ranked is None:
        return None
    k = max(integer_attribute(contrib, "k", 1), 1)
    return BlockSite(
        contrib.name or result.name or "",
        nodes,
        fed,
        result.name or "",
        ranked.name or "",
        k,
        contrib_tolerance([contrib]),
        contrib.outputs[0].name or "",
        tuple(node for node in nodes if is_converted(node)),
    )


def _between(result: ir.Value | None, known: set[str | None]) -> tuple[tuple[ir.Node, ...], tuple[str, ...]]:
    """The nodes that make a value of those that the original has, in order, and the names of these; none if many."""
    nodes: dict[ir.Node, None] = {}
    fed: dict[str, None] = {}

    def visit(value: ir.Value | None) -> bool:
        producer = None if value is None else value.producer()
        if value is None or value.const_value is not None or producer in nodes:
            return True
        if (value is not result and value.name in known) or producer is None:
            fed[value.name or ""] = None
            return value.name in known
        if len(nodes) >= _MOST_NODES or not all(map(visit, producer.inputs)):
            return False
        nodes[producer] = None
        return True

    return (tuple(nodes), tuple(fed)) if visit(result) else ((), ())


def contrib_tolerance(nodes: Iterable[ir.Node]) -> Tolerance:
    """What contrib nodes allow: ONNX Runtime's kernels of quantised experts compute in less than float32."""
    found: set[str] = set()
    for node in nodes:
        if node.op_type == "QMoE":
            return coarsest({"bfloat16"})
        for value in (*node.inputs, *node.outputs):
            if value is not None and value.dtype is not None:
                found.add(value.dtype.name.lower())
    return coarsest(found)


def check_block(
    site: BlockSite, captured: Sequence[Mapping[str, Any]], optimized: RunnableModel, libraries: tuple[bool, ...]
) -> SiteCheck:
    """Feeds the original's values to the nodes alone and compares what they return.

    Args:
        site: The site.
        captured: The original's values by name, of one run after another.
        optimized: Where the nodes and their function bodies are taken from.
        libraries: For each, the nodes run: True by our kernels, False by their function bodies, if they have them.
    """
    ways = ways_of(site.nodes, optimized.model, libraries)
    if not ways:
        return SiteCheck(site.name, "skipped", detail=RUNS_NOWHERE, what=WHAT)
    rows, ties, largest = 0, 0, 0.0
    for with_library, how in ways.items():
        rows, ties = 0, 0
        run: Run | None = None
        for values in captured:
            most = MOST_ROWS_BY_BODY if how == _BY_BODIES else None
            feeds, expected, tied = call(site, values, most)
            try:
                returned = {site.returned: expected.dtype}
                run = run or run_nodes(site.name, site.nodes, returned, feeds, optimized, with_library)
                got = run(feeds)[site.returned]
            except ModelError as error:
                return SiteCheck(site.name, "failed", rows, ties, largest, f"by {how}: {error}", WHAT)
            difference, other = difference_of_rows(got, expected, tied, site.tolerance.experts)
            largest, rows, ties = max(largest, difference), rows + len(tied), ties + int(other.sum())
            if difference > site.tolerance.experts:
                detail = (
                    f"by {how}: rows differ by {difference:.1e} of the largest magnitude "
                    f"(allowed {told(site.tolerance.experts)})"
                )
                return SiteCheck(site.name, "failed", rows, ties, difference, detail, WHAT)
        if rows and ties == rows:
            detail = f"by {how}: each row is near a tie and comes out otherwise"
            return SiteCheck(site.name, "skipped", rows, ties, detail=detail, what=WHAT)
    return SiteCheck(site.name, "passed", rows, ties, largest, "", WHAT)


def ways_of(nodes: Sequence[ir.Node], model: ir.Model, libraries: Sequence[bool]) -> dict[bool, str]:
    """Of the ways to run our nodes that are asked for, those that all of them have, in words.

    Args:
        nodes: Of the model; where none is ours, they run without our library.
        model: Which holds the function bodies.
        libraries: True: by our kernels; False: by their function bodies.
    """
    from ort_moe.ops import DOMAIN

    ours = [node for node in nodes if node.domain == DOMAIN]
    if not ours:
        return {False: "ONNX Runtime's own kernel"}
    words = {True: "our kernels", False: _BY_BODIES}
    with_bodies = all(has_body(node, model) for node in ours)
    return {with_library: words[with_library] for with_library in libraries if with_library or with_bodies}


def difference_of_rows(got: Any, expected: Any, tied: Any, tolerance: float) -> tuple[float, Any]:
    """Largest difference of rows that are not near a tie, and which of the others differ."""
    import numpy as np

    if got.size != expected.size:
        return float("inf"), np.zeros_like(tied)
    if not expected.size:  # of no rows, or rows of nothing
        return 0.0, np.zeros_like(tied)
    a, b = (array.reshape(len(tied), -1).astype(np.float64) for array in (got, expected))
    finite = np.isfinite(b)
    scale = float(np.abs(b[finite]).max()) if finite.any() else 0.0
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b)) / (scale or 1.0)
    by_row = np.nan_to_num(apart, nan=np.inf).max(axis=-1)
    other = tied & (by_row > tolerance)
    return float(by_row[~other].max(initial=0.0)), other


def call(site: BlockSite, values: Mapping[str, Any], most: int | None) -> tuple[dict[str, Any], Any, Any]:
    """What the nodes are fed, what they should return, and which rows are near a tie.

    No more rows than `most`, where every value has as many rows: the first axes are tokens.
    """
    import numpy as np

    feeds = {name: values[name] for name in site.fed}
    expected = values[site.returned]
    tied = site.near_ties(values)
    if most is not None and len(tied) > most:
        shaped = {name: array.reshape(len(tied), -1) for name, array in feeds.items() if array.size % len(tied) == 0}
        if len(shaped) == len(feeds):
            # As many axes as before: a batch of one where there were several.
            feeds = {
                name: array[:most].reshape(*[1] * (feeds[name].ndim - 2), most, array.shape[-1])
                for name, array in shaped.items()
            }
            expected = expected.reshape(len(tied), -1)[:most]
            tied = tied[:most]
    return {name: np.ascontiguousarray(array) for name, array in feeds.items()}, expected, tied


def run_nodes(
    name: str,
    alone: Sequence[ir.Node],
    returned: Mapping[str, np.dtype[Any]],
    feeds: Mapping[str, Any],
    optimized: RunnableModel,
    with_library: bool,
) -> Run:
    """A session of a model that holds the nodes, their constants and functions, and nothing else.

    Args:
        name: How the user finds them.
        alone: Nodes of the optimised model, in order.
        returned: NumPy type of each value that they return, by its name.
        feeds: What they are fed.
        optimized: Where the nodes, their constants and their functions are taken from.
        with_library: Whether they run by our kernels; else by their function bodies.
    """
    import onnx_ir as ir

    model = optimized.model
    inputs = {fed: ir.Value(name=fed, type=ir.TensorType(ir.DataType.from_numpy(a.dtype))) for fed, a in feeds.items()}
    values: dict[ir.Value, ir.Value] = {}
    nodes: list[ir.Node] = []
    constants: list[ir.Value] = []

    def value_of(value: ir.Value | None) -> ir.Value | None:
        if value is None:
            return None
        if value not in values and value.const_value is not None:
            values[value] = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
            constants.append(values[value])
        return values[value] if value in values else inputs[value.name or ""]

    for node in alone:
        copy = ir.Node(
            node.domain,
            node.op_type,
            [value_of(value) for value in node.inputs],
            node.attributes.values(),
            overload=node.overload,
            outputs=[ir.Value(name=value.name, type=value.type) for value in node.outputs],
            name=node.name,
        )
        values.update(zip(node.outputs, copy.outputs, strict=True))
        nodes.append(copy)
    outputs = [value for node in nodes for value in node.outputs if value.name in returned]
    for value in outputs:
        value.type = ir.TensorType(ir.DataType.from_numpy(returned[value.name or ""]))
    used = {node.op_identifier() for node in nodes}
    functions = [function for key, function in model.functions.items() if key in used]
    graph = ir.Graph(
        [*inputs.values()],
        outputs,
        nodes=nodes,
        initializers=constants,
        opset_imports=model.opset_imports,
        name="site",
    )
    proto = ir.to_proto(ir.Model(graph, ir_version=model.ir_version, functions=functions))
    return open_session(
        proto,
        f"the block '{name}' by itself",
        with_library=with_library,
        data_folder=optimized.data_folder,
        sparing=optimized.is_large,
    )
