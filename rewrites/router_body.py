"""The portable body of a router: a model-local function of standard operators, one overload per configuration.

The body takes the steps of the op's contract one by one in float32, whatever the logits' type. It ranks like the op,
equal keys by the lower index, but leaves the order of sums and the treatment of NaN to the runtime.
"""

from __future__ import annotations

import hashlib
import json
import math

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ort_moe.graphs.node_kinds import is_shared_gate_router
from ort_moe.ops import DOMAIN, FUSED_ROUTER, SHARED_GATE_ROUTER, VERSION, Op
from ort_moe.ops.router_config import RouterConfig
from ort_moe.rewrites.body_writer import BodyWriter
from ort_moe.rewrites.router_node import Router
from ort_moe.rewrites.values import dim

_SOFTPLUS_THRESHOLD = 20.0
"""Above it softplus(x) is x in float32."""


def build_function(router: Router, opset: int) -> ir.Function:
    """The function for a node's configuration, written in the model's standard operator set."""
    inputs = [ir.Value(name=tensor.name) for tensor, _ in zip(FUSED_ROUTER.inputs, router.node.inputs, strict=False)]
    written = _Body(
        RouterConfig.from_attributes(router.attributes),
        opset,
        router.experts,
        has_bias=router.selection_bias is not None,
        has_expert_scale=router.expert_scale is not None,
    )
    return _function(FUSED_ROUTER, router, opset, inputs, written.write(*inputs), written.tape)


def shared_gate_router(node: ir.Node) -> Router:
    """The router in a SharedGateRouter; its attributes are those of the node."""
    logits, _, _, *vectors = node.inputs
    bias, scale = (*vectors, None, None)[:2]
    if logits is None:
        raise ValueError(f"SharedGateRouter '{node.name}': input 'logits' is required, got none")
    return Router(node, logits, bias, scale, {name: attribute.value for name, attribute in node.attributes.items()})


def build_shared_gate_function(router: Router, opset: int) -> ir.Function:
    """The function for the configuration of a SharedGateRouter whose number of shared experts is known."""
    op, node = SHARED_GATE_ROUTER, router.node
    shared = dim(node.inputs[2], 0)
    assert shared is not None
    inputs = [ir.Value(name=tensor.name) for tensor, _ in zip(op.inputs, node.inputs, strict=False)]
    logits, hidden, gate_weight, *vectors = inputs
    written = _Body(
        RouterConfig.from_attributes({n: v for n, v in router.attributes.items() if not n.startswith("shared_")}),
        opset,
        router.experts,
        has_bias=router.selection_bias is not None,
        has_expert_scale=router.expert_scale is not None,
    )
    first = int(router.attributes["shared_base"])
    outputs = written.join_gates(
        written.write(logits, *vectors),
        (hidden, gate_weight),
        np.arange(first, first + shared, dtype=np.int32),
        float(router.attributes["shared_scale"]),
    )
    return _function(op, router, opset, inputs, outputs, written.tape)


def _function(
    op: Op,
    router: Router,
    opset: int,
    inputs: list[ir.Value],
    outputs: tuple[ir.Value, ir.Value],
    tape: ir.tape.Tape,
) -> ir.Function:
    for value, tensor in zip(outputs, op.outputs, strict=False):
        value.name = tensor.name
    graph = ir.Graph(inputs, outputs, nodes=tape.nodes, opset_imports={"": opset})
    attributes = [ir.Attr(name, ir.AttributeType.UNDEFINED, None) for name in sorted(router.attributes)]
    return ir.Function(DOMAIN, op.name, overload(router, opset), graph=graph, attributes=attributes)


def overload(router: Router, opset: int) -> str:
    """A name that tells the configuration: readable in front, unique by its digest."""
    description = {
        "attributes": {name: str(value) for name, value in sorted(router.attributes.items())},
        "inputs": [value is not None for value in router.node.inputs],
        "experts": router.experts if router.has_groups else None,
        **({"shared": dim(router.node.inputs[2], 0)} if is_shared_gate_router(router.node) else {}),
        "opset": opset,
        "version": VERSION,
    }
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:8]
    return f"{router.attributes['score']}_top{router.k}_{digest}"


