"""Runs each operator once, small, and holds it against its NumPy reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ort_moe.ops import DOMAIN, OPS, VERSION, AttributeValue
from ort_moe.running.session import ON_CPU
from ort_moe.verification.runnable_model import open_session

_TOKENS, _EXPERTS, _CHOSEN, _HIDDEN, _INNER = 5, 16, 4, 64, 64
_EXPERTS_TOLERANCE = {"float32": 1e-6, "float16": 2e-3}
"""FusedExperts has no promised bits: the norm of its error beside the norm of its result, by the type of x.

On CUDA both types are looked at because they run other kernels, float16 those of the tensor cores.
"""


def smoke(op_name: str, providers: Sequence[str] = ON_CPU) -> str | None:
    """What is wrong with an operator on the given execution providers.

    None where it is right: bit for bit, or within the tolerance of an op without promised bits.

    Raises:
        ModelError: ONNX Runtime cannot load or run it.
        KeyError: There is no such operator.
    """
    return _CASES[op_name](providers)


def _fused_router(providers: Sequence[str]) -> str | None:
    import numpy as np

    from ort_moe.reference.fused_router import fused_router

    # A router with a bias and groups: it goes through every step of the kernel.
    attributes: dict[str, AttributeValue] = {"k": _CHOSEN, "score": "sigmoid", "normalize": 1, "scale": 2.5}
    attributes |= {"num_groups": 4, "topk_groups": 2, "group_score_top": 2}
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((_TOKENS, _EXPERTS), dtype=np.float32)
    bias = rng.standard_normal(_EXPERTS, dtype=np.float32)
    got = _run("FusedRouter", {"logits": logits, "selection_bias": bias}, attributes, providers)
    weights, indices = fused_router(logits, bias, None, **attributes)
    if not np.array_equal(got["indices"], indices):
        return "it chooses other experts than the reference"
    if not np.array_equal(got["weights"], weights):
        return f"its weights differ from the reference by up to {np.abs(got['weights'] - weights).max():.1e}"
    return None


def _shared_gate_router(providers: Sequence[str]) -> str | None:
    import numpy as np

    from ort_moe.reference.shared_gate_router import shared_gate_router

    attributes: dict[str, Any] = {"k": _CHOSEN, "score": "softmax", "shared_base": _EXPERTS}
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {
        "logits": rng.standard_normal((_TOKENS, _EXPERTS), dtype=np.float32),
        "hidden": rng.standard_normal((_TOKENS, _HIDDEN), dtype=np.float32),
        "gate_weight": rng.standard_normal((2, _HIDDEN), dtype=np.float32),
    }
    got = _run("SharedGateRouter", feeds, attributes, providers)
    weights, indices = shared_gate_router(**feeds, **attributes)
    if not np.array_equal(got["indices"], indices):
        return "it chooses other experts than the reference"
    if not np.array_equal(got["weights"], weights):
        return f"its weights differ from the reference by up to {np.abs(got['weights'] - weights).max():.1e}"
    return None


def _permute_tokens(providers: Sequence[str]) -> str | None:
    import numpy as np

    from ort_moe.reference.permute_tokens import permute_tokens

    rng = np.random.default_rng(0)
    x = rng.standard_normal((_TOKENS, _HIDDEN), dtype=np.float32)
    indices = rng.integers(-1, _EXPERTS + 1, (_TOKENS, _CHOSEN), np.int32)  # some name no expert
    got = _run("PermuteTokens", {"x": x, "indices": indices}, {"num_experts": _EXPERTS}, providers)
    permuted, maps = permute_tokens(x, indices, num_experts=_EXPERTS)
    for name, expected in {"permuted_x": permuted, **maps._asdict()}.items():
        if not np.array_equal(got[name], expected):
            return f"its {name} differs from the reference in {np.sum(got[name] != expected)} of {expected.size} values"
    return None


def _finalize_routing(providers: Sequence[str]) -> str | None:
    import numpy as np

    from ort_moe.reference.finalize_routing import finalize_routing
    from ort_moe.reference.routing_maps import routing_maps

    rng = np.random.default_rng(0)
    indices = rng.integers(0, _EXPERTS, (_TOKENS, _CHOSEN), np.int32)
    feeds: dict[str, Any] = {
        "expert_output": rng.standard_normal((_TOKENS * _CHOSEN, _HIDDEN), dtype=np.float32),
        "weights": rng.standard_normal((_TOKENS, _CHOSEN), dtype=np.float32),
        "indices": indices,
        "unpermuted_to_permuted": routing_maps(indices, _EXPERTS).unpermuted_to_permuted,
    }
    got = _run("FinalizeRouting", feeds, {}, providers)["y"]
    expected = finalize_routing(**feeds)
    if not np.array_equal(got, expected):
        return f"its sums differ from the reference by up to {np.abs(got - expected).max():.1e}"
    return None


def _gather_finalize(providers: Sequence[str]) -> str | None:
    import numpy as np

    from ort_moe.reference.gather_finalize import gather_finalize
    from ort_moe.reference.routing_maps import routing_maps

    rng = np.random.default_rng(0)
    local, capacity = _EXPERTS // 2, _TOKENS
    indices = rng.integers(0, _EXPERTS, (_TOKENS, _CHOSEN), np.int32)
    maps = routing_maps(indices, _EXPERTS)
    feeds: dict[str, Any] = {
        "expert_output": rng.standard_normal((local, capacity, _HIDDEN), dtype=np.float32),
        "weights": rng.standard_normal((_TOKENS, _CHOSEN), dtype=np.float32),
        "indices": indices,
        "unpermuted_to_permuted": maps.unpermuted_to_permuted,
        "expert_first_token_offset": maps.expert_first_token_offset,
    }
    attributes: dict[str, Any] = {"hidden_size": _HIDDEN - 1, "local_begin": _EXPERTS // 4, "local_count": local}
    got = _run("GatherFinalize", feeds, attributes, providers)["y"]
    expected = gather_finalize(**feeds, **attributes)
    if not np.array_equal(got, expected):
        return f"its sums differ from the reference by up to {np.abs(got - expected).max():.1e}"
    return None


def _fused_experts(providers: Sequence[str]) -> str | None:
    for dtype, tolerance in _EXPERTS_TOLERANCE.items():
        error = _experts_error(dtype, providers)
        if not error < tolerance:  # NaN too
            return f"its result in {dtype} differs from the reference by {error:.1e} of its norm"
    return None


def _experts_error(dtype: str, providers: Sequence[str]) -> float:
    import numpy as np

    from ort_moe.packing import nvfp4
    from ort_moe.reference.fused_experts import ExpertLayer, fused_experts

    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {
        "x": rng.standard_normal((_TOKENS, _HIDDEN), dtype=np.float32).astype(dtype),
        "weights": rng.random((_TOKENS, _CHOSEN), dtype=np.float32),
        "indices": rng.integers(0, _EXPERTS, (_TOKENS, _CHOSEN), np.int32),
    }
    layers: dict[str, ExpertLayer] = {}
    constants: dict[str, Any] = {}
    for name, rows, depth in (("fc1", 2 * _INNER, _HIDDEN), ("fc2", _HIDDEN, _INNER)):
        packed = nvfp4.quantize(rng.normal(0.0, depth**-0.5, (_EXPERTS, rows, depth)).astype(np.float32))
        layers[name] = ExpertLayer(*packed)
        constants |= {f"{name}_{part}": value for part, value in packed._asdict().items()}
    attributes: dict[str, AttributeValue] = {"weight_format": "nvfp4", "activation": "silu", "gated": 1}
    got = _run("FusedExperts", feeds, attributes, providers, constants)["y"]
    expected = fused_experts(
        feeds["x"], feeds["weights"], feeds["indices"], layers["fc1"], layers["fc2"], None, **attributes
    )
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def _router_probs(providers: Sequence[str]) -> str | None:
    import numpy as np

    from ort_moe.reference.router_probs import router_probs

    rng = np.random.default_rng(0)
    logits = rng.standard_normal((_TOKENS, _EXPERTS), dtype=np.float32)
    bias = rng.standard_normal(_EXPERTS, dtype=np.float32)
    attributes: dict[str, AttributeValue] = {"k": _CHOSEN, "score": "sigmoid", "normalize": 1, "scale": 2.5}
    feeds = {"logits": logits, "selection_bias": bias}
    got = _run("RouterProbs", feeds, attributes, providers, outputs=("probs", "routing_map"))
    expected = router_probs(logits, bias, None, **attributes)
    if not np.array_equal(got["routing_map"], expected.routing_map):
        return "it chooses other experts than the reference"
    if not np.array_equal(got["probs"], expected.probs):
        return f"its weights differ from the reference by up to {np.abs(got['probs'] - expected.probs).max():.1e}"
    return None


def _router_scores(providers: Sequence[str]) -> str | None:
    import numpy as np

    from ort_moe.reference.router_scores import router_scores

    logits = np.random.default_rng(0).standard_normal((_TOKENS, _EXPERTS), dtype=np.float32)
    attributes: dict[str, AttributeValue] = {"k": _CHOSEN, "score": "softmax"}
    got = _run("RouterScores", {"logits": logits}, attributes, providers, outputs=("scores", "routing_map"))
    expected = router_scores(logits, **attributes)
    if not np.array_equal(got["routing_map"], expected.routing_map):
        return "it marks other experts than the reference"
    if not np.array_equal(got["scores"], expected.scores):
        return f"its scores differ from the reference by up to {np.abs(got['scores'] - expected.scores).max():.1e}"
    return None


def _aux_loss(providers: Sequence[str]) -> str | None:
    import numpy as np

    from ort_moe.reference.aux_loss import aux_loss

    rng = np.random.default_rng(0)
    probs = rng.random((_TOKENS, _EXPERTS), dtype=np.float32)
    counts = rng.integers(0, _TOKENS, _EXPERTS)
    attributes: dict[str, AttributeValue] = {"k": _CHOSEN, "coeff": 0.01}
    got = _run("AuxLoss", {"probs": probs, "tokens_per_expert": counts}, attributes, providers)["loss"]
    expected = aux_loss(probs, counts, None, **attributes)
    return None if got == expected else f"its loss differs from the reference by {abs(got - expected):.1e}"


_CASES: Mapping[str, Callable[[Sequence[str]], str | None]] = {
    "FusedRouter": _fused_router,
    "SharedGateRouter": _shared_gate_router,
    "PermuteTokens": _permute_tokens,
    "FinalizeRouting": _finalize_routing,
    "GatherFinalize": _gather_finalize,
    "FusedExperts": _fused_experts,
    "RouterProbs": _router_probs,
    "RouterScores": _router_scores,
    "AuxLoss": _aux_loss,
}


def _run(
    op_name: str,
    feeds: Mapping[str, Any],
    attributes: Mapping[str, AttributeValue],
    providers: Sequence[str],
    constants: Mapping[str, Any] | None = None,
    outputs: Sequence[str] = (),
) -> dict[str, Any]:
    """The first outputs of one node, by default the required ones, whose inputs are fed or constants of the model."""
    from onnx import TensorProto, helper, numpy_helper

    op = OPS[op_name]
    constants = constants or {}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    wanted = [tensor for tensor in op.outputs if (tensor.name in outputs if outputs else not tensor.optional)]
    types = [
        inputs[0].type.tensor_type.elem_type if len(t.types) > 1 else TensorProto.DataType.Value(t.types[0].upper())
        for t in wanted
    ]
    results = [helper.make_tensor_value_info(t.name, kind, None) for t, kind in zip(wanted, types, strict=True)]
    node_inputs = [tensor.name if tensor.name in {**feeds, **constants} else "" for tensor in op.inputs]
    node = helper.make_node(op_name, node_inputs, [tensor.name for tensor in wanted], name="smoke", domain=DOMAIN)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in op.complete(attributes).items())
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, VERSION)]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph([node], "smoke", inputs, results, initializers)
    model = helper.make_model(graph, ir_version=10, opset_imports=opsets)
    return open_session(model, f"a {op_name}", with_library=True, providers=providers)(dict(feeds))
