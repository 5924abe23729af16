"""The table of ops: it is consistent, fills in attributes, and docs/ops.md is generated from it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ort_moe.installation.library import describe_ops
from ort_moe.ops import DOMAIN, FUSED_ROUTER, OPS, VERSION, Attribute, Op, Tensor


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_a_row_is_consistent(op: Op) -> None:
    assert OPS[op.name] is op
    for group in (op.inputs, op.outputs, op.attributes):
        assert len({entry.name for entry in group}) == len(group)
    for attribute in op.attributes:
        if attribute.neutral is not None:
            attribute.check(attribute.neutral)
        for choice in attribute.choices:
            attribute.check(choice)
        if attribute.only_with:
            name, value = attribute.only_with
            op.attribute(name).check(value)
    for entry in (*op.inputs, *op.outputs, *op.attributes):
        assert entry.doc.endswith(".")


def test_the_library_registers_what_the_table_says() -> None:
    def tensor(entry: Tensor) -> dict[str, Any]:
        return {"name": entry.name, "types": list(entry.types), "optional": entry.optional}

    def attribute(entry: Attribute) -> dict[str, Any]:
        # JSON has no infinity.
        choices = ["-inf" if choice == -math.inf else choice for choice in entry.choices]
        only_with = list(entry.only_with) if entry.only_with else None
        return {"name": entry.name, "kind": entry.kind, "choices": choices, "only_with": only_with}

    library = describe_ops()
    assert (library["domain"], library["version"]) == (DOMAIN, VERSION)
    described = {op.pop("name"): op for op in library["ops"]}
    for op in described.values():
        assert "CPUExecutionProvider" in op.pop("providers")
    assert described == {
        op.name: {
            "inputs": [tensor(entry) for entry in op.inputs],
            "outputs": [tensor(entry) for entry in op.outputs],
            "attributes": [attribute(entry) for entry in op.attributes],
        }
        for op in OPS.values()
    }


def test_complete_fills_in_neutral_values_in_sorted_order() -> None:
    full = FUSED_ROUTER.complete({"score": "sigmoid", "k": 2, "scale": 2.5})
    assert list(full) == sorted(full)
    assert full["scale"] == 2.5
    assert full["normalize"] == 0
    assert "mixer_threshold" not in full
    assert full.keys() | {"mixer_threshold"} == {attribute.name for attribute in FUSED_ROUTER.attributes}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"score": "softmax"}, ValueError, "attribute 'k' must be given"),
        ({"k": 2, "score": "sparse_mixer"}, ValueError, "attribute 'mixer_threshold' must be given"),
        ({"k": 2, "score": "softmax", "kk": 1}, KeyError, "no attribute 'kk'"),
    ],
)
def test_complete_refuses(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FUSED_ROUTER.complete(given)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        (Attribute("a", "int", "Doc."), 1.0),
        (Attribute("a", "int", "Doc."), "1"),
        (Attribute("a", "float", "Doc."), "1"),
        (Attribute("a", "float", "Doc."), float("nan")),
        (Attribute("a", "string", "Doc."), 1),
        (Attribute("a", "string", "Doc.", choices=("x", "y")), "z"),
    ],
)
def test_an_attribute_refuses_a_wrong_value(attribute: Attribute, value: object) -> None:
    with pytest.raises(ValueError, match=r"^attribute 'a' must be "):
        attribute.check(value)