class _Body(BodyWriter):
    """Writes the steps of one configuration to a tape."""

    def __init__(
        self,
        config: RouterConfig,
        opset: int,
        experts: int | None,
        *,
        has_bias: bool,
        has_expert_scale: bool,
    ) -> None:
        super().__init__(ir.tape.Tape())
        self._config = config
        self._opset = opset
        self._experts = experts
        self._has_bias = has_bias
        self._has_expert_scale = has_expert_scale

    def write(
        self, logits: ir.Value, selection_bias: ir.Value | None = None, expert_scale: ir.Value | None = None
    ) -> tuple[ir.Value, ir.Value]:
        config = self._config
        x = self._op("Cast", logits, to=ir.DataType.FLOAT)
        if config.softcap != 0.0:
            cap = self._float(config.softcap)
            x = self._op("Mul", cap, self._op("Tanh", self._op("Div", x, cap)))
        if config.score == "sparse_mixer":
            v, ids = self._mix_sparsely(x)
            return self._finish(v, ids, expert_scale)
        over_chosen = config.score_after_topk or config.chosen_softmax
        ranks_x = config.ranks_logits(self._has_bias)
        needs_score = not ranks_x or not (over_chosen or config.weights_from == "selection")
        score = self._score(x) if needs_score else x
        key = x if ranks_x else score
        if self._has_bias:
            assert selection_bias is not None
            key = self._op("Add", key, selection_bias)
        if config.has_groups:
            key = self._mask_groups(key)
        ranked, ids = self._topk(key, config.k)
        if config.weights_from == "selection":
            v = ranked
        else:
            v = self._op("GatherElements", x if over_chosen else score, ids, axis=-1)
        return self._finish(self._score(v) if over_chosen else v, ids, expert_scale)

    def join_gates(
        self,
        routed: tuple[ir.Value, ir.Value],
        rows: tuple[ir.Value, ir.Value],
        ids: npt.NDArray[np.int32],
        scale: float,
    ) -> tuple[ir.Value, ir.Value]:
        """The router's weights and indices, and behind them those of shared experts: sigmoid(hidden . gate) * scale."""
        hidden, gate_weight = (self._op("Cast", value, to=ir.DataType.FLOAT) for value in rows)
        gate = self._op("Transpose", gate_weight, perm=[1, 0])
        share = self._op("Mul", self._op("Sigmoid", self._op("MatMul", hidden, gate)), self._float(scale))
        numbers = self._constant(ids)
        spread = self._op("Expand", numbers, self._op("Shape", share))
        weights, indices = routed
        return self._op("Concat", weights, share, axis=-1), self._op("Concat", indices, spread, axis=-1)

    def _finish(self, v: ir.Value, ids: ir.Value, expert_scale: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """Normalise, scale, and the indices' type."""
        weights = self._normalized(v)
        weights = self._op("Mul", weights, self._float(self._config.scale))
        if self._has_expert_scale:
            assert expert_scale is not None
            weights = self._op("Mul", weights, self._op("Gather", expert_scale, ids, axis=0))
        return weights, self._op("Cast", ids, to=ir.DataType.INT32)

    def _normalized(self, v: ir.Value) -> ir.Value:
        config = self._config
        if not config.normalize or config.chosen_softmax:
            return v
        divisor = self._sum(v, keepdims=1)
        if config.normalize_eps != 0.0:
            divisor = self._op("Add", divisor, self._float(config.normalize_eps))
        if config.normalize_min != -math.inf:
            divisor = self._op("Max", divisor, self._float(config.normalize_min))
        return self._op("Div", v, divisor)

    def _score(self, x: ir.Value) -> ir.Value:
        if self._config.score == "softmax":
            return self._op("Softmax", x, axis=-1)
        if self._config.score == "sigmoid":
            return self._op("Sigmoid", x)
        if self._config.score == "sqrtsoftplus":
            linear = self._op("Greater", x, self._float(_SOFTPLUS_THRESHOLD))
            return self._op("Sqrt", self._op("Where", linear, x, self._op("Softplus", x)))
        return x

    def _mix_sparsely(self, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Two choices, each weighed by its softmax over the experts within the threshold of it."""
        weights: list[ir.Value] = []
        ids: list[ir.Value] = []
        for choice in range(self._config.k):
            if choice:
                # The next choice is made without the last, which then shares with weight 0.
                gone = self._op("Expand", self._float(-math.inf), self._op("Shape", ids[-1]))
                x = self._op("ScatterElements", x, ids[-1], gone, axis=-1)
            best, index = self._topk(x, 1)
            distance = self._op("Div", self._op("Sub", best, x), self._op("Max", self._op("Abs", x), best))
            far = self._op("Greater", distance, self._float(self._config.mixer_threshold))
            shares = self._op("Where", far, self._float(0.0), self._op("Exp", self._op("Sub", x, best)))
            weights.append(self._op("Reciprocal", self._sum(shares, keepdims=1)))
            ids.append(index)
        return self._op("Concat", *weights, axis=-1), self._op("Concat", *ids, axis=-1)

    def _mask_groups(self, key: ir.Value) -> ir.Value:
        """Keys outside the best groups become the fill."""
        config, groups = self._config, self._config.num_groups
        shape = self._op("Shape", key)
        if self._experts is None:
            size = self._op("Div", self._op("Gather", shape, self._ints(-1)), self._ints(groups))
            by_group = self._op("Concat", self._ints(-1, groups), size, axis=0)
        else:
            by_group = self._ints(-1, groups, self._experts // groups)
        grouped = self._op("Reshape", key, by_group)
        best, _ = self._topk(grouped, config.group_score_top)
        scores = self._sum(best, keepdims=0)
        _, kept = self._topk(scores, config.topk_groups)
        # One-hot by comparison: (tokens, kept, 1) with (groups) -> (tokens, groups, 1).
        hits = self._op("Equal", self._op("Unsqueeze", kept, self._ints(-1)), self._ints(*range(groups)))
        counts = self._op("ReduceSum", self._op("Cast", hits, to=ir.DataType.INT32), self._ints(1), keepdims=0)
        mask = self._op("Cast", self._op("Unsqueeze", counts, self._ints(-1)), to=ir.DataType.BOOL)
        masked = self._op("Where", mask, grouped, self._float(config.group_fill))
        # Without rows the shape has a 0, which is to be taken as it is (and cannot be before operator set 14).
        return self._op("Reshape", masked, shape, **({"allowzero": 1} if self._opset >= 14 else {}))

    def _topk(self, x: ir.Value, k: int) -> tuple[ir.Value, ir.Value]:
        values, ids = self.tape.op_multi_out(
            "TopK", [x, self._ints(k)], {"axis": -1, "largest": 1, "sorted": 1}, num_outputs=2
        )
        return values, ids

    def _sum(self, x: ir.Value, *, keepdims: int) -> ir.Value:
        return self._op("ReduceSum", x, self._ints(-1), keepdims=keepdims)
