"""Spell the arithmetic around a router in one way, before any rule looks at it.

Exporters and people write one step in many ways: a quotient as a product with a reciprocal, a sigmoid by its
exponential, a sum that drops its dimension and gets it back, a reshape in between that moves nothing. Each function
here is an identity from one of these spellings to the one that the rules know; rules need not know the others. What is
not next to the TopK of a router keeps its spelling, but for rows that are gathered by number and index (`indexing`):
what reads those is not seen to be a router's before.
"""

from __future__ import annotations

from collections import deque

import onnx_ir as ir

from ort_moe.rewrites.names import Names
from ort_moe.rewrites.routing import router_width
from ort_moe.rewrites.rule import Refusal
from ort_moe.rewrites.spelling.arithmetic import ARITHMETIC
from ort_moe.rewrites.spelling.casts import CASTS
from ort_moe.rewrites.spelling.indexing import INDEXING
from ort_moe.rewrites.spelling.scores import SCORES
from ort_moe.rewrites.spelling.views import VIEWS
from ort_moe.rewrites.spelling.writer import Spelling, Writer
from ort_moe.rewrites.tidy import discard
from ort_moe.rewrites.values import is_op
from ort_moe.rewrites.vicinity import around

__all__ = ["SPELLINGS", "respell"]

SPELLINGS: dict[str, tuple[Spelling, ...]] = {
    op_type: tuple(spelling for table in (SCORES, ARITHMETIC, CASTS, VIEWS) for spelling in table.get(op_type, ()))
    for op_type in {**SCORES, **ARITHMETIC, **CASTS, **VIEWS}
}
"""What is tried on a node, by its type, in this order."""

_DEEPEST = 4
"""Nodes in a row that a spelling looks at: 1 / (1 + Exp(x * -1))."""

_MOST_STEPS = 5_000
"""Replacements around one router before giving up, should two identities ever undo each other."""


def respell(model: ir.Model) -> int:
    """Spell the arithmetic around every router of the model as the rules know it, in place.

    Args:
        model: Canonicalised: its values have types and shapes as far as these are known.

    Returns:
        The number of replacements.
    """
    routers = [node for node in model.graph.all_nodes() if is_op(node, "TopK") and _looks_like_router(node)]
    names = Names(model.graph) if routers else None
    replaced = 0 if names is None else _respell_indexing(model, names)
    for topk in routers:
        if topk.graph is not None and names is not None:  # not removed as a copy of what stands around another router
            replaced += _Respelling(topk, names).run()
    return replaced


def _respell_indexing(model: ir.Model, names: Names) -> int:
    replaced = 0
    for node in list(model.graph.all_nodes()):
        spelling = INDEXING.get(node.op_type) if is_op(node, *INDEXING) else None
        new = None if spelling is None else spelling(node, Writer(node, True, names))
        if isinstance(new, ir.Value) and _take_over(node.outputs[0], new, may_rename=True):
            discard(node)
            replaced += 1
    return replaced


def _looks_like_router(topk: ir.Node) -> bool:
    """Whether it chooses experts, be it in a form that is no FusedRouter yet."""
    try:
        router_width(topk)
    except Refusal as refusal:
        return refusal.reason == "topk-form"
    return True


class _Respelling:
    """A worklist of the nodes around one router."""

    def __init__(self, topk: ir.Node, names: Names) -> None:
        self._names = names
        before, after = around(topk)
        self._after_choice = dict.fromkeys(before, False) | dict.fromkeys(after, True)
        self._queue = deque(self._after_choice)
        self._queued = set(self._queue)

    def run(self) -> int:
        replaced = 0
        while self._queue and replaced < _MOST_STEPS:
            node = self._queue.popleft()
            self._queued.discard(node)
            replaced += node.graph is not None and self._respell(node)
        return replaced

    def _respell(self, node: ir.Node) -> bool:
        for spelling in SPELLINGS.get(node.op_type, ()):
            writer = Writer(node, self._after_choice[node], self._names)
            found = spelling(node, writer)
            results = found if isinstance(found, list) else [found]
            if any(new is None for new in results):
                continue
            for written in writer.written:
                self._after_choice[written] = self._after_choice[node]
                self._add(written)
            for old, new in zip(node.outputs, results, strict=False):
                assert new is not None
                if not _take_over(old, new, may_rename=new.producer() in writer.written or writer.after_choice):
                    return False
                self._add_users(new, _DEEPEST)
            self._discard(node)
            if writer.written:
                writer.written[-1].name, node.name = node.name, None
            return True
        return False

    def _add_users(self, value: ir.Value, depth: int) -> None:
        for user in value.consumers():
            self._add(user)
            if depth > 1 and user in self._after_choice:
                for output in user.outputs:
                    self._add_users(output, depth - 1)

    def _add(self, node: ir.Node | None) -> None:
        if node in self._after_choice and node is not None and node not in self._queued:
            self._queue.append(node)
            self._queued.add(node)

    def _discard(self, node: ir.Node) -> None:
        """Remove a node that nobody reads any more, then those that only it read; look at the neighbours again."""
        if any(value.uses() or value.is_graph_output() for value in node.outputs):
            return
        inputs = [value for value in node.inputs if value is not None]
        assert node.graph is not None
        node.graph.remove(node, safe=True)
        for value in inputs:
            producer = value.producer()
            self._add(producer)
            for user in value.consumers():
                self._add(user)
            if producer in self._after_choice and producer is not None and producer.graph is not None:
                self._discard(producer)


def _take_over(old: ir.Value, new: ir.Value, *, may_rename: bool) -> bool:
    """Give the readers of `old` the value `new`, and `new` its name where it may; False where an output would lose it.

    Behind the choice the last name counts: that of the weights.
    """
    may_rename = may_rename and new.producer() is not None and not new.is_graph_output()
    if old.is_graph_output() and not may_rename:
        return False
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if may_rename:
        new.name, old.name = old.name, None
    new.type, new.shape = new.type or old.type, new.shape or old.shape
    return True
