"""What a model's class says before its weights are read: whether it can be exported. Needs torch and transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.cache_utils import DummyLayer, DynamicCache, StaticLayer, StaticSlidingWindowLayer

from ort_moe.errors import ModelError
from ort_moe.exporting.checkpoint import Checkpoint
from ort_moe.exporting.graph import quiet
from ort_moe.printing.wording import some_of

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Precisions by the names that options have."""

AS_BUILT: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
"""How models are built for export.

Of transformers' forms of experts, `batched_mm` is the one that gives the same few nodes for any number of tokens and
experts. `eager` attention takes masks of numbers, which every architecture makes in one place.
"""

_KEPT = (StaticLayer, StaticSlidingWindowLayer)
"""Kinds of cache layers that keep keys and values, and nothing else."""


_NOT_EXPORTABLE = {
    "llama4_text": "it rotates queries and keys as complex numbers, which ONNX does not have",
}
"""Why not, by transformers' name, where it would show after the weights are read only."""


_FAR_LARGER = 2
"""How many times the numbers that there are a model must have to be refused before its weights are read.

transformers makes all that the files lack or have in another shape, in memory, before it can be told what. A model that
is not that much larger fits, and the shapes in question are told.
"""


@dataclass(frozen=True)
class Architecture:
    """How a checkpoint's language model is exported.

    Attributes:
        config: transformers' configuration of it.
        layers: For each layer of its cache, the shapes (heads, head size) of keys and of values, or None.
        moe_layers: Number of modules that hold experts.
        longest: Positions that the model was made for; None: it does not say.
    """

    config: Any
    layers: tuple[tuple[tuple[int, int], tuple[int, int]] | None, ...]
    moe_layers: int
    longest: int | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Architecture:
        """Builds the model without weights and looks at it.

        Raises:
            ModelError: It cannot be exported; the message has the architecture's name and the reason. Or its weights
                cannot be those in the files, by their number.
        """
        config = _config(checkpoint)
        refused = f"{checkpoint.folder}: the architecture '{checkpoint.model_type}' cannot be exported"
        text_config = config.get_text_config(decoder=True)
        if text_config.model_type in _NOT_EXPORTABLE:
            raise ModelError(f"{refused}: {_NOT_EXPORTABLE[text_config.model_type]}")
        _check_cache(text_config, refused)
        try:
            with quiet(), torch.device("meta"), torch.no_grad():
                model = transformers.AutoModelForCausalLM.from_config(config, **AS_BUILT).eval()
                cache = DynamicCache(config=text_config)
                model(input_ids=torch.zeros(1, 1, dtype=torch.long), cache=cache, use_cache=True)
        except Exception as error:  # whatever a model's code raises
            raise ModelError(
                f"{refused}: its code does not run with a plain key-value cache: {first_line(error)}"
            ) from error
        layers = tuple(map(_shapes, cache.layers))
        if not any(layers):
            raise ModelError(
                f"{refused}: none of its {len(layers)} layers keeps keys and values, at least one is expected"
            )
        numbers = sum(parameter.numel() for parameter in model.parameters())
        if numbers > _FAR_LARGER * checkpoint.numbers:
            raise ModelError(
                f"{checkpoint.folder}: its weights do not fit its config.json, by which they are {numbers} numbers, "
                f"but in the files are {checkpoint.numbers}"
            )
        return cls(
            config=config,
            layers=layers,
            moe_layers=sum(map(is_experts_module, model.modules())),
            longest=getattr(text_config, "max_position_embeddings", None),
        )


def is_experts_module(module: torch.nn.Module) -> bool:
    """Whether it is a stack of experts: of those that transformers dispatches, or of a class that is called so."""
    return hasattr(module, "is_concatenated") or type(module).__name__.endswith("Experts")


def load_model(
    checkpoint: Checkpoint, architecture: Architecture, precision: str | None
) -> transformers.PreTrainedModel:
    """Reads the weights.

    Args:
        checkpoint: Where from; quantized weights are unpacked.
        architecture: What it is.
        precision: A key of `DTYPES`; None: as stored. What the architecture keeps in float32 stays so.

    Raises:
        ModelError: They cannot be read, some of the model's are not among them, or have other shapes.
    """
    try:
        with quiet(), _without_progress_bars():
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                checkpoint.folder,
                config=architecture.config,
                dtype="auto" if precision is None else DTYPES[precision],
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # else transformers refuses them in a report that is not seen here
                **AS_BUILT,
            )
    except Exception as error:  # safetensors, torch and transformers raise classes of their own
        reason = first_line(error)
        if "above report" in reason:  # which is not seen here
            reason = "experts cannot be stacked from them, as where their number or shapes are not those of config.json"
        raise ModelError(f"{checkpoint.folder}: its weights cannot be loaded: {reason}") from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ModelError(f"{checkpoint.folder}: its files lack weights of the model: {some_of(missing, 1)}")
    mismatched = sorted(loading["mismatched_keys"])
    if mismatched:
        name, stored, expected = mismatched[0]
        others = f" (and {len(mismatched) - 1} more)" if len(mismatched) > 1 else ""
        raise ModelError(
            f"{checkpoint.folder}: its weights do not fit its config.json, by which {name} has shape {list(expected)}, "
            f"but in the files {list(stored)}{others}"
        )
    for module in model.modules():
        if hasattr(module, "is_concatenated"):  # experts of composite models follow a configuration of their own
            module.config._experts_implementation = AS_BUILT["experts_implementation"]
    return model.eval().requires_grad_(False)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keeps transformers' own off the terminal."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _config(checkpoint: Checkpoint) -> Any:
    name, version = checkpoint.model_type, transformers.__version__
    if name not in transformers.CONFIG_MAPPING:
        own = "; code that comes with a checkpoint is not run" if "auto_map" in checkpoint.config else ""
        raise ModelError(f"{checkpoint.folder}: transformers {version} knows no architecture '{name}'{own}")
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    except Exception as error:  # configurations check themselves, each in its way
        raise ModelError(f"{checkpoint.folder}: config.json does not fit '{name}': {first_line(error)}") from error
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{checkpoint.folder}: the architecture '{name}' cannot be exported: transformers {version} has no class "
            "for it that generates text from text alone"
        )
    if getattr(config, "quantization_config", None):
        config.quantization_config = {**config.quantization_config, "dequantize": True}
    return config


def _check_cache(config: Any, refused: str) -> None:
    """Looks whether a cache of keys and values is all that the model carries from token to token."""
    try:
        layers = transformers.StaticCache(config, max_cache_len=2).layers
    except KeyError as error:
        raise ModelError(f"{refused}: transformers has no cache of fixed length for layers of type {error}") from error
    except Exception as error:  # numbers in the configuration that make no sense
        raise ModelError(f"{refused}: transformers makes no cache for it: {first_line(error)}") from error
    kinds = getattr(config, "layer_types", None) or [type(layer).__name__ for layer in layers]
    others = Counter(kind for kind, layer in zip(kinds, layers, strict=True) if type(layer) not in (*_KEPT, DummyLayer))
    if others:
        kind, number = others.most_common(1)[0]
        raise ModelError(
            f"{refused}: {number} of its {len(layers)} layers are of type '{kind}', which keep a state other than keys "
            "and values"
        )


def _shapes(layer: Any) -> tuple[tuple[int, int], tuple[int, int]] | None:
    if getattr(layer, "keys", None) is None:
        return None
    return (layer.keys.shape[1], layer.keys.shape[3]), (layer.values.shape[1], layer.values.shape[3])


def first_line(error: BaseException) -> str:
    """The first line of what an exception's first cause says, or the name of its class where it says nothing."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
