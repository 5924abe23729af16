"""`ort_moe.inspect`: the MoE view of a model, read without its weights."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ort_moe.graphs.expert_weights import ExpertWeight, expert_weights, fused_stacks, stack
from ort_moe.graphs.graph_capture import CaptureBlocker, capture_blockers, summary
from ort_moe.graphs.node_kinds import is_contrib_moe, is_experts, is_router
from ort_moe.ops import FUSED_ROUTER
from ort_moe.printing.printable import Printable, byte_size, table
from ort_moe.printing.router_wording import phrase
from ort_moe.printing.wording import counted

if TYPE_CHECKING:
    import onnx_ir as ir
    from rich.console import RenderableType

    from ort_moe.rewrites import Site

SCHEMA = 2
"""Version of the JSON documents; any change of their form raises it."""

_CHOICES = (FUSED_ROUTER.name, "TopK", "ArgMax")
"""What chooses experts; their indices are the second output, and those of an ArgMax its only one."""

_CONTRIB_WEIGHTS = {"MoE": (2, 4, 6), "QMoE": (2, 3, 5, 6, 8, 9, 11, 12, 13)}
"""Inputs of the contrib operators that hold experts' weights, scales and zero points."""


@dataclass(frozen=True)
class Layer:
    """An MoE layer.

    Attributes:
        node: The router's node in the original, or the contrib node.
        kind: `router` of standard operators, `fused router`, or the contrib operator's name.
        experts: E; None where it is not known.
        k: K; None where it is not known.
        router: Its arithmetic in a phrase.
        weights: The stacks of experts' weights behind its choice; empty where none was recognised.
        all_experts: Whether every token goes through all experts, and the choice only weighs or masks what they make.
        copied: Whether the weights of each choice of each token are copied before they are multiplied.
        optimized_bytes_per_token: Bytes of experts' weights that one token reads in the model that `optimize` makes of
            it with the weights as they are; None where the experts stay.
    """

    node: str
    kind: str
    experts: int | None
    k: int | None
    router: str
    weights: tuple[ExpertWeight, ...]
    all_experts: bool = False
    copied: bool = False
    optimized_bytes_per_token: int | None = None

    @property
    def bytes_per_token(self) -> int | None:
        """Bytes of experts' weights that one token reads; None where they are not known."""
        return _read_per_token(self.weights, self.k, all_experts=self.all_experts)


