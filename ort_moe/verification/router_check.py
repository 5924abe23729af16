"""The check of one fused node: the original's own logits in, and its weights and indices out?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ort_moe.errors import ModelError
from ort_moe.graphs.node_kinds import is_router, is_shared_gate_router
from ort_moe.printing.wording import counted
from ort_moe.verification.runnable_model import Run, RunnableModel
from ort_moe.verification.site import (
    RUNS_NOWHERE,
    SiteCheck,
    has_body,
    named_alike,
    names_in,
    run_alone,
    unscaled,
    ways_to_run,
)
from ort_moe.verification.tolerance import (
    Tolerance,
    as_rows,
    by_expert,
    coarseness,
    coarsest,
    favoured,
    relative_difference,
    told,
)

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir


@dataclass(frozen=True)
class RouterSite:
    """A fused node and the values of the original that it stands for.

    Attributes:
        node: The node in the optimised model.
        logits: Name of its logits, in both models.
        weights: Name of its mixing weights in the original, perhaps after a cast; None where nothing reads them, so
            that they need not be what the original's choice had for values.
        indices: Name of its indices, perhaps after a cast, in both models.
        computed: Names of its other inputs that are no constants, in both models.
        own_weights: Name of its mixing weights in the optimised model, perhaps after a cast.
        factor: What they are to the original's: what that multiplies its experts' results with.
    """

    node: ir.Node
    logits: str
    weights: str | None
    indices: str
    computed: tuple[str, ...]
    own_weights: str | None
    factor: float = 1.0

    @property
    def name(self) -> str:
        """How the user finds it."""
        return self.node.name or self.indices

    @property
    def values(self) -> tuple[str, ...]:
        """The values that the check needs."""
        return (self.logits, *self.computed, *([] if self.weights is None else [self.weights]), self.indices)

    @property
    def own_values(self) -> tuple[str, ...]:
        """What `own_routing` needs of the optimised model."""
        return (self.logits, *([] if self.own_weights is None else [self.own_weights]), self.indices)

    def routing(self, values: Mapping[str, Any]) -> tuple[Any, Any]:
        """Weights and indices (..., K) among the original's values by name; weights of 1 where nothing reads them."""
        weights = None if self.weights is None else values[self.weights]
        if self.factor != 1.0 and weights is not None:
            weights = (weights * self.factor).astype(weights.dtype)
        return self.as_read(weights, values[self.indices])

    def own_routing(self, values: Mapping[str, Any]) -> tuple[Any, Any]:
        """The same among the optimised model's values."""
        return self.as_read(None if self.own_weights is None else values[self.own_weights], values[self.indices])

    def as_read(self, weights: Any, indices: Any) -> tuple[Any, Any]:
        """The routing, with weights of 1 where nothing reads them."""
        import numpy as np

        return (np.ones(indices.shape, np.float32) if self.weights is None else weights), indices


def find_sites(
    original: ir.Model, optimized: ir.Model, without: Collection[ir.Node] = ()
) -> list[RouterSite | SiteCheck]:
    """The fused nodes in graph order; a skipped check in place of those whose values have not kept their names.

    Args:
        original: The original.
        optimized: What came of it.
        without: Nodes that are looked at elsewhere.
    """
    known = names_in(original)
    elsewhere = {node.name for node in without}
    if any(is_shared_gate_router(node) for node in optimized.graph.all_nodes()):
        from ort_moe.rewrites.shared_gate import split_shared_gates

        optimized = optimized.clone()  # shares the weights
        split_shared_gates(optimized)  # whose routers return the same bits by themselves
    sites: list[RouterSite | SiteCheck] = []
    for node in optimized.graph.all_nodes():
        if not is_router(node) or node.name in elsewhere:
            continue
        found = _site(node, known, optimized.graph)
        sites.append(SiteCheck(node.name or "", "skipped", detail=found) if isinstance(found, str) else found)
    return sites


def _site(node: ir.Node, known: set[str | None], graph: ir.Graph) -> RouterSite | str:
    """The site, or why there is none."""
    if node.graph is not graph:
        return "it lies in a subgraph, whose values cannot be looked at"
    logits = node.inputs[0]
    if logits is None or logits.name not in known:
        return f"its logits '{logits.name if logits else ''}' are not a value of the original"
    computed = [value for value in node.inputs[1:] if value is not None and value.const_value is None]
    for value in computed:
        if value.name not in known:
            return f"its input '{value.name}' is not a value of the original"
    weights, indices = (named_alike(value, known) for value in node.outputs[:2])
    own_weights, factor = weights, 1.0
    if weights is None and (scaled := unscaled(node)) is not None and scaled[0] in known:
        own_weights, (weights, factor) = node.outputs[0].name, scaled
    is_read = bool(node.outputs[0].uses()) or node.outputs[0].is_graph_output()
    if indices is None or (is_read and weights is None):
        return f"its {'indices' if indices is None else 'weights'} are not a value of the original"
    if not is_read:
        weights = own_weights = None
    names = tuple(value.name or "" for value in computed)
    return RouterSite(node, logits.name or "", weights, indices, names, own_weights, factor)


