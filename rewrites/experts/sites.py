"""What became of the experts behind every choice: fused, or left, and why."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import onnx_ir as ir

from ort_moe.graphs.node_kinds import experts_inputs, is_contrib_moe, is_experts
from ort_moe.graphs.operators import RESHAPING
from ort_moe.ops import AttributeValue
from ort_moe.reasons import REASONS
from ort_moe.rewrites.experts import EXPERTS_RULES, Fusion
from ort_moe.rewrites.experts.node import FORM
from ort_moe.rewrites.experts.residual import Kind, kind_of_residual
from ort_moe.rewrites.experts.tokens import choice_behind
from ort_moe.rewrites.finding import Finding
from ort_moe.rewrites.inlining import nodes_in_functions
from ort_moe.rewrites.router_node import is_router
from ort_moe.rewrites.rule import Refusal, reader_name
from ort_moe.rewrites.sites import Site, Status, graph_name
from ort_moe.rewrites.surroundings import surroundings
from ort_moe.rewrites.values import consumers, dim, integer, is_op, label, listed

_MOST_NODES = 8192
"""Nodes looked at before a sum of experts; experts written out one by one take ten nodes each."""


@dataclass(frozen=True)
class ExpertsSite:
    """The experts behind one choice.

    Attributes:
        node: Name of the FusedExperts, or of the node that makes the choice.
        graph: Name of the graph it is in.
        status: `whole`: one FusedExperts computes them; `left`: they are as they were.
        router: Name of the node that makes the choice, which a contrib node does itself; empty where it is not known.
        form: Name of the rule that read them; empty where none did in this run or an earlier one.
        experts: E, where known.
        k: K, where known.
        hidden: H, where known.
        inner: I, where known.
        attributes: Of the FusedExperts; None where there is none.
        residual: What the FusedExperts adds to their results: nothing, `shared` experts, shared ones behind a sigmoid
            gate of their own (`gated`), or any `other` value.
        findings: Why they are left.
        surroundings: Of experts that are left, the nodes around their end, or around the choice, as text.
        block: `whole`: router and experts are fused, and nothing of either is left; `left`: neither is fused; `partly`.
    """

    node: str
    graph: str
    status: Literal["whole", "left"]
    router: str
    form: str = ""
    experts: int | None = None
    k: int | None = None
    hidden: int | None = None
    inner: int | None = None
    attributes: dict[str, AttributeValue] | None = None
    residual: Kind = "none"
    findings: tuple[Finding, ...] = ()
    surroundings: tuple[str, ...] = field(default=(), compare=False)
    block: Status = "left"


def collect_experts(
    model: ir.Model, routers: Collection[Site], fusion: Fusion, chosen: Collection[str]
) -> tuple[ExpertsSite, ...]:
    """The experts behind every FusedRouter, and all others that were seen, in the graph's order.

    Args:
        model: After the rewrite.
        routers: Its sites.
        fusion: What the rewrite of the experts told.
        chosen: Names of the rules that were run.
    """
    choices = {node for node in model.graph.all_nodes() if is_router(node)}
    served = {_choice(node) for node in model.graph.all_nodes() if is_experts(node)}
    refused = _ends(fusion)
    ends = {router: refused.get(router) for router in choices - served}
    sites: list[ExpertsSite] = []
    for node in model.graph.all_nodes():
        if is_experts(node):
            sites.append(_whole(node))
        elif node in ends:
            sites.append(_left(ends[node] or node, _why_left(node, ends[node], fusion, chosen), router=node))
        elif node in fusion.refused and node not in ends.values():
            sites.append(
                _left(node, _finding(node, fusion.refused[node]), router=node if is_contrib_moe(node) else None)
            )
    statuses: dict[tuple[str, str], Status] = {(site.graph, site.node): site.status for site in routers}
    return tuple(
        replace(site, block=_both(site.status, statuses.get((site.graph, site.router), site.status))) for site in sites
    )


def experts_in_functions(model: ir.Model) -> Iterator[ExpertsSite]:
    """Every contrib node in a function that could not be inlined."""
    for name, why, node in nodes_in_functions(model):
        if is_contrib_moe(node):
            refusal = Refusal(f"{label(node)} is in the function '{name}': {why}", "experts-in-subgraph")
            yield replace(_left(node, _finding(node, refusal)), graph=name)


def _both(experts: Status, router: Status) -> Status:
    """The status of a block by those of its halves."""
    return experts if experts == router else "partly"


def _choice(node: ir.Node) -> ir.Node | None:
    indices = experts_inputs(node).get("indices")
    found = None if indices is None else choice_behind(indices)
    return None if found is None else found[0].producer()


def follows_plain_choice(node: ir.Node) -> bool:
    """Whether no FusedRouter makes the choice of a FusedExperts."""
    choice = _choice(node)
    return choice is not None and not is_router(choice)


def _whole(node: ir.Node) -> ExpertsSite:
    given = experts_inputs(node)
    attributes: dict[str, AttributeValue] = {name: attribute.value for name, attribute in node.attributes.items()}
    choice = _choice(node)
    rows = dim(given["fc1_weights"], 1)
    inner = rows // 2 if rows is not None and attributes.get("gated") else rows
    return ExpertsSite(
        node=node.name or "",
        graph=graph_name(node),
        status="whole",
        router="" if choice is None else choice.name or "",
        form=node.metadata_props.get(FORM, ""),
        experts=dim(given["fc1_weights"], 0),
        k=dim(given["indices"], -1),
        hidden=dim(given["x"], -1),
        inner=inner,
        attributes=attributes,
        residual=kind_of_residual(node),
    )


def _left(node: ir.Node, finding: Finding, router: ir.Node | None = None) -> ExpertsSite:
    place, around = router or node, surroundings(node)
    name, graph = place.name or "", graph_name(place)
    experts, k = (None, None) if router is None else _lengths(router)
    chosen_by = "" if router is None else name
    return ExpertsSite(name, graph, "left", chosen_by, experts=experts, k=k, findings=(finding,), surroundings=around)


def _lengths(router: ir.Node) -> tuple[int | None, int | None]:
    """E and K of a FusedRouter, or of a contrib node, which holds a router."""
    if is_contrib_moe(router):
        return dim(router.inputs[1], -1), integer(router, "k", 1)
    return dim(router.inputs[0], -1), dim(router.outputs[1], -1)


def _why_left(router: ir.Node, end: ir.Node | None, fusion: Fusion, chosen: Collection[str]) -> Finding:
    if end is not None:
        return _finding(router, fusion.refused[end])
    name, skipped = router.name or "", [rule for rule in EXPERTS_RULES if rule not in chosen]
    if skipped:
        detail = f"rules for experts were left out: {', '.join(skipped)}"
        return Finding(REASONS["rule-left-out"], name, detail)
    detail = f"what {label(router)} chooses ends in no form of experts that is known"
    readers = listed(map(label, _readers(router.outputs[1])), most=3)
    detail += f"; its indices go to {readers}" if readers else "; nothing reads its indices"
    return Finding(REASONS["experts-form"], name, detail)


def _finding(node: ir.Node, refusal: Refusal) -> Finding:
    readers = tuple(reader_name(each) for each in refusal.readers)
    return Finding(REASONS[refusal.reason], node.name or "", str(refusal), readers, refusal.remedy)


def _ends(fusion: Fusion) -> dict[ir.Node, ir.Node]:
    """For each router, the first sum of experts that was refused and to which it is the nearest."""
    found: dict[ir.Node, ir.Node] = {}
    for end in fusion.refused:
        router = None if is_contrib_moe(end) else _router_before(end)
        if router is not None:
            found.setdefault(router, end)
    return found


def _router_before(node: ir.Node) -> ir.Node | None:
    """The nearest router before a node."""
    queue, seen = deque([node]), {node}
    while queue and len(seen) < _MOST_NODES:
        for before in _producers(queue.popleft()):
            if is_router(before):
                return before
            if before not in seen:
                seen.add(before)
                queue.append(before)
    return None


def _producers(node: ir.Node) -> Iterator[ir.Node]:
    for value in node.inputs:
        made_by = None if value is None else value.producer()
        if made_by is not None:
            yield made_by


def _readers(indices: ir.Value) -> Iterator[ir.Node]:
    """What reads indices behind casts and views."""
    queue = deque([indices])
    while queue:
        for node in consumers(queue.popleft()):
            if is_op(node, "Cast", *RESHAPING):
                queue.extend(node.outputs)
            else:
                yield node
