"""Attention of one token whose keys and values are shared by several heads, without a copy for each head.

Models repeat the whole cache for every head of a group before they multiply. Of a single token, the heads of a group
are as good as so many tokens: they are multiplied with the group's keys and values as these lie. Needs torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mixtral import modeling_mixtral


@contextmanager
def grouped_attention() -> Iterator[None]:
    """Has models with `eager` attention attend so, as far as theirs is the one that most share."""
    ALL_ATTENTION_FUNCTIONS["eager"] = _attend
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS["eager"]


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a model calls: query (batch, heads, tokens, size), key and value (batch, groups, slots, size)."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    (batch, heads, tokens, _), groups = query.shape, key.shape[1]
    is_one = isinstance(tokens, int) and tokens == 1  # a number that varies is not to be asked
    if not is_one or heads == groups or not _is_usual(own):
        attended: tuple[torch.Tensor, torch.Tensor | None] = own(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return attended
    scores = torch.matmul(query.reshape(batch, groups, heads // groups, -1), key.transpose(2, 3)) * scaling
    weights = torch.softmax(scores + attention_mask, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).reshape(batch, 1, heads, -1), None


@cache
def _is_usual(own: Callable[..., object]) -> bool:
    """Whether a model's own attention is the usual one; some have sinks or a softcap."""
    return inspect.getsource(own) == inspect.getsource(modeling_mixtral.eager_attention_forward)
