"""The graph rewrites: find the MoE blocks of a model and turn each into one FusedRouter and one FusedExperts node.

    model = onnx_ir.load("model.onnx")
    result = rewrite(model)
    for site in result.sites: ...

A seed turns the TopK of a router into a bare FusedRouter, growth rules absorb what stands next to it, and every
intermediate graph is right: a router that nobody has seen is fused partly, never wrongly. The experts behind it are
read as a whole, in the forms that exporters give them, or left.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.choices import TARGETS, USUAL_TARGET, check_choice
from ort_moe.errors import ModelError
from ort_moe.graphs.node_kinds import is_contrib_moe, is_experts, is_shared_gate_router
from ort_moe.ops import DOMAIN, RUNTIME_VERSION, VERSION
from ort_moe.reasons import REASONS
from ort_moe.rewrites.canonicalize import canonicalize, clean_up, name_nodes, put_in_order, spell_standard_domain
from ort_moe.rewrites.contrib import split_fused_layers
from ort_moe.rewrites.contrib_experts import RULE as CONTRIB_RULE
from ort_moe.rewrites.contrib_experts import Lifted, lift_contrib
from ort_moe.rewrites.contrib_experts.retarget import Only, choose_blocks, told_experts, told_sites, write_contrib
from ort_moe.rewrites.engine import RULES, SEEDED, Engine, PassRecord, choose
from ort_moe.rewrites.expert_loop import examples_own_loop
from ort_moe.rewrites.experts import Fusion, absorb_what_follows, fuse_experts
from ort_moe.rewrites.experts.node import read_routers
from ort_moe.rewrites.experts.sites import (
    ExpertsSite,
    collect_experts,
    experts_in_functions,
    follows_plain_choice,
)
from ort_moe.rewrites.finding import Finding
from ort_moe.rewrites.fingerprint import fingerprint
from ort_moe.rewrites.functions import OLDEST_OPSET, attach_functions, drop_unread_functions
from ort_moe.rewrites.inlining import inline_functions
from ort_moe.rewrites.router_node import is_router
from ort_moe.rewrites.routing import may_route
from ort_moe.rewrites.rule import RefusalLog, RuleInfo
from ort_moe.rewrites.shared_gate import RULE as SHARED_GATE_RULE
from ort_moe.rewrites.shared_gate import join_shared_gates, split_shared_gates
from ort_moe.rewrites.signatures import check_nodes
from ort_moe.rewrites.sites import Site, collect_sites
from ort_moe.rewrites.spelling import respell
from ort_moe.rewrites.unseed import forget, unseed
from ort_moe.rewrites.values import is_op

__all__ = ["RULES", "ExpertsSite", "Finding", "PassRecord", "RewriteResult", "RuleInfo", "Site", "prepare", "rewrite"]


@dataclass(frozen=True)
class RewriteResult:
    """What a rewrite did.

    Attributes:
        modified: Whether the model is another one than before; False on a second run.
        sites: Every router and every other TopK.
        passes: What each step did and took.
        findings: What concerns the model as a whole.
        experts: The experts behind every router.
    """

    modified: bool
    sites: tuple[Site, ...]
    passes: tuple[PassRecord, ...]
    findings: tuple[Finding, ...] = ()
    experts: tuple[ExpertsSite, ...] = ()


def rewrite(
    model: ir.Model, *, rules: Collection[str] | None = None, skip: Collection[str] = (), target: str = USUAL_TARGET
) -> RewriteResult:
    """Fuse the routers of the model, in place: those of the graph and of the bodies of If, Loop and Scan in it.

    And the experts behind them, and ONNX Runtime's contrib ops that hold both.

    Model-local functions that hold a router or such an op, or call one that does, are inlined first.

    The names of graph inputs and outputs, of each router's logits, of the values that carry its weights and indices,
    and of what the experts return stay. Each fused node comes with a model-local function of standard operators.

    Args:
        model: Any ONNX model with the standard operator set 13 or newer; expert weights are not read.
        rules: Names of the rules to run, from `RULES`; None: all but those that are to be asked for. Names with a plus
            sign in front, as in `+shared-gate`, are added to these.
        skip: Names of rules not to run.
        target: Where the model shall run, `cuda` or `cpu`: contrib ops that are faster there stay. Or `contrib`: blocks
            become contrib ops in place of ours, where there are some that compute the same, and others stay.

    Raises:
        ValueError: A name in `rules` or `skip` is not in `RULES`; or there is no such target.
        ModelError: The model imports another version of the ort_moe domain, or a standard operator set that is too old;
            or it is not valid.
    """
    chosen = choose(rules, skip)
    check_choice("target", target, TARGETS)
    return _rewrite_to_contrib(model, chosen) if target == "contrib" else _rewrite(model, chosen, target)


def prepare(model: ir.Model) -> PassRecord:
    """Check a model, inline its functions and name its nodes, in place: what a rewrite begins with.

    Returns:
        Of the functions that were inlined.

    Raises:
        ModelError: As `rewrite`.
    """
    _check_imports(model.graph.opset_imports)
    spell_standard_domain(model)
    start = time.perf_counter()
    inlined = inline_functions(model, SEEDED)
    record = PassRecord("inline functions", inlined, time.perf_counter() - start)
    check_nodes(model)
    name_nodes(model)
    return record


def _rewrite_to_contrib(model: ir.Model, chosen: frozenset[str]) -> RewriteResult:
    """First on a copy that shares the weights, for what has a contrib node is known when it is fused."""
    start = time.perf_counter()
    trial = model.clone()
    tried = _rewrite(trial, chosen, "contrib")
    blocks = choose_blocks(trial)
    records = [PassRecord("try", len(blocks.only.experts), time.perf_counter() - start)]
    result, written = None, 0
    if blocks.only.experts:
        result = _rewrite(model, chosen, "contrib", blocks.only)
        start = time.perf_counter()
        written = write_contrib(model)
        clean_up(model)
        put_in_order(model)
        drop_unread_functions(model)
        records += [*result.passes, PassRecord("write contrib nodes", written, time.perf_counter() - start)]
    sites, experts = told_sites(model, tried.sites, blocks), told_experts(model, tried.experts, blocks)
    return RewriteResult(written > 0, sites, tuple(records), tried.findings, experts)


def _rewrite(model: ir.Model, chosen: frozenset[str], target: str, only: Only | None = None) -> RewriteResult:
    imports = model.graph.opset_imports
    had_import = DOMAIN in imports
    records = [prepare(model)]
    inlined = records[0].applied
    in_functions = () if target == "contrib" else tuple(experts_in_functions(model))
    split_before = split_shared_gates(model)  # as all else knows them; joined again in the end
    if not any(
        is_router(node) or is_contrib_moe(node) or (is_op(node, *SEEDED) and may_route(node))
        for node in model.graph.all_nodes()
    ):
        # Nothing can be seeded or grown: canonicalising a large model for nothing would take minutes.
        sites = collect_sites(model, lambda _: (), RefusalLog())
        return RewriteResult(inlined > 0, sites, tuple(records), experts=in_functions)

    start = time.perf_counter()
    split = split_fused_layers(model, SEEDED)
    records.append(PassRecord("split fused layers", split, time.perf_counter() - start))

    start = time.perf_counter()
    modified, complaint = canonicalize(model)
    records.append(PassRecord("canonicalise", int(modified), time.perf_counter() - start))
    before = fingerprint(model.graph)

    lifted = Lifted((), {}, 0.0) if target == "contrib" else lift_contrib(model, chosen, target)
    if lifted.fused:
        imports[DOMAIN] = VERSION
    start = time.perf_counter()
    respelt = respell(model)  # also around choices that are seen to be of experts now
    if respelt:
        clean_up(model)
    records.append(PassRecord("respell", respelt, time.perf_counter() - start))
    engine = Engine(chosen, None if only is None else only.routers)
    grown = engine.run(model)
    read_routers(lifted.fused)
    fusion = _and_lifted(fuse_experts(model, chosen, None if only is None else only.experts), lifted)
    if fusion.fused:
        imports[DOMAIN] = VERSION
        put_in_order(model)
    if any(follows_plain_choice(node) for node in fusion.fused):
        grown = engine.run(model)  # a choice that was not seen to be of experts is now
        read_routers(fusion.fused)
    if fusion.fused and target != "contrib":  # whose nodes add nothing to what their experts return
        absorb_what_follows(model, fusion.fused)
        put_in_order(model)
    records.extend(grown)
    records.extend(PassRecord(name, applied, fusion.seconds[name]) for name, applied in fusion.applied.items())

    sites = collect_sites(model, engine.by_root, engine.seeding)
    experts = (*collect_experts(model, sites, fusion, chosen), *in_functions)
    start = time.perf_counter()
    put_back = unseed(model.graph)
    if put_back:
        clean_up(model)
    records.append(PassRecord("put back", put_back, time.perf_counter() - start))
    forget(model.graph)
    is_other = fingerprint(model.graph) != before

    start = time.perf_counter()
    joined = 0
    if target != "contrib":  # which has no such node
        joined = join_shared_gates(model, every=SHARED_GATE_RULE.name in chosen, again=split_before)
    records.append(PassRecord("join shared gates", joined, time.perf_counter() - start))
    start = time.perf_counter()
    added = attach_functions(model)
    records.append(PassRecord("attach functions", added, time.perf_counter() - start))
    if not had_import and not any(
        is_router(node) or is_shared_gate_router(node) or is_experts(node) for node in model.graph.all_nodes()
    ):
        imports.pop(DOMAIN, None)

    findings = [] if complaint is None else [Finding(REASONS["shape-inference-failed"], "", complaint)]
    findings += _baked_in_loops(model)
    modified = (
        modified
        or bool(fusion.fused)
        or inlined > 0
        or split > 0
        or respelt > 0
        or added > 0
        or is_other
        or joined != len(split_before)
    )
    return RewriteResult(modified, sites, tuple(records), tuple(findings), experts)


def _and_lifted(fusion: Fusion, lifted: Lifted) -> Fusion:
    """What came of all experts, those in contrib nodes first."""
    name = CONTRIB_RULE.name
    return Fusion(
        (*lifted.fused, *fusion.fused),
        {**lifted.refused, **fusion.refused},
        {name: len(lifted.fused), **fusion.applied},
        {name: lifted.seconds, **fusion.seconds},
    )


def _baked_in_loops(model: ir.Model) -> list[Finding]:
    """One finding for each loop over the experts that holds the export's example input alone."""
    found = {loop.node: loop for node in model.graph.all_nodes() if (loop := examples_own_loop(node)) is not None}
    reason = REASONS["expert-loop-baked-in"]
    return [Finding(reason, loop.node.name or "", loop.sentence, remedy=loop.remedy) for loop in found.values()]


def _check_imports(imports: dict[str, int]) -> None:
    if imports.get(DOMAIN) == RUNTIME_VERSION:
        imports[DOMAIN] = VERSION
    ours = imports.get(DOMAIN, VERSION)
    if ours != VERSION:
        raise ModelError(f"the model imports version {ours} of the domain '{DOMAIN}', expected {VERSION}")
    standard = imports.get("", imports.get("ai.onnx"))
    if standard is None or standard < OLDEST_OPSET:
        raise ModelError(f"the model imports standard operator set {standard}, expected {OLDEST_OPSET} or newer")
