"""What a rule is: an algebraic identity as a pattern, a reading that may refuse, and a replacement."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import onnx_ir as ir
from onnxscript.rewriter import (
    MatchContext,
    MatchingTracer,
    MatchResult,
    MatchStatus,
    RewriteRule,
    RewriteRuleClassBase,
)

from ort_moe.ops import DOMAIN
from ort_moe.rewrites.router_node import Router, is_router
from ort_moe.rewrites.values import FLOATS, consumers, label

_QUIET = "sink-casts"
"""Rules that are tried on nodes of any kind, so that their refusals tell the user nothing."""


class Refusal(Exception):
    """A rule's pattern matched, yet the identity does not hold here: one sentence for the user.

    Attributes:
        reason: Slug of the reason under which it is reported.
        readers: The nodes, and the output of the graph, that read a value which the rule would take away.
        remedy: What the user can do about it; empty where the reason says it.
    """

    def __init__(
        self,
        sentence: str,
        reason: str = "topk-form",
        readers: Sequence[ir.Node | ir.Value] = (),
        remedy: str = "",
    ) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.readers = tuple(readers)
        self.remedy = remedy


class Mismatch(Refusal):
    """The rule is about something else, which its pattern could not say: nothing to tell the user."""

    def __init__(self) -> None:
        super().__init__("")


@dataclass(frozen=True)
class RuleInfo:
    """A row of the table of rules.

    Attributes:
        name: What `--rules` and `--skip` call it.
        identity: The identity, as in `A(B(x)) -> C(x)`.
        doc: When it holds and why.
    """

    name: str
    identity: str
    doc: str


class RouterRule(RewriteRuleClassBase, abc.ABC):
    """Base of seeds and growth rules.

    The class docstring's first line is the identity, the rest says when it holds. `pattern` draws the left side as far
    as it is fixed; `read` looks at the rest, returns what `rewrite` needs and raises `Refusal` where the identity does
    not hold. Both are pure: nothing is kept between them. Matched nodes are never removed by the rule; what has
    lost its consumers goes with the next clean-up.
    """

    title: ClassVar[str]
    """Name in the table of rules; several rules may share one."""
    root: str
    """Type of the node that ends the pattern: the engine offers no other."""
    anchor: ClassVar[str] = ""
    """Type of a node without which the pattern never matches, where the root's type is a common one."""
    commutes: ClassVar[bool] = False
    """Whether the pattern is tried with the operands of commutative ops swapped, too."""

    def __init__(self) -> None:
        super().__init__(name=self.title, remove_nodes=False)

    @abc.abstractmethod
    def read(self, *args: Any, **matched: Any) -> Any:
        """Return what `rewrite` needs to know.

        Raises:
            Refusal: The identity does not hold for this match.
        """

    def check(self, op: MatchContext, *args: Any, **matched: Any) -> MatchResult:
        """Turn a refusal into the rewriter's own form of failure."""
        del op, args  # the match context, under the base class's name for it
        weights = matched.get("weights")
        try:
            _require_no_maps(weights)
            self.read(**matched)
        except Refusal as refusal:
            return MatchResult().fail(str(refusal), list(refusal.readers))
        return MatchResult()

    def compiled(self) -> list[RewriteRule]:
        """The rule in the rewriter's form, with its commuted copies."""
        rule = RewriteRule(self.pattern, self.rewrite, self.check, name=self.title, remove_nodes=False)
        return list(rule.commute()) if self.commutes else [rule]

    @classmethod
    def info(cls) -> RuleInfo:
        """The rule's row in the table."""
        identity, _, doc = (inspect.getdoc(cls) or "").partition("\n")
        return RuleInfo(cls.title, identity.strip().rstrip("."), " ".join(doc.split()))


@dataclass(frozen=True)
class Told:
    """What a rule told of a match that it refused.

    Attributes:
        sentence: Its name and why.
        readers: What reads a value that the rule would take away, by operator and name; empty where that is no matter.
    """

    sentence: str
    readers: tuple[str, ...]


class RefusalLog(MatchingTracer):
    """Keeps what rules told whose pattern matched and whose reading refused, by the node the match ended in."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[str | None, list[Told]] = {}

    def log(self, rule: Any, container: Any, node: Any, match_result: Any, status: MatchStatus) -> None:
        """Called by the rewriter for every attempt."""
        del container
        tells = bool(match_result.reason) and not rule.name.startswith(_QUIET)
        if status == MatchStatus.CONDITION_FAILED and tells:
            readers = tuple(reader_name(each) for each in match_result.failure_nodes_and_values)
            self._told.setdefault(node.name, []).append(Told(f"{rule.name}: {match_result.reason}", readers))

    def told(self, node: ir.Node) -> list[Told]:
        """What was told at the node of this name."""
        return self._told.get(node.name, [])


def reader_name(reader: ir.Node | ir.Value) -> str:
    """What reads a value, in a sentence: a node, or the caller of the model by an output."""
    return label(reader) if isinstance(reader, ir.Node) else f"output '{reader.name}' of the model"


def router(op: Any, logits: Any) -> tuple[Any, Any]:
    """The pattern of a FusedRouter with any attributes and inputs; binds `weights` and `indices`."""
    weights, indices = op.FusedRouter(
        logits,
        _domain=DOMAIN,
        _allow_other_attributes=True,
        _allow_other_inputs=True,
        _outputs=["weights", "indices"],
    )
    return weights, indices


def require(condition: bool, sentence: str) -> None:
    """Refuse with the sentence unless the condition holds."""
    if not condition:
        raise Refusal(sentence)


def _require_no_maps(weights: ir.Value | None) -> None:
    """Refuse to take a FusedRouter's place whose routing maps are read: a successor has none."""
    if weights is not None and is_router(weights.producer()):
        require(not Router.producing(weights).has_maps, "the routing maps of the FusedRouter are read")


def require_logits(x: ir.Value) -> None:
    """Refuse a value of another type than logits may have."""
    require(x.dtype in FLOATS, f"the logits are {x.dtype}, expected float32, float16 or bfloat16")


def require_only_consumers(value: ir.Value, *allowed: ir.Node) -> None:
    """Refuse if another node, or the graph's caller, also reads the value."""
    readers: list[ir.Node | ir.Value] = [node for node in consumers(value) if node not in allowed]
    readers += [value] if value.is_graph_output() else []
    if readers:
        sentence = f"'{value.name}' is also read by {', '.join(map(reader_name, readers))}"
        raise Refusal(sentence, readers=readers)


def stand_in(op: Any, value: ir.Value, old: ir.Value) -> ir.Value:
    """What a rule returns to let a value that is there stand in for another, whose name it takes.

    The Identity goes with the next clean-up, and the name would go with it.
    """
    if value.producer() is not None and not (old.is_graph_output() or value.is_graph_output()):
        value.name, old.name = old.name, None
    same: ir.Value = op.Identity(value)
    return same
