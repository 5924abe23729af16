"""Random inputs for any model: sensible by type, name and what consumes them, at a chosen number of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ort_moe.errors import ModelError
from ort_moe.graphs.operators import integer_attribute
from ort_moe.graphs.shared_state import cache_lengths
from ort_moe.printing.wording import counted

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

Feeds = dict[str, Any]
"""NumPy array by input name."""

_PASSES_IDS_ON = {"Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Where", "Clip"}
_PAST_OF = {"GroupQueryAttention": (3, "kv_num_heads"), "MultiHeadAttention": (6, "num_heads")}
"""Of contrib nodes, the input that is the past's keys, before its values, and the attribute that counts its heads."""
_PER_TOKEN = ("input_ids", "position")
"""In names of inputs that have an entry for each token of a run."""
_OF_PAST = ("past", "cache")
"""In names of inputs and dimensions that hold tokens that went before."""
_SMALL = 2
"""Exclusive bound of integers about whose meaning nothing is known."""


@dataclass(frozen=True)
class Shape:
    """How large the dynamic dimensions become.

    Attributes:
        batch: Sequences.
        tokens: Tokens of each.
        past: Tokens of each that went before, whose keys and values are inputs.
    """

    batch: int
    tokens: int
    past: int = 0

    def __str__(self) -> str:
        return f"{self.batch} x {counted(self.tokens, 'token')}{f' after {self.past}' if self.past else ''}"


SHAPES = (Shape(1, 1), Shape(2, 3), Shape(1, 64))
"""One token, a few in two sequences, and a prompt."""

_DECODE_STEP = Shape(1, 1, past=8)
"""One token behind others: for models whose inputs hold a past."""


def draw(model: ir.Model, shape: Shape, rng: np.random.Generator) -> Feeds:
    """Random inputs by name.

    Floating-point inputs are standard normal (masks: 0), masks of integers and booleans are 1, positions ascend,
    and integers that a Gather looks up stay below the size of what they look up. Positions and totals count the past.

    Raises:
        ModelError: An input is no tensor or of an unknown type, or neither a cache nor the memory holds so many tokens.
    """
    if why := beyond_cache(model, shape):
        raise ModelError(why)
    sizes = _dimension_sizes(model, shape)
    try:
        return {value.name or "": _draw_input(value, sizes, shape, rng) for value in _inputs(model)}
    except (MemoryError, OverflowError, ValueError) as error:  # NumPy's, where a size does not fit 64 bits
        raise ModelError(f"inputs of {shape} do not fit into memory") from error


def has_dynamic_tokens(model: ir.Model) -> bool:
    """Whether a shape's numbers make a difference."""
    one, many = (_dimension_sizes(model, Shape(n, n)) for n in (1, 2))
    return one != many


