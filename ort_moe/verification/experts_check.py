"""The check of one FusedExperts: the original's own rows and routing in, and what its experts returned out?

Where its weights were packed, it must return what the packed weights stand for. That may differ from the original as
far as the format allows, and no packed weight may be further from its own than rounding takes it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ort_moe.errors import ModelError
from ort_moe.graphs.node_kinds import experts_inputs, is_experts
from ort_moe.ops import FUSED_EXPERTS
from ort_moe.verification.packed_reference import distance, from_original, meant, packed_since
from ort_moe.verification.packed_weights import Weights, strays
from ort_moe.verification.runnable_model import Run, RunnableModel
from ort_moe.verification.site import (
    MOST_ROWS_BY_BODY,
    RUNS_NOWHERE,
    SiteCheck,
    named_alike,
    names_in,
    run_alone,
    unscaled,
    ways_to_run,
)
from ort_moe.verification.tolerance import as_rows, coarsest, relative_difference, told

if TYPE_CHECKING:
    import onnx_ir as ir

WHAT = "layer of experts"

_FED = ("x", "weights", "indices")
MOST_ROWS_AS_MEANT = 8
"""Rows of a run for which packed weights are unpacked here."""


@dataclass(frozen=True)
class FusedExpertsSite:
    """A FusedExperts and the values of the original that it stands for.

    Attributes:
        node: The node in the optimised model.
        fed: Name in the original of each input that is no constant, by the input's name in the op table; the node may
            have it in another type, or as another view.
        returned: Name of what it returns, perhaps as another view, in both models.
        factor: What its weights are to the original's: what that multiplies the experts' results with.
        is_packed: Whether its weights were packed, and the original's are not.
        weights: What was packed; None where that is not known.
    """

    node: ir.Node
    fed: Mapping[str, str]
    returned: str
    factor: float = 1.0
    is_packed: bool = False
    weights: Weights | None = None

    @property
    def name(self) -> str:
        """How the user finds it."""
        return self.node.name or self.returned

    @property
    def values(self) -> tuple[str, ...]:
        """The values that the check needs."""
        return (*self.fed.values(), self.returned)


def find_experts(
    original: ir.Model, optimized: ir.Model, without: Collection[ir.Node] = ()
) -> list[FusedExpertsSite | SiteCheck]:
    """The nodes in graph order; a skipped check in place of those whose values have not kept their names.

    Args:
        original: The original.
        optimized: What came of it.
        without: Nodes that are looked at elsewhere.
    """
    known, packed = names_in(original), packed_since(original, optimized)
    sites: list[FusedExpertsSite | SiteCheck] = []
    for node in optimized.graph.all_nodes():
        if is_experts(node) and node not in without:
            site = _site(node, known, optimized.graph)
            if isinstance(site, str):
                sites.append(SiteCheck(node.name or "", "skipped", detail=site, what=WHAT))
            else:
                sites.append(replace(site, is_packed=node in packed))
    return sites


def _site(node: ir.Node, known: set[str | None], graph: ir.Graph) -> FusedExpertsSite | str:
    """The site, or why there is none."""
    if node.graph is not graph:
        return "it lies in a subgraph, whose values cannot be looked at"
    fed: dict[str, str] = {}
    factor = 1.0
    for name, value in experts_inputs(node).items():
        if value.const_value is not None:
            continue
        if name not in _FED and name != "residual":
            return f"its input '{name}' is computed by the model"
        source = _named_before(value, known) or named_alike(value, known)
        if source is None and name == "weights" and (scaled := _unscaled(value)) is not None:
            source, factor = scaled
        if source is None:
            return f"its input '{value.name}' is not a value of the original"
        fed[name] = source
    returned = named_behind(node.outputs[0], known)
    if returned is None:
        return f"its output '{node.outputs[0].name}' is not a value of the original"
    return FusedExpertsSite(node, fed, returned, factor)


def named_behind(value: ir.Value, known: Container[str | None]) -> str | None:
    """Name of the value, or of the one view or cast of it, that the original has too."""
    while value.name not in known:
        users = value.consumers()
        if len(users) != 1 or users[0].op_type not in ("Cast", "Reshape", "Unsqueeze", "Squeeze"):
            return None
        value = users[0].outputs[0]
    return value.name


def _unscaled(value: ir.Value | None) -> tuple[str, float] | None:
    """Of weights, perhaps as another view, that a router scales for its experts: the name without that, and by what."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in ("Cast", "Reshape"):
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return None if node is None else unscaled(node)


def _named_before(value: ir.Value | None, known: set[str | None]) -> str | None:
    """Name of the value, or of one that it is a cast or a view of, that the original has too."""
    while value is not None:
        if value.name in known:
            return value.name
        producer = value.producer()
        if producer is None or producer.op_type not in ("Cast", "Reshape"):
            return None
        value = producer.inputs[0]
    return None


