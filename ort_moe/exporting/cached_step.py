"""What is exported: a language model over a key-value cache of fixed length. Needs torch and transformers.

The cache is a pair of buffers per layer, (batch, heads, max_length, head size), of which slot p holds the token at
position p. Tokens are written to the slots of their `position_ids` and see the slots up to their own, as far as the
layer's window reaches, so that rows of different lengths share a batch without an attention mask: what lies behind a
row's last token is not seen, and is written before it comes to be seen. Writing a token twice changes nothing: a step
may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import masking_utils
from transformers.cache_utils import Cache, DummyLayer, StaticLayer

from ort_moe.exporting.grouped_attention import grouped_attention

Buffers = Mapping[str, Mapping[str, torch.Tensor]]
"""`key` and `value` by the number of the layer, in digits."""


class CachedStep(torch.nn.Module):
    """input_ids, position_ids (batch, sequence) int64 and the cache -> logits (batch, sequence, vocabulary), the cache.

    Args:
        model: A language model of transformers whose attention is `eager`.
        layers: For each layer of its cache, whether it keeps keys and values; layers that do not keep nothing at all.
    """

    def __init__(self, model: torch.nn.Module, layers: Sequence[bool]) -> None:
        super().__init__()
        self.model = model
        self._layers = tuple(layers)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, past_key_values: Buffers
    ) -> dict[str, torch.Tensor | Buffers]:
        layers = [
            _BufferLayer(past_key_values[str(i)], position_ids) if keeps else DummyLayer()
            for i, keeps in enumerate(self._layers)
        ]
        with _masks_by_position(position_ids), grouped_attention():
            outputs = self.model(
                input_ids=input_ids, position_ids=position_ids, cache=Cache(layers=layers), use_cache=True
            )
        present = {
            str(i): {"key": layer.keys, "value": layer.values} for i, layer in enumerate(layers) if self._layers[i]
        }
        return {"logits": outputs.logits, "present": present}


class _BufferLayer(StaticLayer):
    """One layer of the cache; unlike transformers' own, each row of the batch has positions of its own."""

    is_compileable = False

    def __init__(self, buffers: Mapping[str, torch.Tensor], positions: torch.Tensor) -> None:
        super().__init__(max_cache_len=buffers["key"].shape[2])
        self.keys, self.values = buffers["key"], buffers["value"]
        self._slots = positions[:, None, :, None]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = self.keys.scatter(2, self._slots.expand(key_states.shape), key_states)
        self.values = self.values.scatter(2, self._slots.expand(value_states.shape), value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Nothing: where tokens are is told by their positions alone."""
        return 0


@contextmanager
def _masks_by_position(positions: torch.Tensor) -> Iterator[None]:
    """Has a model's masks made with the positions of its tokens in place of their numbers in the sequence."""

    def mask(
        *,
        batch_size: int,
        kv_length: int,
        mask_function: Callable[..., torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        **_: Any,
    ) -> torch.Tensor:
        rows = torch.arange(batch_size, device=device)[:, None, None, None]
        slots = torch.arange(kv_length, device=device)[None, None, None, :]
        seen = mask_function(rows, 0, positions[:, None, :, None], slots)
        return torch.where(seen, torch.zeros((), dtype=dtype, device=device), torch.finfo(dtype).min)

    functions = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    functions["eager"] = mask
    try:
        yield
    finally:
        del functions["eager"]
