"""What a row of the table of ops is made of, and the tensors that several rows have."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

AttributeKind = Literal["int", "float", "string"]
AttributeValue = int | float | str


@dataclass(frozen=True)
class Tensor:
    """An input or output of an op.

    Attributes:
        name: Its name, as the schema and the errors spell it.
        types: ONNX element types it may have, as in `float16`.
        shape: Its shape in the letters of the docs, as in `(..., E)`.
        doc: One sentence.
        optional: Whether a node may leave it out.
    """

    name: str
    types: tuple[str, ...]
    shape: str
    doc: str
    optional: bool = False


@dataclass(frozen=True)
class Attribute:
    """An attribute of an op.

    Attributes:
        name: Its name.
        kind: `int`, `float` or `string`.
        doc: One sentence.
        neutral: The value that changes nothing; None where the user must choose. Helpers fill it in: on a node every
            attribute is required, because ORT reads a misspelt optional attribute as absent.
        choices: The allowed values of a string or a flag; empty where any value of the kind may stand.
        only_with: An attribute and a value of it; on other nodes this attribute has no effect and may be left out.
    """

    name: str
    kind: AttributeKind
    doc: str
    neutral: AttributeValue | None = None
    choices: tuple[AttributeValue, ...] = ()
    only_with: tuple[str, AttributeValue] | None = None

    def check(self, value: object) -> None:
        """Checks one value of this attribute by itself: its kind and its choices.

        Raises:
            ValueError: It is of another kind, not a number, or not among the choices.
        """
        kind, types = {
            "int": ("an int", (int,)),
            "float": ("a float", (int, float)),
            "string": ("a string", (str,)),
        }[self.kind]
        if not isinstance(value, types):
            expected = kind
        elif isinstance(value, float) and math.isnan(value):
            expected = "a number"
        elif self.choices and value not in self.choices:
            *others, last = (repr(choice) if isinstance(choice, str) else f"{choice:g}" for choice in self.choices)
            expected = f"{', '.join(others)} or {last}"
        else:
            return
        raise ValueError(f"attribute '{self.name}' must be {expected}, but is {value!r}")


@dataclass(frozen=True)
class Op:
    """One row of the table.

    Attributes:
        name: The operator type.
        doc: What it computes, in Markdown.
        inputs: In order; optional ones may be the empty name.
        outputs: In order.
        attributes: All attributes.
    """

    name: str
    doc: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[Attribute, ...]

    def attribute(self, name: str) -> Attribute:
        """The attribute of that name.

        Raises:
            KeyError: The op has none.
        """
        for attribute in self.attributes:
            if attribute.name == name:
                return attribute
        raise KeyError(f"{self.name} has no attribute '{name}'; it has {', '.join(a.name for a in self.attributes)}")

    def input_index(self, name: str) -> int:
        """The place of the input of that name on a node.

        Raises:
            ValueError: The op has none.
        """
        return [tensor.name for tensor in self.inputs].index(name)

    def complete(self, given: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
        """A node's whole attribute set in sorted order: `given`, and the neutral value of each other attribute.

        Raises:
            KeyError: `given` names an attribute that the op has not.
            ValueError: An attribute without a neutral value is missing.
        """
        for name in given:
            self.attribute(name)
        full: dict[str, AttributeValue] = {}
        for attribute in sorted(self.attributes, key=lambda a: a.name):
            if attribute.name in given:
                full[attribute.name] = given[attribute.name]
            elif attribute.only_with is None or given.get(attribute.only_with[0]) == attribute.only_with[1]:
                if attribute.neutral is None:
                    raise ValueError(f"{self.name}: attribute '{attribute.name}' must be given")
                full[attribute.name] = attribute.neutral
        return full

    def read(self, given: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
        """A node's complete attributes as the kernels take them: floats rounded to float32, flags as bool.

        Raises:
            ValueError: An attribute is unknown, missing, of another kind or not among its choices.
        """
        names = [attribute.name for attribute in self.attributes]
        for name in given:
            if name not in names:
                raise ValueError(f"{self.name}: no attribute '{name}'; the attributes are {', '.join(names)}")
        values = self.complete(given)
        for name, value in values.items():
            attribute = self.attribute(name)
            try:
                attribute.check(value)
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}") from None
            if attribute.kind == "float":
                values[name] = ctypes.c_float(float(value)).value
            elif attribute.choices == (0, 1):
                values[name] = bool(value)
        return values


ACTIVATION_TYPES = ("float", "float16", "bfloat16")

ROUTING_MAPS = (
    Tensor("permuted_to_unpermuted", ("int32",), "(R)", "The expanded row at each permuted position.", True),
    Tensor(
        "unpermuted_to_permuted",
        ("int32",),
        "(R)",
        "The permuted position of each expanded row, -1 where it has no expert.",
        True,
    ),
    Tensor(
        "permuted_to_expert", ("int32",), "(R)", "The expert at each permuted position, E where there is none.", True
    ),
    Tensor(
        "expert_first_token_offset",
        ("int64",),
        "(E + 1)",
        "The first permuted position of each expert, and last the number of rows that have one.",
        True,
    ),
)
"""The maps between choices and rows of experts, as outputs of a router and inputs of what follows; all or none."""
