"""What `--target contrib` writes: which blocks have a contrib node, and what is told of those that have none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import onnx_ir as ir

from ort_moe.graphs.node_kinds import CONTRIB
from ort_moe.reasons import REASONS
from ort_moe.rewrites.contrib_experts.write import NO_FORM, plan, plan_all, write
from ort_moe.rewrites.experts.sites import ExpertsSite
from ort_moe.rewrites.finding import Finding
from ort_moe.rewrites.names import Names
from ort_moe.rewrites.router_node import is_router
from ort_moe.rewrites.rule import Refusal, reader_name
from ort_moe.rewrites.sites import Site
from ort_moe.rewrites.surroundings import surroundings


@dataclass(frozen=True)
class Only:
    """The blocks that are rewritten, where not all are: by the names of nodes that the fused ones have taken over.

    Attributes:
        routers: Of choices.
        experts: Of the nodes that end experts.
    """

    routers: frozenset[str]
    experts: frozenset[str]


@dataclass(frozen=True)
class Chosen:
    """What of a model that was rewritten has a contrib node.

    Attributes:
        only: The blocks that have.
        refused: Why the others have none, by the name of their FusedExperts.
    """

    only: Only
    refused: dict[str, Refusal]


def choose_blocks(model: ir.Model) -> Chosen:
    """Look at every FusedExperts of a model for a contrib node that computes the same."""
    plans, refused = plan_all(model)
    routers = frozenset(each.router.node.name or "" for each in plans.values())
    only = Only(routers, frozenset(node.name or "" for node in plans))
    return Chosen(only, {node.name or "": refusal for node, refusal in refused.items()})


def write_contrib(model: ir.Model) -> int:
    """Put a contrib node in the place of every FusedRouter and FusedExperts that has one; their number."""
    plans, _ = plan_all(model)
    names = Names(model.graph) if plans else None
    for node in plans:
        assert names is not None
        # Anew: what the last one gave out is another value now, and this node may read it.
        write(plan(node), names)
    if plans:
        model.graph.opset_imports.setdefault(CONTRIB, 1)
    return len(plans)


def told_sites(model: ir.Model, sites: Iterable[Site], chosen: Chosen) -> tuple[Site, ...]:
    """The sites of the trial as they are in the model, where routers without a contrib node were left."""
    nodes = {node.name: node for node in model.graph.all_nodes()}
    fused = {name for name, node in nodes.items() if is_router(node)}
    told = []
    for site in sites:
        if site.attributes is None or site.node in chosen.only.routers or site.node in fused:
            told.append(site)
            continue
        finding = Finding(REASONS[NO_FORM], site.node, "its router has no contrib node without its experts")
        left = replace(site, status="left", attributes=None, absorbed=(), inputs=(), findings=(finding,))
        told.append(replace(left, surroundings=_around(nodes.get(site.node))))
    return tuple(told)


def told_experts(model: ir.Model, experts: Iterable[ExpertsSite], chosen: Chosen) -> tuple[ExpertsSite, ...]:
    """The same of experts."""
    nodes = {node.name: node for node in model.graph.all_nodes()}
    told = []
    for site in experts:
        refusal = chosen.refused.get(site.node) if site.status == "whole" else None
        if refusal is None:
            told.append(replace(site, block=site.status))
            continue
        readers = tuple(reader_name(each) for each in refusal.readers)
        finding = Finding(REASONS[refusal.reason], site.node, str(refusal), readers, refusal.remedy)
        left = replace(site, status="left", attributes=None, form="", block="left", findings=(finding,))
        told.append(replace(left, residual="none", surroundings=_around(nodes.get(site.node))))
    return tuple(told)


def _around(node: ir.Node | None) -> tuple[str, ...]:
    return () if node is None else surroundings(node)