def usual_shapes(model: ir.Model) -> tuple[Shape, ...]:
    """What a model is verified at: a few shapes, and where its inputs hold a past, a token behind others.

    Where its cache is of fixed length, a few behind half of it, and one at its end. Where a cache slides, as many went
    before as its window holds, for in one that is not full nobody has written what is behind the tokens; in one
    sequence, for attention takes no more than a token of each of several behind a past.
    """
    window = max((_window(node) for value in _inputs(model) for node, _ in value.uses()), default=0)
    if window:
        shapes = [Shape(1, shape.tokens, window) for shape in SHAPES]
    elif length := cache_length(model):
        wanted = [*zip(SHAPES, (0, length // 2, 0), strict=True), (SHAPES[0], length - 1)]
        shapes = [_within(length, model, replace(shape, past=past)) for shape, past in wanted]
    else:
        shapes = [*SHAPES, _DECODE_STEP] if _has_dynamic_past(model) else [*SHAPES]
    return told_apart(model, shapes)


def holds_past(model: ir.Model) -> bool:
    """Whether inputs have a place for keys and values of tokens that went before, by their names or dimensions."""
    named = any(part in (value.name or "").lower() for value in _inputs(model) for part in _OF_PAST)
    return named or _has_dynamic_past(model)


def _has_dynamic_past(model: ir.Model) -> bool:
    without, with_past = (_dimension_sizes(model, Shape(1, 1, past)) for past in (0, 1))
    return without != with_past


def told_apart(model: ir.Model, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """The first of each of the shapes that make the same inputs: all do where a model has no dynamic dimensions."""
    kept = {(shape.past, *sorted(_dimension_sizes(model, shape).items())): shape for shape in reversed(shapes)}
    return tuple(shape for shape in dict.fromkeys(shapes) if shape in kept.values())


def cache_length(model: ir.Model) -> int:
    """Tokens that a cache of fixed length holds; 0 where there is none.

    Of layers with caches of several lengths, the longest: the others slide.
    """
    return max(cache_lengths(model).values(), default=0)


def beyond_cache(model: ir.Model, shape: Shape) -> str:
    """Why a shape does not fit into a cache of fixed length, in words; empty where it does, or there is none."""
    length, tokens = cache_length(model), _run_length(model, shape)
    if not length or shape.past + tokens <= length:
        return ""
    past = f" behind {shape.past} others" if shape.past else ""
    return f"the cache holds {counted(length, 'token')}, and {counted(tokens, 'token')}{past} would not fit"


def fixed_tokens(model: ir.Model) -> int | None:
    """Tokens of all sequences of a run, where ids or positions have fixed lengths; None where nothing tells."""
    batches, lengths = (_per_token(model, axis) for axis in (0, 1))
    return max(batches) * max(lengths) if batches and lengths else None


def _within(length: int, model: ir.Model, shape: Shape) -> Shape:
    """The shape as a model with a cache takes it."""
    tokens = min(_run_length(model, shape), length)
    return Shape(max(_per_token(model, 0), default=shape.batch), tokens, min(shape.past, length - tokens))


def _run_length(model: ir.Model, shape: Shape) -> int:
    """Tokens of each sequence that a run takes: the shape's, where the lengths of ids and positions are not fixed."""
    return max(_per_token(model, 1), default=shape.tokens)


def _per_token(model: ir.Model, axis: int) -> list[int]:
    """Fixed lengths of the inputs (batch, tokens) that have an entry for each token of a run."""
    shapes = [value.shape for value in _inputs(model) if any(part in (value.name or "") for part in _PER_TOKEN)]
    sizes = [shape[axis] for shape in shapes if shape is not None and shape.rank() == 2]
    return [size for size in sizes if isinstance(size, int)]


def _inputs(model: ir.Model) -> list[ir.Value]:
    """The inputs that must be fed: old models list their initializers, too."""
    return [value for value in model.graph.inputs if value.name not in model.graph.initializers]


def _dimension_key(value: ir.Value, axis: int) -> str:
    assert value.shape is not None
    name = getattr(value.shape[axis], "value", None)
    return name if isinstance(name, str) else f"{value.name}[{axis}]"


def _dimension_sizes(model: ir.Model, shape: Shape) -> Mapping[str, int]:
    """Size of each dynamic dimension by its name, or by its input and axis where it has none."""
    sizes: dict[str, int] = {}
    for value in _inputs(model):
        if value.shape is None:
            continue
        free = [_dimension_key(value, a) for a, size in enumerate(value.shape) if not isinstance(size, int)]
        named = {key: _size_by_name(key, shape) for key in free}
        # Of two dimensions without a telling name, the outer is the batch: (batch, sequence, hidden).
        untold = [key for key in free if named[key] is None]
        has_batch = any(_is_batch(key) for key in free)
        for place, key in enumerate(untold):
            outer = place == 0 and len(untold) > 1 and not has_batch
            sizes.setdefault(key, shape.batch if outer else shape.tokens)
        sizes.update({key: size for key, size in named.items() if size is not None})
    return sizes | _cache_sizes(model)


def _cache_sizes(model: ir.Model) -> dict[str, int]:
    """What the names of a cache's dimensions do not tell, by the attention that reads it.

    The last, which onnxruntime-genai's builder names kv_cache_dim, is the length of a head, and in 4 bits half of it.
    And where a cache slides, its tokens are as many as the window holds, however few went before.
    """
    sizes: dict[str, int] = {}
    for value in _inputs(model):
        for node, position in value.uses():
            first, attribute = _PAST_OF.get(node.op_type, (position + 1, ""))
            if value.shape is None or value.shape.rank() != 4 or position not in (first, first + 1):
                continue
            tokens, head = (_dimension_key(value, axis) for axis in (2, 3))
            query, key = (_last_length(node.inputs[i]) for i in (0, 1))
            heads, of_past = (_number(node, name) for name in ("num_heads", attribute))
            if key and of_past:
                sizes[head] = key // of_past
            elif query and heads:  # queries, keys and values in one
                sizes[head] = query // (heads + 2 * of_past)
            if head in sizes and _number(node, "kv_cache_bit_width") == 4:
                sizes[head] = -(-sizes[head] // 2)
            if _window(node):
                sizes[tokens] = _window(node)
    return sizes


def _window(node: ir.Node) -> int:
    """Tokens that the cache of an attention holds, where it slides; else 0."""
    return _number(node, "local_window_size") if _number(node, "sliding_window_cache") else 0


def _last_length(value: ir.Value | None) -> int:
    """Length along the last axis; 0 where it is not known."""
    size = value.shape[-1] if value is not None and value.shape is not None and value.shape.rank() else 0
    return size if isinstance(size, int) else 0


def _number(node: ir.Node, attribute: str) -> int:
    return max(integer_attribute(node, attribute, 0), 0)  # what is below 0, no runtime takes


def _is_batch(name: str) -> bool:
    return "batch" in name.lower()


def _size_by_name(name: str, shape: Shape) -> int | None:
    lowered = name.lower()
    if "+" in lowered or "total" in lowered:  # past + sequence
        return shape.past + shape.tokens
    if any(part in lowered for part in _OF_PAST):
        return shape.past
    if _is_batch(lowered):
        return shape.batch
    if "seq" in lowered or "token" in lowered or "length" in lowered:
        return shape.tokens
    return None


def _draw_input(value: ir.Value, sizes: Mapping[str, int], shape: Shape, rng: np.random.Generator) -> Any:
    import numpy as np

    if value.dtype is None or value.shape is None:
        raise ModelError(f"input '{value.name}' has no tensor type and shape: random inputs cannot be made for it")
    dims = tuple(
        size if isinstance(size, int) else sizes[_dimension_key(value, axis)] for axis, size in enumerate(value.shape)
    )
    name, dtype = (value.name or "").lower(), value.dtype.numpy()
    if dtype == np.bool_:
        return np.ones(dims, dtype)
    if np.issubdtype(dtype, np.integer):
        if "mask" in name:
            return np.ones(dims, dtype)
        if "position" in name and dims:
            return np.broadcast_to(np.arange(shape.past, shape.past + dims[-1], dtype=dtype), dims).copy()
        if "past" in name and "length" in name:
            return np.full(dims, shape.past, dtype)
        if "length" in name and np.prod(dims, dtype=int) <= 1:
            return np.full(dims, shape.past + shape.tokens, dtype)
        return rng.integers(0, _looked_up_size(value) or _SMALL, dims).astype(dtype)
    if value.dtype.is_floating_point():
        if "mask" in name:  # of floats: added to the scores of attention
            return np.zeros(dims, dtype)
        return rng.standard_normal(dims, dtype=np.float32).astype(dtype)
    raise ModelError(f"input '{value.name}' has type {value.dtype.name}: random inputs cannot be made for it")


def _looked_up_size(value: ir.Value, depth: int = 6) -> int | None:
    """Least number of rows of what these ids look up, followed through reshapes; None where nothing does."""
    found = []
    for node, position in value.uses():
        if node.op_type in ("Gather", "GatherBlockQuantized") and position == 1:
            axis, data = integer_attribute(node, "axis", 0), node.inputs[0]
            shape = () if data is None or data.shape is None else tuple(data.shape)
            size = shape[axis] if -len(shape) <= axis < len(shape) else None
            if isinstance(size, int):
                found.append(size)
        elif node.op_type in _PASSES_IDS_ON and depth:
            found += [size for size in (_looked_up_size(out, depth - 1) for out in node.outputs) if size]
    return min(found, default=None)
