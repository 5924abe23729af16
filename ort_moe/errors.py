"""Exceptions and warnings of the public API; each message is one sentence for the user."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ort_moe.verification import Verification


class OrtMoeError(Exception):
    """Base of all: what went wrong, where, what was expected and what came."""


class ModelError(OrtMoeError):
    """The input is not a model that can be read or run (CLI: exit 1)."""


class OutputError(OrtMoeError):
    """The output cannot be written (CLI: exit 1)."""


class DecodeError(OrtMoeError, ValueError):
    """A session, a state or the inputs of a step that a DecodeLoop cannot take (CLI: exit 1)."""


class VerificationError(OrtMoeError):
    """The optimised model does not compute what the original does (CLI: exit 4).

    Attributes:
        verification: The whole outcome, where there is one.
    """

    def __init__(self, message: str, verification: Verification | None = None) -> None:
        super().__init__(message)
        self.verification = verification


class EnvironmentUnfitError(OrtMoeError):
    """The installation cannot do it: no ORT, an old one, a missing library or provider (CLI: exit 5)."""


class LeftoverWarning(UserWarning):
    """Something that a run has made or replaced cannot be deleted; its output is as it should be."""
