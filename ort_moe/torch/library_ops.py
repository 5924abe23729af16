"""The `torch.library` ops `ort_moe::*`: kernels by address, fake tensors, gradients.

Arguments are positional: tensors, then the op's attributes in the order of the op table, flags as ints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ort_moe.kernels import training
from ort_moe.ops import AUX_LOSS, ROUTER_PROBS, ROUTER_SCORES, AttributeValue, Op
from ort_moe.ops.router_config import RouterConfig
from ort_moe.ops.training_config import AuxLossConfig, RouterScoresConfig, check_router_probs, router_probs_config
from ort_moe.torch.tensors import (
    COUNT_TYPES,
    address,
    check_counts,
    check_expert_vector,
    check_logits,
    map_shape,
    map_type,
    on_device_of,
    sizes,
    where,
)

PROBS_ATTRIBUTES = (*(attribute.name for attribute in ROUTER_PROBS.attributes), "map_format")
"""What follows the tensors of router_probs."""

SCORES_ATTRIBUTES = (*(attribute.name for attribute in ROUTER_SCORES.attributes), "map_format")
"""What follows the tensors of router_scores."""

LOSS_ATTRIBUTES = tuple(attribute.name for attribute in AUX_LOSS.attributes)
"""What follows the tensors of aux_loss."""


def in_order(names: Sequence[str], values: Mapping[str, AttributeValue]) -> list[AttributeValue]:
    """The values in that order."""
    return [values[name] for name in names]


def _arguments(op: Op, *further: str) -> str:
    kinds = {"int": "int", "float": "float", "string": "str"}
    return ", ".join([*(f"{kinds[a.kind]} {a.name}" for a in op.attributes), *further])


_PROBS_ARGUMENTS = _arguments(ROUTER_PROBS, "str map_format")
_SCORES_ARGUMENTS = _arguments(ROUTER_SCORES, "str map_format")
_LOSS_ARGUMENTS = _arguments(AUX_LOSS)


@lru_cache
def _probs_config(values: tuple[AttributeValue, ...], experts: int, biased: bool) -> RouterConfig:
    config = router_probs_config(dict(zip(PROBS_ATTRIBUTES[:-1], values, strict=True)))
    check_router_probs(config, experts, biased)
    return config


@lru_cache
def _scores_config(values: tuple[AttributeValue, ...], experts: int) -> RouterScoresConfig:
    config = RouterScoresConfig.from_attributes(dict(zip(SCORES_ATTRIBUTES[:-1], values, strict=True)))
    config.check(experts)
    return config


@lru_cache
def _loss_config(values: tuple[AttributeValue, ...], experts: int) -> AuxLossConfig:
    config = AuxLossConfig.from_attributes(dict(zip(LOSS_ATTRIBUTES, values, strict=True)))
    config.check(experts)
    return config


# --- router_probs, router_probs_indices: (Tensor logits, Tensor? selection_bias, Tensor? expert_scale, ...) ---


def _probs_outputs(
    with_indices: bool,
    logits: torch.Tensor,
    selection_bias: torch.Tensor | None,
    expert_scale: torch.Tensor | None,
    *attributes: Any,
) -> tuple[RouterConfig, tuple[torch.Tensor, ...]]:
    """The checked configuration, and the outputs before anything is written."""
    check_logits("RouterProbs", "logits", logits)
    for name, vector in (("selection_bias", selection_bias), ("expert_scale", expert_scale)):
        check_expert_vector("RouterProbs", name, vector, logits)
    config = _probs_config(attributes[:-1], int(logits.shape[-1]), selection_bias is not None)
    map_format = attributes[-1]
    probs = logits.new_empty(logits.shape)
    routing_map = logits.new_empty(map_shape(logits.shape, map_format), dtype=map_type(map_format))
    if not with_indices:
        return config, (probs, routing_map)
    return config, (probs, routing_map, logits.new_empty((*logits.shape[:-1], config.k), dtype=torch.int32))


def _run_probs(with_indices: bool, *arguments: Any) -> tuple[torch.Tensor, ...]:
    config, outputs = _probs_outputs(with_indices, *arguments)
    logits = arguments[0].contiguous()
    selection_bias, expert_scale = (None if vector is None else vector.contiguous() for vector in arguments[1:3])
    with on_device_of(logits):
        training.router_probs(
            config,
            **sizes(logits),
            logits=address(logits),
            probs=address(outputs[0]),
            routing_map=address(outputs[1]),
            map_format=arguments[-1],
            indices=address(outputs[2]) if with_indices else None,
            selection_bias=None if selection_bias is None else address(selection_bias),
            expert_scale=None if expert_scale is None else address(expert_scale),
            **where(logits),
        )
    return outputs


def _run_probs_grad(
    logits: torch.Tensor,
    routing_map: torch.Tensor,
    grad_probs: torch.Tensor,
    expert_scale: torch.Tensor | None,
    *attributes: Any,
) -> torch.Tensor:
    logits, routing_map, grad_probs = (tensor.contiguous() for tensor in (logits, routing_map, grad_probs))
    scale = None if expert_scale is None else expert_scale.contiguous()
    grad_logits = logits.new_empty(logits.shape)
    with on_device_of(logits):
        training.router_probs_grad(
            _probs_config(attributes[:-1], int(logits.shape[-1]), False),
            **sizes(logits),
            logits=address(logits),
            routing_map=address(routing_map),
            grad_probs=address(grad_probs),
            grad_logits=address(grad_logits),
            map_format=attributes[-1],
            expert_scale=None if scale is None else address(scale),
            **where(logits),
        )
    return grad_logits


def _save_probs(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, selection_bias, expert_scale, *ctx.attributes = inputs
    bias = selection_bias if ctx.needs_input_grad[2] else None  # chooses again where the scale has a gradient
    ctx.save_for_backward(logits, output[1], bias, expert_scale)


def _probs_backward(ctx: Any, grad_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    logits, routing_map, selection_bias, expert_scale = ctx.saved_tensors
    grad_logits = grad_scale = None
    if ctx.needs_input_grad[0]:
        grad_logits = torch.ops.ort_moe.router_probs_grad(
            logits, routing_map, grad_probs, expert_scale, *ctx.attributes
        )
    if ctx.needs_input_grad[2]:
        unscaled = torch.ops.ort_moe.router_probs(logits, selection_bias, None, *ctx.attributes)[0]
        grad_scale = (grad_probs.float() * unscaled.float()).reshape(-1, logits.shape[-1]).sum(0)
    return grad_logits, None, grad_scale, *(None for _ in ctx.attributes)


for _name, _with_indices in (("router_probs", False), ("router_probs_indices", True)):
    _op = torch.library.custom_op(
        f"ort_moe::{_name}",
        lambda *arguments, _with=_with_indices: _run_probs(_with, *arguments),
        mutates_args=(),
        schema=f"(Tensor logits, Tensor? selection_bias, Tensor? expert_scale, {_PROBS_ARGUMENTS}) -> "
        f"({', '.join(['Tensor'] * (3 if _with_indices else 2))})",
    )
    _op.register_fake(lambda *arguments, _with=_with_indices: _probs_outputs(_with, *arguments)[1])
    _op.register_autograd(_probs_backward, setup_context=_save_probs)

torch.library.custom_op(
    "ort_moe::router_probs_grad",
    _run_probs_grad,
    mutates_args=(),
    schema="(Tensor logits, Tensor routing_map, Tensor grad_probs, Tensor? expert_scale, "
    f"{_PROBS_ARGUMENTS}) -> Tensor",
).register_fake(lambda logits, *_: logits.new_empty(logits.shape))


# --- router_scores: (Tensor logits, ...) ---


def _scores_outputs(logits: torch.Tensor, *attributes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_logits("RouterScores", "logits", logits)
    _scores_config(attributes[:-1], int(logits.shape[-1]))
    map_format = attributes[-1]
    routing_map = logits.new_empty(map_shape(logits.shape, map_format), dtype=map_type(map_format))
    return logits.new_empty(logits.shape), routing_map


def _run_scores(logits: torch.Tensor, *attributes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scores, routing_map = _scores_outputs(logits, *attributes)
    logits = logits.contiguous()
    with on_device_of(logits):
        training.router_scores(
            _scores_config(attributes[:-1], int(logits.shape[-1])),
            **sizes(logits),
            logits=address(logits),
            scores=address(scores),
            routing_map=address(routing_map),
            map_format=attributes[-1],
            **where(logits),
        )
    return scores, routing_map


def _run_scores_grad(logits: torch.Tensor, grad_scores: torch.Tensor, *attributes: Any) -> torch.Tensor:
    logits, grad_scores = logits.contiguous(), grad_scores.contiguous()
    grad_logits = logits.new_empty(logits.shape)
    with on_device_of(logits):
        training.router_scores_grad(
            _scores_config(attributes[:-1], int(logits.shape[-1])),
            **sizes(logits),
            logits=address(logits),
            grad_scores=address(grad_scores),
            grad_logits=address(grad_logits),
            **where(logits),
        )
    return grad_logits


def _save_scores(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, *ctx.attributes = inputs
    ctx.save_for_backward(logits)


def _scores_backward(ctx: Any, grad_scores: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    (logits,) = ctx.saved_tensors
    grad_logits = torch.ops.ort_moe.router_scores_grad(logits, grad_scores, *ctx.attributes)
    return grad_logits, *(None for _ in ctx.attributes)


_scores = torch.library.custom_op(
    "ort_moe::router_scores",
    _run_scores,
    mutates_args=(),
    schema=f"(Tensor logits, {_SCORES_ARGUMENTS}) -> (Tensor, Tensor)",
)
_scores.register_fake(_scores_outputs)
_scores.register_autograd(_scores_backward, setup_context=_save_scores)
torch.library.custom_op(
    "ort_moe::router_scores_grad",
    _run_scores_grad,
    mutates_args=(),
    schema=f"(Tensor logits, Tensor grad_scores, {_SCORES_ARGUMENTS}) -> Tensor",
).register_fake(lambda logits, *_: logits.new_empty(logits.shape))


# --- aux_loss: (Tensor probs, Tensor tokens_per_expert, Tensor? total, ...) ---


def _loss_output(
    probs: torch.Tensor, tokens_per_expert: torch.Tensor, total: torch.Tensor | None, *attributes: Any
) -> torch.Tensor:
    check_logits("AuxLoss", "probs", probs)
    check_counts("tokens_per_expert", tokens_per_expert, probs, [int(probs.shape[-1])])
    if total is not None:
        check_counts("total", total, probs, [1] if total.ndim else [])
    _loss_config(attributes, int(probs.shape[-1]))
    return probs.new_empty((), dtype=torch.float32)


def _counts(tokens_per_expert: torch.Tensor, total: torch.Tensor | None) -> dict[str, Any]:
    return {
        "tokens_per_expert": address(tokens_per_expert),
        "count_type": COUNT_TYPES[tokens_per_expert.dtype],
        "total": None if total is None else address(total),
        "total_type": "int64" if total is None else COUNT_TYPES[total.dtype],
    }


def _run_loss(
    probs: torch.Tensor, tokens_per_expert: torch.Tensor, total: torch.Tensor | None, *attributes: Any
) -> torch.Tensor:
    loss = _loss_output(probs, tokens_per_expert, total, *attributes)
    probs, tokens_per_expert = probs.contiguous(), tokens_per_expert.contiguous()
    with on_device_of(probs):
        scratch = None
        if probs.is_cuda:
            size = training.aux_loss_scratch_bytes(**sizes(probs))
            scratch = torch.empty(size, dtype=torch.uint8, device=probs.device)
        training.aux_loss(
            _loss_config(attributes, int(probs.shape[-1])),
            **sizes(probs),
            **_counts(tokens_per_expert, total),
            probs=address(probs),
            loss=address(loss),
            scratch=None if scratch is None else address(scratch),
            **where(probs),
        )
    return loss


def _run_loss_grad(
    grad_loss: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    *attributes: Any,
) -> torch.Tensor:
    grad_probs = grad_loss.new_empty(shape, dtype=dtype)
    tokens_per_expert = tokens_per_expert.contiguous()
    with on_device_of(grad_probs):
        training.aux_loss_grad(
            _loss_config(attributes, int(shape[-1])),
            **sizes(grad_probs),
            **_counts(tokens_per_expert, total),
            grad_loss=address(grad_loss),
            grad_probs=address(grad_probs),
            **where(grad_probs),
        )
    return grad_probs


def _save_loss(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    probs, tokens_per_expert, total, *ctx.attributes = inputs
    ctx.save_for_backward(tokens_per_expert, total)
    ctx.shape, ctx.dtype = probs.shape, probs.dtype


def _loss_backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    tokens_per_expert, total = ctx.saved_tensors
    grad_probs = torch.ops.ort_moe.aux_loss_grad(
        grad_loss, tokens_per_expert, total, ctx.shape, ctx.dtype, *ctx.attributes
    )
    return grad_probs, None, None, *(None for _ in ctx.attributes)


_loss = torch.library.custom_op(
    "ort_moe::aux_loss",
    _run_loss,
    mutates_args=(),
    schema=f"(Tensor probs, Tensor tokens_per_expert, Tensor? total, {_LOSS_ARGUMENTS}) -> Tensor",
)
_loss.register_fake(_loss_output)
_loss.register_autograd(_loss_backward, setup_context=_save_loss)
torch.library.custom_op(
    "ort_moe::aux_loss_grad",
    _run_loss_grad,
    mutates_args=(),
    schema="(Tensor grad_loss, Tensor tokens_per_expert, Tensor? total, SymInt[] shape, ScalarType dtype, "
    f"{_LOSS_ARGUMENTS}) -> Tensor",
).register_fake(lambda grad_loss, tokens, total, shape, dtype, *_: grad_loss.new_empty(shape, dtype=dtype))
