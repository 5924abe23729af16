"""Whether exported graphs compute what the PyTorch model does. Needs torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ort_moe.errors import VerificationError
from ort_moe.verification.runnable_model import RunnableModel

if TYPE_CHECKING:
    import transformers

_PROMPT = 3
"""Tokens of prefill; not the number that was traced."""

ALLOWED = {torch.float32: 1e-3, torch.float16: 1e-1, torch.bfloat16: 5e-2}
"""Largest difference of the logits, relative to their norm, which wrong graphs come near to.

PyTorch's side is computed in float32 of the same weights, and so is that of bfloat16 graphs, which ONNX Runtime's CPU
does not run as they are: what differs is constants. Roundings send a token to other experts where two are nearly equal.
"""


def check_graphs(prefill: Path, decode: Path, model: transformers.PreTrainedModel) -> float:
    """Runs a prompt and one more token through both graphs, and through PyTorch at once and without a cache.

    Args:
        prefill: The graph of any number of tokens.
        decode: The graph of one token.
        model: What they were exported from; in float32 afterwards.

    Returns:
        The difference of the logits, relative to their norm.

    Raises:
        VerificationError: It is too large, or PyTorch's own logits are no measure.
        EnvironmentUnfitError: There is no ONNX Runtime to run them.
        ModelError: ONNX Runtime cannot load or run a graph.
    """
    with RunnableModel(prefill) as first, RunnableModel(decode) as then:
        cache = {
            value.name or "": np.zeros(value.shape.numpy(), value.dtype.numpy())
            for value in then.model.graph.inputs
            if value.name not in ("input_ids", "position_ids") and value.shape is not None and value.dtype is not None
        }
        batch, _, length, _ = next(iter(cache.values())).shape
        prompt = min(_PROMPT, length - 1)
        vocabulary = model.get_input_embeddings().num_embeddings
        ids = np.random.default_rng(0).integers(0, vocabulary, (batch, prompt + 1))
        positions = np.tile(np.arange(prompt + 1), (batch, 1))
        outputs = first.session(with_library=False)(
            {"input_ids": ids[:, :-1], "position_ids": positions[:, :-1], **cache}
        )
        logits = [outputs["logits"]]
        cache = {name: outputs[name.replace("past_key_values", "present", 1)] for name in cache}
        outputs = then.session(with_library=False)(
            {"input_ids": ids[:, -1:], "position_ids": positions[:, -1:], **cache}
        )
        logits.append(outputs["logits"])
    allowed = ALLOWED.get(model.dtype, max(ALLOWED.values()))
    with torch.no_grad():
        expected = model.float()(input_ids=torch.from_numpy(ids), use_cache=False).logits.double().numpy()
    if not 0 < np.linalg.norm(expected) < np.inf:
        raise VerificationError(
            "PyTorch itself computes logits that are all zero, infinite or no numbers, beside which the graphs "
            "cannot be checked, and nothing was put in place: look at the weights, or use --no-verify"
        )
    difference = _relative(np.concatenate(logits, axis=1), expected)
    if not difference <= allowed:
        raise VerificationError(
            f"the exported graphs do not compute what PyTorch does, nothing was put in place: their logits differ by "
            f"{difference:.1e} of the norm, allowed are {allowed:.0e}"
        )
    return difference


def _relative(actual: Any, expected: Any) -> float:
    return float(np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected))