def check_experts(
    site: FusedExpertsSite, captured: Sequence[Mapping[str, Any]], optimized: RunnableModel, libraries: tuple[bool, ...]
) -> SiteCheck:
    """Feeds the original's rows, weights and indices to the node alone and compares what it returns.

    Args:
        site: The site.
        captured: The original's values by name, of one run after another.
        optimized: Where the node and its function body are taken from.
        libraries: For each, the node runs: True by our kernels, False by its function body, if it has one.
    """
    ways = ways_to_run(site.node, optimized.model, libraries)
    if not ways:
        return SiteCheck(site.name, "skipped", detail=RUNS_NOWHERE, what=WHAT)
    change: float | None = None
    calls = [call_of_experts(site, values, MOST_ROWS_AS_MEANT if site.is_packed else None) for values in captured]
    types = [
        {str(y.dtype), str(values[site.fed["weights"]].dtype)} for (_, y), values in zip(calls, captured, strict=True)
    ]
    if site.is_packed:
        # What packing the weights did is held to a limit of its own; what is made of them, to the usual one.
        as_meant = [(feeds, meant(site.node, feeds)) for feeds, _ in calls]
        change = _change(
            [(y, original, feeds.get("residual")) for (feeds, y), (_, original) in zip(as_meant, calls, strict=True)]
        )
        calls, allowed = as_meant, from_original(site.node)
        if not change <= allowed:
            detail = (
                f"its weights were packed, which changes its rows by {change:.1e} of their norm "
                f"(allowed {told(allowed)})"
            )
            return SiteCheck(site.name, "failed", detail=detail, what=WHAT, change=change)
        if site.weights is not None:
            chosen = sorted({int(expert) for feeds, _ in calls for expert in feeds["indices"].reshape(-1)})
            if detail := strays(site.node, site.weights, chosen):
                return SiteCheck(site.name, "failed", detail=detail, what=WHAT, change=change)
    rows, largest = 0, 0.0
    for with_library, how in ways.items():
        rows = 0
        run: Run | None = None
        for (fed, returned), dtypes in zip(calls, types, strict=True):
            most = None if with_library else MOST_ROWS_BY_BODY
            feeds, expected = {name: array[:most] for name, array in fed.items()}, returned[:most]
            tolerance = coarsest(dtypes).experts
            try:
                run = run or _run_alone(site, feeds, optimized, with_library)
                got = run(feeds)["y"]
            except ModelError as error:
                return SiteCheck(site.name, "failed", rows, 0, largest, f"by {how}: {error}", WHAT, change)
            difference = relative_difference(got, expected)
            largest = max(largest, difference)
            if difference > tolerance:
                detail = (
                    f"by {how}: rows differ by {difference:.1e} of the largest magnitude (allowed {told(tolerance)})"
                )
                return SiteCheck(site.name, "failed", rows, 0, difference, detail, WHAT, change)
            rows += len(expected)
    return SiteCheck(site.name, "passed", rows, 0, largest, "", WHAT, change)


def _change(rows: Sequence[tuple[Any, Any, Any]]) -> float:
    """How far rows as they are meant are from the original's, without the residual, by the norm of all of them.

    Of all: a single row may be small by chance, where the experts of its choices cancel out.
    """
    import numpy as np

    meant_rows, original_rows = [], []
    for y, original, residual in rows:
        beside = 0.0 if residual is None else residual.astype(np.float64)
        meant_rows.append(y - beside)
        original_rows.append(original.astype(np.float64) - beside)
    return distance(np.concatenate(meant_rows), np.concatenate(original_rows))


def call_of_experts(site: FusedExpertsSite, values: Mapping[str, Any], most: int | None) -> tuple[dict[str, Any], Any]:
    """What the node is fed, as matrices of rows in its types, and what it should return; no more rows than `most`."""
    import numpy as np

    expected = as_rows(values[site.returned])
    feeds = {}
    for name, source in site.fed.items():
        array = values[source]
        width = expected.shape[-1] if name in ("x", "residual") else _width(site, name, array)
        array = array.reshape(-1, width)
        if name == "weights":
            array = array.astype(np.float32) * np.float32(site.factor)
        types = {"weights": np.dtype(np.float32), "indices": np.dtype(np.int32)}
        feeds[name] = array.astype(types.get(name, expected.dtype))[:most]
    return feeds, expected[:most]


def _width(site: FusedExpertsSite, name: str, array: Any) -> int:
    shape = experts_inputs(site.node)[name].shape
    width = None if shape is None else shape[-1]
    return width if isinstance(width, int) else int(array.shape[-1])


def _run_alone(site: FusedExpertsSite, feeds: Mapping[str, Any], optimized: RunnableModel, with_library: bool) -> Run:
    import onnx_ir as ir

    types = {name: ir.DataType.from_numpy(array.dtype) for name, array in feeds.items()}

    def feed(place: int, _: ir.Value) -> tuple[str, ir.DataType]:
        name = FUSED_EXPERTS.inputs[place].name
        return name, types[name]

    return run_alone(site.node, site.name, feed, {"y": types["x"]}, optimized, with_library)
