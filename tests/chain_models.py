"""Models of whole decode chains: routers with maps, experts and finalize, layer upon layer, in one session."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from ort_moe.ops import DOMAIN, FINALIZE_ROUTING, FUSED_EXPERTS, FUSED_ROUTER, ROUTING_MAPS, VERSION, AttributeValue, Op
from tests.experts_cases import ExpertsCase
from tests.op_models import element_type
from tests.router_cases import DTYPES, random_logits

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Chain:
    """`layers` layers of one set of experts: logits{n}, x0 and rows to x{n + 1} and z{n}.

    x{n + 1} = x{n} + experts of logits{n}; z{n} = x{n} + the finalize of `rows` by the same routing. FusedExperts takes
    the router's maps in every other layer.
    """

    case: ExpertsCase
    layers: int = 3

    @property
    def router(self) -> dict[str, AttributeValue]:
        return FUSED_ROUTER.complete({"k": self.case.k, "score": "softmax", "normalize": 1})

    @cached_property
    def constants(self) -> dict[str, Array]:
        """The experts and `rows` (R, H)."""
        rng = np.random.default_rng(7)
        rows = rng.normal(0.0, 1.0, (self.case.leading[0] * self.case.k, self.case.hidden))
        weights = {name: array for name, array in self.case.feeds.items() if name.startswith("fc")}
        return weights | {"rows": rows.astype(DTYPES[self.case.onnx_type])}

    def inputs(self, seed: int) -> dict[str, Array]:
        """x0 and the logits, other ones for each seed."""
        rng, dtype = np.random.default_rng(seed), DTYPES[self.case.onnx_type]
        tokens = self.case.leading[0]
        values = {"x0": rng.normal(0.0, 1.0, (tokens, self.case.hidden)).astype(dtype)}
        for n in range(self.layers):
            texture = ("normal", "ties", "wide")[(n + seed) % 3]
            values[f"logits{n}"] = random_logits(texture, (tokens, self.case.experts), dtype, rng)
        return values

    def outputs(self) -> list[str]:
        """All have the shape and type of x0."""
        return [f"{name}{n + first}" for n in range(self.layers) for name, first in (("x", 1), ("z", 0))]

    def model(self) -> onnx.ModelProto:
        nodes = []
        for n in range(self.layers):
            maps = {tensor.name: f"{tensor.name}{n}" for tensor in ROUTING_MAPS}
            routed = {"weights": f"weights{n}", "indices": f"indices{n}"}
            nodes.append(_node(FUSED_ROUTER, {"logits": f"logits{n}"}, routed | maps, self.router))
            given = routed | {"x": f"x{n}", "residual": f"x{n}"} | {name: name for name in self.constants}
            if n % 2 == 0:
                given |= maps
            nodes.append(_node(FUSED_EXPERTS, given, {"y": f"x{n + 1}"}, self.case.all_attributes))
            given = routed | maps | {"expert_output": "rows", "residual": f"x{n}"}
            nodes.append(_node(FINALIZE_ROUTING, given, {"y": f"z{n}"}, {}))
        values = self.constants | self.inputs(0)
        x0 = values["x0"]
        graph = helper.make_graph(
            nodes,
            "chain",
            [helper.make_tensor_value_info(name, element_type(v.dtype), v.shape) for name, v in values.items()],
            [helper.make_tensor_value_info(name, element_type(x0.dtype), x0.shape) for name in self.outputs()],
        )
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, VERSION)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _node(
    op: Op, inputs: dict[str, str], outputs: dict[str, str], attributes: dict[str, AttributeValue]
) -> onnx.NodeProto:
    names = [inputs.get(tensor.name, "") for tensor in op.inputs]
    while not names[-1]:
        names.pop()
    complete: dict[str, Any] = op.complete(attributes)
    return helper.make_node(op.name, names, [outputs[tensor.name] for tensor in op.outputs], domain=DOMAIN, **complete)
