"""The check of a contrib node in whose place experts stand whose weights were packed.

With the original's weights in the place of the codes, the nodes must compute what the original does, which holds their
routing and all else but the codes; and the experts are then held to these as those of any other layer are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ort_moe.errors import ModelError
from ort_moe.verification.block_check import WHAT, BlockSite, call, difference_of_rows, run_nodes, ways_of
from ort_moe.verification.experts_check import (
    MOST_ROWS_AS_MEANT,
    FusedExpertsSite,
    call_of_experts,
    check_experts,
    named_behind,
)
from ort_moe.verification.original_experts import OriginalExperts
from ort_moe.verification.packed_reference import meant
from ort_moe.verification.packed_weights import fits
from ort_moe.verification.runnable_model import RunnableModel
from ort_moe.verification.site import RUNS_NOWHERE, SiteCheck
from ort_moe.verification.tolerance import told

if TYPE_CHECKING:
    import onnx_ir as ir

_RETURNED = "returned"


def check_packed_block(
    site: BlockSite,
    captured: Sequence[Mapping[str, Any]],
    originals: OriginalExperts,
    optimized: RunnableModel,
    libraries: tuple[bool, ...],
) -> SiteCheck:
    """Runs the nodes before the experts on the original's values, and these on what they return.

    Args:
        site: A site whose experts were packed.
        captured: The original's values by name, of one run after another.
        originals: Where the weights of its experts are.
        optimized: Where the nodes and their function bodies are taken from.
        libraries: For each, the nodes run: True by our kernels, False by their function bodies, if they have them.
    """
    import numpy as np

    if len(site.packed) != 1 or named_behind(site.packed[0].outputs[0], {site.returned}) is None:
        detail = "its weights were packed, and what it returns is not the experts' alone"
        return SiteCheck(site.name, "skipped", detail=detail, what=WHAT)
    (node,) = site.packed
    weights = originals.of_contrib(site.contrib)
    if isinstance(weights, str):
        return SiteCheck(site.name, "skipped", detail=f"its weights were packed, and {weights}", what=WHAT)
    if not fits(node, weights):
        detail = "its weights were packed, and are of other shapes than the original's"
        return SiteCheck(site.name, "failed", detail=detail, what=WHAT)
    ways = ways_of(site.nodes, optimized.model, libraries)
    if not ways:
        return SiteCheck(site.name, "skipped", detail=RUNS_NOWHERE, what=WHAT)
    experts, before = _before_experts(site, node)
    rows: list[dict[str, Any]] = []
    ties = 0
    for with_library, how in ways.items():
        rows, ties, seen = [], 0, 0
        run = None
        for values in captured:
            feeds, expected, tied = call(site, values, MOST_ROWS_AS_MEANT)
            try:
                if before and run is None:
                    dtypes = dict.fromkeys(experts.fed.values(), expected.dtype)
                    dtypes |= {experts.fed["weights"]: np.dtype("float32"), experts.fed["indices"]: np.dtype("int32")}
                    returned = {name: dtype for name, dtype in dtypes.items() if name not in feeds}
                    run = run_nodes(site.name, before, returned, feeds, optimized, with_library)
                routed = {**feeds, **(run(feeds) if run is not None else {}), site.returned: expected}
                fed, expected = call_of_experts(experts, routed, MOST_ROWS_AS_MEANT)
                with_originals = meant(node, fed, weights)
            except (ModelError, ValueError) as error:  # the latter where attributes and shapes contradict one another
                return SiteCheck(site.name, "failed", seen, ties, detail=f"by {how}: {error}", what=WHAT)
            tied = tied[: len(expected)]
            allowed = site.tolerance.experts
            difference, other = difference_of_rows(with_originals, expected, tied, allowed)
            seen, ties = seen + len(expected), ties + int(other.sum())
            if difference > allowed:
                detail = (
                    f"by {how}: with the original's weights, rows differ by {difference:.1e} of the largest magnitude "
                    f"(allowed {told(allowed)})"
                )
                return SiteCheck(site.name, "failed", seen, ties, difference, detail, WHAT)
            if not len(other) or not other.all():  # a model of no tokens has calls of no rows alone
                rows.append({name: array[~other] for name, array in {**fed, _RETURNED: expected}.items()})
        if seen and ties == seen:
            detail = f"by {how}: each row is near a tie and comes out otherwise"
            return SiteCheck(site.name, "skipped", seen, ties, detail=detail, what=WHAT)
    alone = replace(experts, fed={name: name for name in experts.fed}, returned=_RETURNED, weights=weights)
    check = check_experts(alone, rows, optimized, libraries)
    return replace(check, node=site.name, near_ties=ties, what=WHAT)


def _before_experts(site: BlockSite, node: ir.Node) -> tuple[FusedExpertsSite, tuple[ir.Node, ...]]:
    """The experts by what they are fed in the optimised model, and the nodes that make it."""
    from ort_moe.graphs.node_kinds import experts_inputs

    fed = {name: value.name or "" for name, value in experts_inputs(node).items() if value.const_value is None}
    needed: set[ir.Node] = set()
    pending = [value.producer() for value in node.inputs if value is not None]
    while pending:
        producer = pending.pop()
        if producer is not None and producer in site.nodes and producer not in needed:
            needed.add(producer)
            pending += [value.producer() for value in producer.inputs if value is not None]
    before = tuple(each for each in site.nodes if each in needed)
    return FusedExpertsSite(node, fed, site.returned, is_packed=True), before
