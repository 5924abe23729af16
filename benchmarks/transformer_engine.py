"""TransformerEngine's fused router through its C interface, from the library in its wheel."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from benchmarks.peers import installed, load

NAME = "TransformerEngine"
SIGMOID, SOFTMAX = 0, 1
_FILE = "transformer_engine/wheel_lib/libtransformer_engine.so"
_NONE = -1  # groups
_TYPES = {
    torch.uint8: 0,
    torch.int32: 2,
    torch.int64: 3,
    torch.float32: 4,
    torch.float16: 5,
    torch.bfloat16: 6,
}


class _Shape(ctypes.Structure):
    _fields_ = (("data", ctypes.c_size_t * 15), ("ndim", ctypes.c_size_t))


class _Array(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("shape", _Shape))


@functools.cache
def library() -> tuple[ctypes.CDLL, str] | None:
    """The library and its version; None where it is not here."""
    found = installed(f"transformer-engine-cu{(torch.version.cuda or '').split('.')[0]}", _FILE)
    if found is None:
        return None
    try:
        loaded = load(found[0])
    except OSError as error:
        print(f"{NAME} {found[1]} is not timed: {str(error).splitlines()[0][:160]}")
        return None
    loaded.nvte_create_tensor.restype = ctypes.c_void_p
    return loaded, found[1]


def _tensor(array: torch.Tensor | None = None) -> ctypes.c_void_p:
    """A tensor as the library takes it; it stays for the life of the process."""
    lib = _lib()
    tensor = ctypes.c_void_p(lib.nvte_create_tensor(0))
    if array is not None:
        sizes = tuple(array.shape)
        given = _Array(array.data_ptr(), _TYPES[array.dtype], _Shape((ctypes.c_size_t * 15)(*sizes), len(sizes)))
        lib.nvte_set_tensor_param_v2(tensor, 0, ctypes.byref(given), ctypes.c_size_t(ctypes.sizeof(given)))
    return tensor


def _lib() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise RuntimeError(f"{NAME} is not installed")
    return found[0]


class Router:
    """Its router on one call's arrays, (T, E) each: what it needs besides is its own.

    Args:
        logits: Also AuxLoss's probs.
        grad: Of what comes out.
        k: K.
        score: SIGMOID or SOFTMAX.
        after_topk: Softmax of the chosen rather than of all.
        scale: Of probs.
        bias: The selection's, (E), or None.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        grad: torch.Tensor,
        *,
        k: int,
        score: int,
        after_topk: bool,
        scale: float,
        bias: torch.Tensor | None,
    ) -> None:
        self.sizes = (*logits.shape, k)
        self.score, self.before_topk, self.scale = (
            score,
            int(score == SOFTMAX and not after_topk),
            ctypes.c_float(scale),
        )
        self.map = torch.zeros(logits.shape, dtype=torch.uint8, device="cuda")
        self.kept = torch.zeros(logits.shape, device="cuda")
        self.out, self.grad_out = torch.zeros_like(logits), torch.zeros_like(logits)
        arrays = {
            "logits": logits,
            "grad": grad,
            "bias": bias,
            "map": self.map,
            "kept": self.kept,
            "out": self.out,
            "grad_out": self.grad_out,
        }
        self.given = {name: _tensor(array) for name, array in arrays.items()}

    def probs(self, stream: int) -> None:
        given = self.given
        _lib().nvte_fused_topk_with_score_function_forward(
            given["logits"],
            *self.sizes,
            self.before_topk,
            _NONE,
            _NONE,
            self.scale,
            self.score,
            given["bias"],
            given["out"],
            given["map"],
            given["kept"],
            ctypes.c_void_p(stream),
        )

    def probs_grad(self, stream: int) -> None:
        """Of what `probs` left."""
        given, options = self.given, (self.before_topk, self.scale, self.score)
        read = (given["map"], given["kept"], given["grad"])
        _lib().nvte_fused_topk_with_score_function_backward(
            *read, *self.sizes, *options, given["grad_out"], ctypes.c_void_p(stream)
        )

    def scores(self, stream: int) -> None:
        given = self.given
        written = (given["out"], given["map"], given["kept"])
        _lib().nvte_fused_score_for_moe_aux_loss_forward(
            given["logits"], *self.sizes, self.score, *written, ctypes.c_void_p(stream)
        )

    def scores_grad(self, stream: int) -> None:
        """Of what `scores` left."""
        given = self.given
        read = (given["kept"], given["grad"])
        _lib().nvte_fused_score_for_moe_aux_loss_backward(
            *read, *self.sizes, self.score, given["grad_out"], ctypes.c_void_p(stream)
        )


class Loss:
    """Its auxiliary loss on one call's arrays.

    Args:
        probs: (T, E).
        counts: (E), int64.
        k: K.
        coeff: The coefficient.
    """

    def __init__(self, probs: torch.Tensor, counts: torch.Tensor, *, k: int, coeff: float) -> None:
        self.tokens, self.experts = probs.shape
        self.k, self.coeff = k, ctypes.c_float(coeff)
        self.loss, self.grad = (torch.ones((), dtype=probs.dtype, device="cuda") for _ in range(2))
        self.factor = torch.zeros((), device="cuda")
        self.grad_out = torch.zeros_like(probs)
        arrays: dict[str, Any] = {
            "probs": probs,
            "counts": counts,
            "loss": self.loss,
            "grad": self.grad,
            "factor": self.factor,
            "grad_out": self.grad_out,
        }
        self.given = {name: _tensor(array) for name, array in arrays.items()}

    def forward(self, stream: int) -> None:
        given, sizes = self.given, (self.tokens, self.experts, self.tokens, self.experts, self.k)
        written = (given["loss"], given["factor"])
        _lib().nvte_fused_moe_aux_loss_forward(
            given["probs"], given["counts"], *sizes, self.coeff, *written, ctypes.c_void_p(stream)
        )

    def backward(self, stream: int) -> None:
        """Of what `forward` left."""
        given = self.given
        _lib().nvte_fused_moe_aux_loss_backward(
            given["factor"],
            given["counts"],
            self.tokens,
            self.experts,
            given["grad"],
            given["grad_out"],
            ctypes.c_void_p(stream),
        )
