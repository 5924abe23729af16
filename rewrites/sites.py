"""What became of every TopK that might be a router: whole, partly or left, and why.

The status is decided from what is left over around the node, not from which rules ran: a router is whole if neither
its logits nor its weights meet any more router arithmetic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import onnx_ir as ir
from onnxscript.rewriter import RewriteRule

from ort_moe.graphs.operators import PRODUCTS
from ort_moe.ops import FUSED_ROUTER, AttributeValue
from ort_moe.reasons import REASONS
from ort_moe.rewrites.choice import follows_choice, ranks_integers
from ort_moe.rewrites.finding import Finding
from ort_moe.rewrites.inlining import nodes_in_functions
from ort_moe.rewrites.left_over import between, left_over
from ort_moe.rewrites.router_node import Router, is_router
from ort_moe.rewrites.routing import may_route, router_width
from ort_moe.rewrites.rule import Refusal, RefusalLog
from ort_moe.rewrites.surroundings import surroundings
from ort_moe.rewrites.unseed import will_be_put_back
from ort_moe.rewrites.values import consumers, integers, is_op, label

Status = Literal["whole", "partly", "left"]

_MOST_MASKS = 64
"""Values looked at behind a choice for another that it is a part of; between them are a dozen."""


@dataclass(frozen=True)
class Site:
    """A TopK of the original graph, or a FusedRouter.

    Attributes:
        node: Name of the node, which is that of the TopK in the original graph.
        graph: Name of the graph or function it is in.
        status: `whole`: nothing of the router is left beside the node; `partly`: something is; `left`: a TopK remains.
        experts: E, where known.
        k: K, where known.
        attributes: Of the FusedRouter; None for a TopK.
        absorbed: Names of the rules that grew the node, in order.
        findings: Why it is not whole.
        inputs: Names, as in the op table, of the inputs that the FusedRouter has.
        surroundings: Of a site that is not whole, the nodes around it as text.
    """

    node: str
    graph: str
    status: Status
    experts: int | None
    k: int | None
    attributes: dict[str, AttributeValue] | None = None
    absorbed: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    inputs: tuple[str, ...] = ()
    surroundings: tuple[str, ...] = field(default=(), compare=False)


def collect_sites(
    model: ir.Model, rules: Callable[[str], Iterable[RewriteRule]], seeding: RefusalLog
) -> tuple[Site, ...]:
    """Every site of the model in the graph's order, those in a body in the place of the node it belongs to.

    Those in functions, which are left as they are, come last.

    Args:
        model: After the fixed point, before routers that did not grow are put back.
        rules: Which rules a node type may end; asked for what they refused.
        seeding: What the seeds refused, by the node they ended in, whose name a FusedRouter keeps.
    """
    sites = []
    for node in model.graph.all_nodes():
        if is_router(node):
            sites.append(_router_site(model, node, rules, seeding))
        elif is_op(node, "TopK") and not ranks_integers(node):
            sites.append(_topk_site(node))
        elif is_op(node, "ArgMax") and (argmax := _argmax_site(node, seeding)) is not None:
            sites.append(argmax)
    sites.extend(_in_functions(model))
    return tuple(sites)


def _router_site(
    model: ir.Model, node: ir.Node, rules: Callable[[str], Iterable[RewriteRule]], seeding: RefusalLog
) -> Site:
    router = Router.read(node)
    name, graph = node.name or "", graph_name(node)
    findings = tuple(left_over(model, router, rules, seeding))
    if will_be_put_back(node):
        remedy = "See what else is said of this site." if findings else ""
        findings = (Finding(REASONS["router-did-not-grow"], name, between(router), remedy=remedy), *findings)
        around = surroundings(node)
        return Site(name, graph, "left", router.experts, router.k, findings=findings, surroundings=around)
    around = surroundings(node) if findings else ()
    status: Status = "partly" if findings else "whole"
    given = tuple(
        tensor.name for tensor, value in zip(FUSED_ROUTER.inputs, node.inputs, strict=False) if value is not None
    )
    attributes = dict(router.attributes)
    return Site(name, graph, status, router.experts, router.k, attributes, router.absorbed, findings, given, around)


def _topk_site(node: ir.Node) -> Site:
    chosen = integers(node.inputs[1]) if len(node.inputs) > 1 else None
    k = chosen[0] if chosen and len(chosen) == 1 else None
    name = node.name or ""
    try:
        router_width(node)
        finding = Finding(REASONS["rule-left-out"], name, "the rule that seeds a FusedRouter was left out")
    except Refusal as refusal:
        finding = Finding(REASONS[refusal.reason], name, str(refusal), remedy=refusal.remedy)
        router = _router_behind(node) if refusal.reason in ("topk-not-a-router", "expert-count-unknown") else None
        if router is not None:
            detail = f"{label(node)} takes part in the choice of '{router.name}', as a choice of groups does"
            remedy = f"See what is said of the site '{router.name}'."
            finding = Finding(REASONS["topk-not-a-router"], name, detail, remedy=remedy)
    return Site(name, graph_name(node), "left", None, k, findings=(finding,), surroundings=surroundings(node))


def _router_behind(topk: ir.Node) -> ir.Node | None:
    """The FusedRouter, or the last TopK that may be a router's, that ranks what this TopK had a part in."""
    found = None
    queue, seen = deque(topk.outputs), set(topk.outputs)
    while queue and len(seen) <= _MOST_MASKS:
        for node in consumers(queue.popleft()):
            if is_router(node):
                return node
            if is_op(node, "TopK") and may_route(node) and not ranks_integers(node):
                found = node
            if node.op_type not in PRODUCTS and not is_op(node, "Shape"):
                fresh = [output for output in node.outputs if output not in seen]
                seen.update(fresh)
                queue.extend(fresh)
    return found


def _argmax_site(node: ir.Node, seeding: RefusalLog) -> Site | None:
    """The site of an ArgMax that selects an expert, the first where there are several in a row."""
    name = node.name or ""
    try:
        experts = router_width(node)
    except Refusal as refusal:
        if refusal.reason in ("topk-not-a-router", "expert-count-unknown"):
            return None
        experts, detail, remedy = None, str(refusal), refusal.remedy
    else:
        if follows_choice(node):
            return None
        refusals = [*seeding.told(node), *(each for user in node.outputs[0].consumers() for each in seeding.told(user))]
        told, remedy = "; ".join(dict.fromkeys(each.sentence for each in refusals)), ""
        detail = f"{label(node)}: {told}" if told else ""
    if detail:
        finding = Finding(REASONS["argmax-form"], name, detail, remedy=remedy)
    else:
        finding = Finding(REASONS["rule-left-out"], name, "the rule that seeds a FusedRouter was left out")
    return Site(name, graph_name(node), "left", experts, 1, findings=(finding,), surroundings=surroundings(node))


def graph_name(node: ir.Node) -> str:
    """How sites name the graph that a node is in; empty where it has no name."""
    return "" if node.graph is None else node.graph.name or ""


def _in_functions(model: ir.Model) -> Iterator[Site]:
    """Every TopK in a function that could not be inlined."""
    for name, why, node in nodes_in_functions(model):
        if is_op(node, "TopK"):
            detail = f"{label(node)} is in the function '{name}': {why}"
            finding = Finding(REASONS["topk-in-subgraph"], node.name or "", detail)
            yield Site(node.name or "", name, "left", None, None, findings=(finding,), surroundings=surroundings(node))
