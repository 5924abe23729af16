"""Turn the experts of each layer into one FusedExperts: gathered, multiplied, activated, weighed and summed.

Each form in which exporters write them has a file that reads it whole, from the sum over the choices back to the
tokens' rows; nothing is rewritten until all of it is read. What forms have in common is in files named for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.rewrites.experts import batched_mm, dense, dispatched, grouped_mm, unrolled
from ort_moe.rewrites.experts.block import ExpertsBlock
from ort_moe.rewrites.experts.constants import Constant
from ort_moe.rewrites.experts.einsum import spell_einsums
from ort_moe.rewrites.experts.node import replace, require_alone, require_own_weights, require_valid
from ort_moe.rewrites.experts.residual import absorb_behind
from ort_moe.rewrites.experts.split_tokens import join_tokens
from ort_moe.rewrites.names import Names
from ort_moe.rewrites.rule import Mismatch, Refusal, RuleInfo
from ort_moe.rewrites.values import is_op

__all__ = ["ALL_EXPERTS_FORMS", "EXPERTS_RULES", "Fusion", "absorb_what_follows", "fuse_experts"]


@dataclass(frozen=True)
class _Form:
    rule: RuleInfo
    root: str
    read: Callable[[ir.Node], ExpertsBlock]


_FORMS = (
    _Form(batched_mm.RULE, batched_mm.ROOT, batched_mm.read),
    _Form(grouped_mm.RULE, grouped_mm.ROOT, grouped_mm.read),
    _Form(dense.RULE, dense.ROOT, dense.read),
    _Form(unrolled.RULE, unrolled.ROOT, unrolled.read),
    _Form(dispatched.RULE, dispatched.ROOT, dispatched.read),
)

EXPERTS_RULES: Mapping[str, RuleInfo] = {form.rule.name: form.rule for form in _FORMS}
"""The forms of experts by the name that `--rules` and `--skip` use."""


ALL_EXPERTS_FORMS = frozenset({dense.RULE.name, unrolled.RULE.name})
"""The forms in which every token goes through all experts."""


@dataclass(frozen=True)
class Fusion:
    """What came of the experts of a model.

    Attributes:
        fused: The new nodes.
        refused: What was told of sums that end experts which stay, by node.
        applied: Rewrites by rule that was run.
        seconds: Wall time by rule.
    """

    fused: tuple[ir.Node, ...]
    refused: Mapping[ir.Node, Refusal]
    applied: Mapping[str, int]
    seconds: Mapping[str, float]


def fuse_experts(model: ir.Model, chosen: Collection[str], only: Collection[str] | None = None) -> Fusion:
    """Fuse the experts of the model, in place.

    Args:
        model: Whose routers have been fused.
        chosen: Names of the rules to run.
        only: Names of the nodes that end experts which are fused; None: all.
    """
    if EXPERTS_RULES.keys() & set(chosen):
        spell_einsums(model)
        join_tokens(model)
    fused: list[ir.Node] = []
    refused: dict[ir.Node, Refusal] = {}
    applied: dict[str, int] = {}
    seconds: dict[str, float] = {}
    roots = {form.root for form in _FORMS}
    nodes = [node for node in model.graph.all_nodes() if is_op(node, *roots)]
    waiting: list[tuple[_Form, ir.Node]] = []
    writer = _Writer(model)
    for form in _FORMS:
        if form.rule.name not in chosen:
            continue
        start, before = time.perf_counter(), len(fused)
        for node in nodes:
            if node.graph is None or node.op_type != form.root:
                continue
            try:
                block = form.read(node)
                ending = block.y.producer()
                if only is not None and (ending is None or ending.name not in only):
                    continue
                require_valid(block)
                require_alone(block)
            except Mismatch:
                continue
            except Refusal as refusal:
                refused[node] = refusal
                continue
            if _refusal_to_copy(block, [block]) is None:
                fused.append(writer.put(block, form))
            else:
                waiting.append((form, node))
        applied[form.rule.name] = len(fused) - before
        seconds[form.rule.name] = time.perf_counter() - start
    for form, node in _sharing(waiting, refused):
        start = time.perf_counter()
        fused.append(writer.put(form.read(node), form))
        applied[form.rule.name] += 1
        seconds[form.rule.name] += time.perf_counter() - start
    return Fusion(tuple(fused), refused, applied, seconds)


class _Writer:
    """Puts nodes in the place of blocks; blocks of the same weights get the same copy of them."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._names: Names | None = None
        self._copies: dict[Constant, ir.Value] = {}

    def put(self, block: ExpertsBlock, form: _Form) -> ir.Node:
        self._names = self._names or Names(self._model.graph)
        return replace(block, form.rule.name, self._names, self._copies)


def _sharing(waiting: list[tuple[_Form, ir.Node]], refused: dict[ir.Node, Refusal]) -> list[tuple[_Form, ir.Node]]:
    """Of blocks whose weights others read, those whose weights only others of them do: one copy takes their place."""
    while waiting:
        blocks = [form.read(node) for form, node in waiting]
        why = [_refusal_to_copy(block, blocks) for block in blocks]
        refused.update({node: refusal for (_, node), refusal in zip(waiting, why, strict=True) if refusal is not None})
        if not any(why):
            break
        waiting = [each for each, refusal in zip(waiting, why, strict=True) if refusal is None]
    return waiting


def _refusal_to_copy(block: ExpertsBlock, blocks: list[ExpertsBlock]) -> Refusal | None:
    try:
        require_own_weights(block, blocks)
    except Refusal as refusal:
        return refusal
    return None


def absorb_what_follows(model: ir.Model, nodes: Iterable[ir.Node]) -> None:
    """Let these FusedExperts do what is done to what they return, in place; the graph may be out of order behind."""
    names = Names(model.graph)
    for node in nodes:
        absorb_behind(node, names)
