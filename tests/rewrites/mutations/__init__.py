"""Meaning-preserving edits of the router in a model: each writes the same arithmetic in another way.

    mutant = Mutant(model, router_values(model), random.Random(0))
    if MUTATIONS["reciprocal"](mutant): ...  # one place was edited

`spellings` edit a node that the rewriter absorbs, `detours` a value that such a node reads or makes. Constants are
split exactly (by powers of two), so that the router's attributes stay what they were. New values carry no type and no
shape: the rewriter has to infer them again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import onnx_ir as ir

from tests.rewrites.mutations import detours, spellings
from tests.rewrites.mutations.mutant import MUTATIONS, Mutant, router_values

__all__ = ["MUTATIONS", "Mutant", "detours", "mutate", "router_values", "spellings"]


def mutate(model: ir.Model, router: frozenset[str], names: Iterable[str], seed: int) -> Mutant:
    """Edit the model in place; edits without a place in it are passed over."""
    mutant = Mutant(model, router, random.Random(seed))
    for name in names:
        if MUTATIONS[name](mutant):
            mutant.applied.append(name)
    return mutant
