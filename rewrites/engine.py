"""Apply the rule sets in their order to a fixed point.

Order is priority. Seeds come first. Then, until nothing changes: what acts on the chosen (gather, casts, normalisation,
scores and scales after the choice) until quiet, and what stands before the choice. The gather of unbiased scores must
be absorbed before the score itself, or the scores it reads would no longer be the router's input.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import RewriteRule

from ort_moe.rewrites.canonicalize import put_in_order
from ort_moe.rewrites.contrib_experts import RULE as CONTRIB_RULE
from ort_moe.rewrites.experts import EXPERTS_RULES
from ort_moe.rewrites.growth import (
    CAST_RULES,
    GATHER_RULES,
    NORMALIZE_RULES,
    PER_EXPERT_RULES,
    SCALE_OF_SCORES_RULES,
    SCALE_RULES,
    SCATTER_RULES,
    SCORE_AFTER_TOPK_RULES,
    SCORE_RULES,
    SLICE_RULES,
    SOFTCAP_RULES,
    UNREAD_RULES,
    VIEW_RULES,
)
from ort_moe.rewrites.names import Names
from ort_moe.rewrites.router_node import is_router
from ort_moe.rewrites.rule import RefusalLog, RouterRule, RuleInfo
from ort_moe.rewrites.seeds import (
    ARGMAX_RULES,
    GROUP_MASK_RULES,
    MAX_RULES,
    PLAIN_TOPK_RULES,
    SORT_RULES,
    SPARSE_MIXER_RULES,
)
from ort_moe.rewrites.shared_gate import RULE as SHARED_GATE_RULE
from ort_moe.rewrites.tidy import tidy
from ort_moe.rewrites.vicinity import vicinity

_SEEDS = {
    "shorten sorts": SORT_RULES,
    "seed group masks": GROUP_MASK_RULES,
    "seed sparse mixers": SPARSE_MIXER_RULES,
    "seed routers": (*PLAIN_TOPK_RULES, *ARGMAX_RULES),
    "seed maxima": MAX_RULES,
}
_AFTER_CHOICE = {
    "views": VIEW_RULES,
    "gather": GATHER_RULES,
    "sink casts": CAST_RULES,
    "after the choice": (*SCATTER_RULES, *NORMALIZE_RULES, *SCORE_AFTER_TOPK_RULES, *SCALE_RULES, *PER_EXPERT_RULES),
}
_BEFORE_CHOICE = {
    "before the choice": (*SCALE_OF_SCORES_RULES, *SCORE_RULES, *SOFTCAP_RULES, *SLICE_RULES, *UNREAD_RULES)
}

SEEDED = frozenset(rule.anchor or rule.root for rules in _SEEDS.values() for rule in rules)
"""Types of the nodes that a seed is about: without any, and without a FusedRouter, there is nothing to rewrite."""

_MOST_ROUNDS = 50
"""Rounds to the fixed point before giving up; a router needs 3 to 6."""


def all_rules() -> tuple[RouterRule, ...]:
    """Seeds and growth rules in their order."""
    return tuple(rule for sets in (_SEEDS, _AFTER_CHOICE, _BEFORE_CHOICE) for rules in sets.values() for rule in rules)


def _table() -> dict[str, RuleInfo]:
    table: dict[str, RuleInfo] = {}
    for rule in all_rules():
        table.setdefault(rule.title, rule.info())
    return {**table, **EXPERTS_RULES, **{rule.name: rule for rule in (CONTRIB_RULE, SHARED_GATE_RULE)}}


RULES: Mapping[str, RuleInfo] = _table()
"""Every rule by the name that `--rules` and `--skip` use."""

OPT_IN = frozenset({SHARED_GATE_RULE.name})
"""Rules that run only where they are asked for."""


@dataclass(frozen=True)
class PassRecord:
    """What one rule set did.

    Attributes:
        name: The rule set.
        applied: Rewrites.
        seconds: Wall time, clean-up included.
    """

    name: str
    applied: int
    seconds: float


def choose(rules: Collection[str] | None, skip: Collection[str]) -> frozenset[str]:
    """The names of the rules to run: `rules` without `skip`; the plain seed runs unless it is skipped.

    None stands for all but those of OPT_IN, and so do names that all have a plus sign in front, to which these are
    added.

    Raises:
        ValueError: A name is not in the table, and the message lists those that are; or a string stands for the names.
    """
    for given in (rules, skip):
        if isinstance(given, str):  # a collection of names, too: of one letter each
            raise ValueError(f"expected a collection of rule names, got the string '{given}'")
    added = {name.removeprefix("+") for name in rules or () if name.startswith("+")}
    alone = [name for name in rules or () if not name.startswith("+")]
    for name in (*alone, *added, *skip):
        if name not in RULES:
            raise ValueError(f"unknown rule '{name}', expected one of {', '.join(RULES)}")
    seeds = {rule.title for rule in PLAIN_TOPK_RULES}
    wanted = set(RULES) - OPT_IN if rules is None or (added and not alone) else {*alone, *seeds}
    return frozenset((wanted | added) - set(skip))


class Engine:
    """The chosen rules, compiled, for one run over one model.

    Each router grows by itself: only the nodes around it are offered to the rules and cleaned up after each rewrite, so
    that the time it takes does not depend on the size of the model.

    Args:
        chosen: Names of the rules.
        only: Names of the nodes of which a router may be made; None: all.

    Attributes:
        seeding: What the seeds refused in the last run.
    """

    def __init__(self, chosen: Collection[str], only: Collection[str] | None = None) -> None:
        self._only = only
        self._chosen = chosen
        self._records: dict[str, PassRecord] = {}
        self.seeding = RefusalLog()
        self._seeds = self._compile(_SEEDS)
        self._after = self._compile(_AFTER_CHOICE)
        self._before = self._compile(_BEFORE_CHOICE)

    def run(self, model: ir.Model) -> tuple[PassRecord, ...]:
        """Seed and grow every router of the model, in place; records of all runs in the order of first application."""
        self.seeding = RefusalLog()
        self._model, self._names = model, Names(model.graph)
        self._seed()
        routers: list[ir.Node | None] = [node for node in model.graph.all_nodes() if is_router(node)]
        for _ in range(_MOST_ROUNDS):
            grown = [self._grow(router) for router in routers]
            # One that has grown may leave another alone with what both read.
            routers = [router for _, router in grown]
            if not any(applied for applied, _ in grown) or len(routers) == 1:
                break
        start = time.perf_counter()
        if any(record.applied for record in self._records.values()):
            put_in_order(model)
        self._record("put in order", 0, start)
        return tuple(self._records.values())

    def by_root(self, op_type: str) -> Iterable[RewriteRule]:
        """The growth rules that a node of this type may end."""
        for rules in (*self._after.values(), *self._before.values()):
            yield from rules.get(op_type, ())

    def _compile(self, sets: Mapping[str, Iterable[RouterRule]]) -> dict[str, dict[str, list[RewriteRule]]]:
        compiled: dict[str, dict[str, list[RewriteRule]]] = {}
        for name, rules in sets.items():
            compiled[name] = {}
            for rule in rules:
                if rule.title in self._chosen:
                    compiled[name].setdefault(rule.root, []).extend(rule.compiled())
        return compiled

    def _seed(self) -> None:
        nodes: list[ir.Node] = []
        for name, by_root in self._seeds.items():
            start = time.perf_counter()
            if not nodes:
                types = {op_type for roots in self._seeds.values() for op_type in roots}
                nodes = [node for node in self._model.graph.all_nodes() if node.op_type in types]
            roots = [node for node in nodes if node.op_type in by_root]
            if self._only is not None and name.startswith("seed"):
                roots = [node for node in roots if node.name in self._only]
            applied, _ = self._offer(roots, by_root, self.seeding)
            if applied:
                nodes = []  # there are others now
            self._record(name, applied, start)

    def _grow(self, router: ir.Node | None) -> tuple[int, ir.Node | None]:
        """Apply the rules around one router to the fixed point; the number of rewrites, and the router as it is now."""
        total = 0
        for _ in range(_MOST_ROUNDS):
            applied = 1
            while applied:
                applied, router = self._apply(router, self._after)
                total += applied
            applied, router = self._apply(router, self._before)
            total += applied
            if not applied:
                break
        return total, router

    def _apply(
        self, router: ir.Node | None, sets: Mapping[str, Mapping[str, list[RewriteRule]]]
    ) -> tuple[int, ir.Node | None]:
        """Offer what is around the router to each set once; the number of rewrites, and the router as it is now."""
        total = 0
        for name, by_root in sets.items():
            if router is None:
                break
            start = time.perf_counter()
            nodes = [node for node in vicinity(router) if node.op_type in by_root]
            applied, router = self._offer(nodes, by_root, None, router)
            total += applied
            self._record(name, applied, start)
        return total, router

    def _offer(
        self,
        nodes: Iterable[ir.Node],
        by_root: Mapping[str, list[RewriteRule]],
        log: RefusalLog | None,
        router: ir.Node | None = None,
    ) -> tuple[int, ir.Node | None]:
        """Offer each node to the rules that end in its type; the first that holds is applied.

        Args:
            nodes: Of types in `by_root`.
            by_root: The rules by the type of the node they end in.
            log: Told of refusals.
            router: Around which these nodes are, if around any.
        """
        applied = 0
        for node in nodes:
            graph = node.graph
            if not isinstance(graph, ir.Graph):
                continue  # an earlier rewrite took it away
            for rule in by_root[node.op_type]:
                replacement = rule.try_rewrite(self._model, graph, node, tracer=log)  # matches within this graph alone
                if replacement is not None:
                    self._put_in(replacement, node, graph)
                    applied += 1
                    if router is not None and router.graph is None:
                        routers = (new for new in replacement.new_nodes if is_router(new) and new.graph is not None)
                        router = next(routers, None)
                    break
        return applied, router

    def _put_in(self, replacement: Any, node: ir.Node, graph: ir.Graph) -> None:
        for initializer in replacement.new_initializers:
            initializer.name = self._names.unused(initializer.name or "constant")
            graph.register_initializer(initializer)
        for value in (value for new in replacement.new_nodes for value in new.outputs):
            if value not in replacement.new_outputs:  # those take the names of what they replace
                value.name = self._names.unused("val")
        ir.convenience.replace_nodes_and_values(
            graph, node, [], replacement.new_nodes, replacement.match.outputs, replacement.new_outputs
        )
        tidy(replacement.match.outputs, replacement.new_nodes)

    def _record(self, name: str, applied: int, start: float) -> None:
        old = self._records.get(name, PassRecord(name, 0, 0.0))
        self._records[name] = PassRecord(name, old.applied + applied, old.seconds + time.perf_counter() - start)