@dataclass(frozen=True)
class Inspection(Printable):
    """The MoE view of a model.

    Attributes:
        model: Its path.
        layers: In graph order.
        operators: Number of nodes by operator.
        weight_bytes: Bytes of all weights.
        blockers: Nodes that keep it out of a CUDA graph.
    """

    model: str
    layers: tuple[Layer, ...]
    operators: Mapping[str, int]
    weight_bytes: int
    blockers: tuple[CaptureBlocker, ...]

    @property
    def bytes_per_token(self) -> int | None:
        """Bytes of experts' weights that one token reads in the layers of which they are known; None where of none."""
        known = [layer.bytes_per_token for layer in self.layers if layer.bytes_per_token is not None]
        return sum(known) if known else None

    @property
    def optimized_bytes_per_token(self) -> int | None:
        """The same of the model that `optimize` makes of it; layers that stay as they are count as they are."""
        known = [
            layer.optimized_bytes_per_token if layer.optimized_bytes_per_token is not None else layer.bytes_per_token
            for layer in self.layers
            if layer.bytes_per_token is not None
        ]
        return sum(filter(None, known)) if known else None

    def to_dict(self) -> dict[str, Any]:
        """The document that `ort_moe/json_schemas/inspect.json` describes; what is not known is null."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "weight_bytes": self.weight_bytes,
            "expert_bytes_per_token": self.bytes_per_token,
            "optimized_expert_bytes_per_token": self.optimized_bytes_per_token,
            "operators": dict(sorted(self.operators.items())),
            "layers": [{**asdict(layer), "bytes_per_token": layer.bytes_per_token} for layer in self.layers],
            "cuda_graph_blockers": [asdict(blocker) for blocker in self.blockers],
        }

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        nodes = sum(self.operators.values())
        size = f"{counted(len(self.layers), 'MoE layer')}, {counted(nodes, 'node')}"
        parts: list[RenderableType] = [
            Text(f"{self.model}: {size}, {byte_size(self.weight_bytes)} of weights"),
        ]
        if self.layers:
            parts += [self._layers_table(), self._weights_table(), Text(self._reading_text())]
        parts.append(Text(self._capture_text()))
        return Group(*parts)

    def _layers_table(self) -> RenderableType:
        from rich.text import Text

        listing = table("layer", "node", "is a", "E", "K", "router", numbers=("layer", "E", "K"), prose=("router",))
        for number, layer in enumerate(self.layers):
            experts, k = str(layer.experts or "?"), str(layer.k or "?")
            listing.add_row(str(number), Text(layer.node), layer.kind, experts, k, layer.router)
        return listing

    def _weights_table(self) -> RenderableType:
        headings = ("layer", "experts' weights", "per token", "optimised")
        listing = table(*headings, numbers=("layer", "per token", "optimised"), prose=("experts' weights",))
        for number, layer in enumerate(self.layers):
            read, optimized = layer.bytes_per_token, layer.optimized_bytes_per_token
            weights = [*map(str, layer.weights), *(["all experts for every token"] if layer.all_experts else [])]
            weights += ["copied for every token"] if layer.copied else []
            listing.add_row(
                str(number),
                "\n".join(weights) or "not recognised",
                "?" if read is None else byte_size(read),
                "stays" if optimized is None else byte_size(optimized),
            )
        return listing

    def _reading_text(self) -> str:
        if self.bytes_per_token is None:
            return "experts' weights read per token: not known, for none were recognised behind the routers"
        known = sum(layer.bytes_per_token is not None for layer in self.layers)
        of = "" if known == len(self.layers) else f", in {known} of {len(self.layers)} MoE layers"
        told = f"experts' weights read per token{of}: {byte_size(self.bytes_per_token)}"
        copying = sum(layer.copied for layer in self.layers)
        if copying:
            told += f", after they are copied in {copying} of {len(self.layers)} layers"
        if self.optimized_bytes_per_token == self.bytes_per_token:
            return told
        return f"{told}; optimised, with the weights as they are: {byte_size(self.optimized_bytes_per_token or 0)}"

    def _capture_text(self) -> str:
        if not self.blockers:
            return "CUDA graph: nothing in the way"
        lines = ["CUDA graph: in the way are", *(f"  {line}" for line in summary(self.blockers))]
        return "\n".join(lines)


@dataclass(frozen=True)
class Changes(Printable):
    """What is different between two models.

    Attributes:
        before: The first.
        after: The second.
    """

    before: Inspection
    after: Inspection

    @property
    def operators(self) -> dict[str, tuple[int, int]]:
        """Number of nodes before and after, of the operators of which it changed."""
        a, b = self.before.operators, self.after.operators
        return {n: (a.get(n, 0), b.get(n, 0)) for n in sorted({*a, *b}) if a.get(n, 0) != b.get(n, 0)}

    @property
    def layers(self) -> list[tuple[int, Layer | None, Layer | None]]:
        """Number, before and after, of the layers that changed."""
        from itertools import zip_longest

        pairs = enumerate(zip_longest(self.before.layers, self.after.layers))
        return [(number, a, b) for number, (a, b) in pairs if _gist(a) != _gist(b)]

    def to_dict(self) -> dict[str, Any]:
        """The document that `ort_moe/json_schemas/changes.json` describes."""
        return {
            "schema": SCHEMA,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "operators": {name: {"before": a, "after": b} for name, (a, b) in self.operators.items()},
            "layers": [number for number, _, _ in self.layers],
        }

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [Text(f"{self.before.model} -> {self.after.model}")]
        totals = table("", "before", "after", numbers=("before", "after"))
        for what, a, b in (
            ("nodes", *(str(sum(i.operators.values())) for i in (self.before, self.after))),
            ("weights", *(byte_size(i.weight_bytes) for i in (self.before, self.after))),
            ("experts' weights per token", *(byte_size(i.bytes_per_token or 0) for i in (self.before, self.after))),
            ("nodes in the way of a CUDA graph", *(str(len(i.blockers)) for i in (self.before, self.after))),
        ):
            totals.add_row(what, a, b)
        parts.append(totals)
        if self.layers:
            listing = table("layer", "before", "after", numbers=("layer",), prose=("before", "after"))
            for number, old, new in self.layers:
                listing.add_row(str(number), _gist(old), _gist(new))
            parts.append(listing)
        if self.operators:
            listing = table("operator", "before", "after", numbers=("before", "after"))
            for name, (before, after) in self.operators.items():
                listing.add_row(name, str(before), str(after))
            parts.append(listing)
        else:
            parts.append(Text("the same nodes"))
        return Group(*parts)


def inspect(source: str | os.PathLike[str]) -> Inspection:
    """Reads a model and finds its MoE layers, by rewriting it in memory; nothing is written.

    Args:
        source: An ONNX model, or a folder with one.

    Raises:
        ModelError: The model cannot be read.
    """
    from ort_moe.files.loading import load_model
    from ort_moe.files.model_path import model_file
    from ort_moe.graphs.operators import count_operators
    from ort_moe.rewrites import prepare, rewrite
    from ort_moe.rewrites.contrib_experts import RULE as CONTRIB_RULE
    from ort_moe.rewrites.experts import EXPERTS_RULES
    from ort_moe.rewrites.shared_gate import split_shared_gates
    from ort_moe.rewrites.sites import graph_name

    source = model_file(source)
    model = load_model(source)
    operators = count_operators(model)
    weight_bytes = sum(
        v.const_value.nbytes for g in model.graphs() for v in g.initializers.values() if v.const_value is not None
    )
    blockers = tuple(capture_blockers(model.graph))
    prepare(model)  # as the rewrites will: layers of before and after are told apart by name
    split_shared_gates(model)
    contrib = [_contrib_layer(node) for node in model.graph.all_nodes() if is_contrib_moe(node)]
    fused_before = {node.name for node in model.graph.all_nodes() if is_router(node)}
    # The experts stay: what is read of their weights is told of the model as it is.
    sites = rewrite(model, skip=(*EXPERTS_RULES, CONTRIB_RULE.name)).sites
    routing = {(site.graph, site.node): site for site in sites if not _is_no_router(site)}
    routers = [
        _router_layer(node, routing[place], fused=node.name in fused_before)
        for node in model.graph.all_nodes()
        if (place := (graph_name(node), node.name)) in routing and node.op_type in _CHOICES
    ]
    fused = _fused_weights(source)
    layers = tuple(_with_optimized(layer, fused.get(layer.node)) for layer in (*routers, *contrib))
    return Inspection(os.fspath(source), layers, Counter(operators), weight_bytes, blockers)


@dataclass(frozen=True)
class _FusedWeights:
    """What a FusedExperts of the optimised model reads.

    Attributes:
        stacks: Its stacks.
        k: K.
        all_before: Whether the form that the experts had computes all of them for every token.
    """

    stacks: tuple[ExpertWeight, ...]
    k: int | None
    all_before: bool


def _fused_weights(source: str | os.PathLike[str]) -> dict[str, _FusedWeights]:
    """What the FusedExperts that `optimize` makes read, by the name of what chooses, or of the contrib node."""
    from ort_moe.files.loading import load_model
    from ort_moe.rewrites import rewrite
    from ort_moe.rewrites.experts import ALL_EXPERTS_FORMS

    model = load_model(source)
    sites = [site for site in rewrite(model).experts if site.status == "whole"]
    nodes = {node.name: node for node in model.graph.all_nodes() if is_experts(node)}
    found: dict[str, _FusedWeights] = {}
    for site in sites:
        stacks = tuple(fused_stacks(nodes[site.node])) if site.node in nodes else ()
        weights = _FusedWeights(stacks, site.k, site.form in ALL_EXPERTS_FORMS)
        found |= dict.fromkeys(filter(None, (site.router, site.node)), weights)
    return found


def _with_optimized(layer: Layer, fused: _FusedWeights | None) -> Layer:
    """The layer with what it reads when it is fused; with its weights, where only that has told them."""
    if fused is None or not fused.stacks:
        return layer
    if not layer.weights:
        experts = layer.experts or fused.stacks[0].shape[0]
        layer = replace(layer, weights=fused.stacks, all_experts=fused.all_before, experts=experts)
    return replace(layer, optimized_bytes_per_token=_read_per_token(fused.stacks, fused.k or layer.k))


def _read_per_token(stacks: tuple[ExpertWeight, ...], k: int | None, *, all_experts: bool = False) -> int | None:
    """Bytes of some stacks that one token reads; None where there are none, or K is not known."""
    if not stacks or (k is None and not all_experts):
        return None
    # A router may have choices without an expert: the stacks tell the number of experts.
    return sum(weight.nbytes if all_experts else weight.nbytes // weight.shape[0] * (k or 0) for weight in stacks)


def _contrib_layer(node: ir.Node) -> Layer:
    positions = [i for i in _CONTRIB_WEIGHTS[node.op_type] if i < len(node.inputs)]
    found = [stack(value, None) for i in positions if (value := node.inputs[i]) is not None]
    weights = tuple(weight for weight, _ in filter(None, found))
    k = node.attributes.get_int("k", 1)
    router = f"softmax, top {k}" + (", normalised" if node.attributes.get_int("normalize_routing_weights", 0) else "")
    return Layer(
        node.name or "", f"contrib {node.op_type}", weights[0].shape[0] if weights else None, k, router, weights
    )


def _is_no_router(site: Site) -> bool:
    return any(finding.reason.slug == "topk-not-a-router" for finding in site.findings)


def _router_layer(node: ir.Node, site: Site, fused: bool) -> Layer:
    indices = node.outputs[0 if node.op_type == "ArgMax" else 1]
    behind = expert_weights(indices, site.experts)
    experts = site.experts
    if experts is None and behind.stacks:
        experts = behind.stacks[0].shape[0]
    router = "not recognised" if site.attributes is None else phrase(site.attributes, site.inputs)
    kind = "fused router" if fused else "router"
    return Layer(node.name or "", kind, experts, site.k, router, behind.stacks, behind.all_experts, behind.copied)


def _gist(layer: Layer | None) -> str:
    """A layer in a line, without what names it."""
    if layer is None:
        return "-"
    weights = ", ".join(map(str, layer.weights)) or "weights not recognised"
    experts = "? experts" if layer.experts is None else counted(layer.experts, "expert")
    read = "" if layer.bytes_per_token is None else f"; {byte_size(layer.bytes_per_token)} per token"
    return f"{layer.kind}: {experts}; {layer.router}; {weights}{read}"
