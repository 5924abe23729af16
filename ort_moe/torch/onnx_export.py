"""Translations of the ops `ort_moe::*` to ONNX nodes, for `torch.onnx.export`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ort_moe.ops import AUX_LOSS, DOMAIN, ROUTER_PROBS, ROUTER_SCORES, VERSION, Op
from ort_moe.torch import library_ops


def onnx_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What `torch.onnx.export(..., dynamo=True, custom_translation_table=...)` needs to write the nodes of our ops."""
    return {
        torch.ops.ort_moe.router_probs.default: _router_probs,
        torch.ops.ort_moe.router_probs_indices.default: _router_probs_indices,
        torch.ops.ort_moe.router_scores.default: _router_scores,
        torch.ops.ort_moe.aux_loss.default: _aux_loss,
    }


def _router_probs(logits: Any, selection_bias: Any, expert_scale: Any, *attributes: Any) -> Sequence[Any]:
    map_name = _map_name(attributes[-1])
    given = dict(zip(library_ops.PROBS_ATTRIBUTES[:-1], attributes[:-1], strict=True))
    return _node(ROUTER_PROBS, (logits, selection_bias, expert_scale), given, ("probs", map_name))


def _router_probs_indices(logits: Any, selection_bias: Any, expert_scale: Any, *attributes: Any) -> Sequence[Any]:
    map_name = _map_name(attributes[-1])
    given = dict(zip(library_ops.PROBS_ATTRIBUTES[:-1], attributes[:-1], strict=True))
    return _node(ROUTER_PROBS, (logits, selection_bias, expert_scale), given, ("probs", map_name, "indices"))


def _router_scores(logits: Any, *attributes: Any) -> Sequence[Any]:
    map_name = _map_name(attributes[-1])
    given = dict(zip(library_ops.SCORES_ATTRIBUTES[:-1], attributes[:-1], strict=True))
    return _node(ROUTER_SCORES, (logits,), given, ("scores", map_name))


def _aux_loss(probs: Any, tokens_per_expert: Any, total: Any, *attributes: Any) -> Any:
    given = dict(zip(library_ops.LOSS_ATTRIBUTES, attributes, strict=True))
    return _node(AUX_LOSS, (probs, tokens_per_expert, total), given, ("loss",))[0]


def _map_name(map_format: str) -> str:
    return "routing_map" if map_format == "byte" else "routing_bitmap"


def _node(op: Op, inputs: Sequence[Any], attributes: dict[str, Any], wanted: Sequence[str]) -> list[Any]:
    """A node with these outputs and those before the last of them: the exporter names every output."""
    from onnxscript import values

    from ort_moe.ops.schemas import schema_of

    last = max(i for i, output in enumerate(op.outputs) if output.name in wanted)
    schema = schema_of(replace(op, outputs=op.outputs[: last + 1]))
    results = values.Op(values.Opset(DOMAIN, VERSION), op.name, schema)(*inputs, **attributes)
    by_name = dict(zip((o.name for o in op.outputs), [results] if last == 0 else results, strict=False))
    return [by_name[name] for name in wanted]