def check_site(
    site: RouterSite, captured: Sequence[Mapping[str, Any]], optimized: RunnableModel, libraries: tuple[bool, ...]
) -> SiteCheck:
    """Feeds the original's logits to the node alone and compares what it returns with what the original had.

    Args:
        site: The site.
        captured: The original's values by name, of one run after another.
        optimized: Where the node and its function body are taken from.
        libraries: For each, the node runs: True by our kernels, False by its function body, if it has one.
    """
    largest = 0.0
    rows = near_ties = 0
    ways = ways_to_run(site.node, optimized.model, libraries)
    if not ways:
        return SiteCheck(site.name, "skipped", detail=RUNS_NOWHERE)
    for with_library, how in ways.items():
        rows = near_ties = 0
        run: Run | None = None
        for values in captured:
            try:
                run = run or _run_alone(site, values, optimized, with_library)
                compared = _compare(site, values, run)
            except ModelError as error:
                return SiteCheck(site.name, "failed", rows, near_ties, largest, f"by {how}: {error}")
            if isinstance(compared, str):
                return SiteCheck(site.name, "skipped", detail=compared)
            if compared.detail:
                return SiteCheck(
                    site.name, "failed", rows, near_ties, compared.difference, f"by {how}: {compared.detail}"
                )
            rows, near_ties = rows + compared.rows, near_ties + compared.near_ties
            largest = max(largest, compared.difference)
    return SiteCheck(site.name, "passed", rows, near_ties, largest)


def choice(site: RouterSite, values: Mapping[str, Any], optimized: RunnableModel) -> Any:
    """Indices (R, K) that the node alone, by its function body if it has one, makes of these values."""
    run = _run_alone(site, values, optimized, not has_body(site.node, optimized.model))
    return as_rows(run({name: values[name] for name in (site.logits, *site.computed)})["indices"])


def compare_routing(
    logits: np.ndarray[Any, Any],
    expected: tuple[Any, Any],
    got: tuple[Any, Any],
    tolerance: Tolerance,
    choose: Callable[[Any], Any],
    *,
    same_logits: bool = True,
) -> SiteCheck:
    """Compares two routings of the same rows; a `detail` tells what differs.

    A row that chooses other experts is near a tie, and right, where the node makes the other choice of logits that are
    moved by less than the precision tells apart.

    Args:
        logits: (R, E), of the original.
        expected: Weights and indices (R, K).
        got: The same.
        tolerance: What may differ.
        choose: The node: its indices of given logits.
        same_logits: Whether `got` is what the node makes of `logits`, so that the original's choice is in question;
            else it is what the node made of logits of its own run, and its choice is.
    """
    import numpy as np

    (weights, indices), (own_weights, own_indices) = by_expert(*expected), by_expert(*got)
    other = (indices != own_indices).any(axis=-1)
    ties = 0
    if other.any():
        # All rows at once: the node's other inputs may have one entry for each.
        questioned = indices if same_logits else own_indices
        moved = np.sort(choose(favoured(logits, questioned, tolerance.tie)), axis=-1)
        wrong = np.flatnonzero(other & (moved != questioned).any(axis=-1))
        if wrong.size:
            row = int(wrong[0])
            return SiteCheck(
                "",
                "failed",
                detail=f"row {row} chooses experts {own_indices[row].tolist()}, the original {indices[row].tolist()}",
            )
        ties = int(other.sum())
    difference = relative_difference(own_weights[~other], weights[~other])
    detail = ""
    if difference > tolerance.weights:
        finite = np.isfinite(difference)
        gap = np.abs(own_weights.astype(np.float64) - weights)
        gap[other] = 0
        by_row = np.nan_to_num(gap, nan=0.0 if finite else np.inf).max(axis=-1)
        allowed = tolerance.weights * coarseness(logits)
        row = int((by_row / allowed).argmax())
        differs = difference * by_row[row] / by_row.max() if finite else difference
        if differs > allowed[row]:
            detail = (
                f"weights differ by {differs:.1e} of the largest (allowed {told(allowed[row])}), most in row {row}: "
                f"{_numbers(own_weights[row])}, the original {_numbers(weights[row])}"
            )
    return SiteCheck("", "failed" if detail else "passed", len(logits), ties, difference, detail)


def _numbers(row: Any) -> str:
    return ", ".join(f"{number:.4g}" for number in row.tolist())


def _compare(site: RouterSite, values: Mapping[str, Any], run: Run) -> SiteCheck | str:
    logits, (weights, indices) = values[site.logits], site.routing(values)
    feeds = {name: values[name] for name in (site.logits, *site.computed)}
    got = run(feeds)
    own_weights, own_indices = site.as_read(got["weights"], got["indices"])
    if weights.shape[:-1] == own_weights.shape[:-1] and weights.shape[-1] != own_weights.shape[-1]:
        detail = f"it chooses {counted(own_weights.shape[-1], 'expert')} for a row, the original {weights.shape[-1]}"
        return SiteCheck(site.name, "failed", detail=detail)
    if weights.shape != own_weights.shape or indices.shape != own_indices.shape:
        return (
            f"the original's weights {weights.shape} and indices {indices.shape} "
            f"are not shaped like the node's {own_weights.shape}"
        )
    return compare_routing(
        as_rows(logits),
        (as_rows(weights), as_rows(indices)),
        (as_rows(own_weights), as_rows(own_indices)),
        coarsest({str(logits.dtype), str(weights.dtype)}),
        lambda moved: as_rows(run({**feeds, site.logits: moved.reshape(logits.shape)})["indices"]),
    )


def _run_alone(site: RouterSite, captured: Mapping[str, Any], optimized: RunnableModel, with_library: bool) -> Run:
    import onnx_ir as ir

    def feed(_: int, value: ir.Value) -> tuple[str, ir.DataType]:
        name = value.name or ""
        return name, ir.DataType.from_numpy(captured[name].dtype)

    outputs = {"weights": ir.DataType.FLOAT, "indices": ir.DataType.INT32}
    return run_alone(site.node, site.name, feed, outputs, optimized, with_library)
