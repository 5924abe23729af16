"""Which fixtures there are: every architecture in some exports, one of each router family in all. Needs no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from models.architectures import ARCHITECTURES, Architecture

EXPORTERS = ("dynamo", "legacy", "transformers", "transformers_grouped")
PRECISIONS = ("fp32", "fp16", "bf16")

BLOCKS: Mapping[str, tuple[str, ...]] = {
    "dynamo": ("fp32", "fp16"),
    "legacy": ("fp32",),
    "transformers": ("fp32",),
    "transformers_grouped": (),
}
"""Precisions by exporter in which the block of every architecture is kept; a `thorough` row's in all of them."""

CAUSAL_LMS: Mapping[str, tuple[str, ...]] = {"dynamo": ("fp32",)}
"""The same of language models."""
THOROUGH_CAUSAL_LMS: Mapping[str, tuple[str, ...]] = {
    "dynamo": ("fp32", "fp16"),
    "legacy": ("fp32",),
    "transformers": ("fp32",),
}


@dataclass(frozen=True)
class Variant:
    """What sets an export apart from the plain one.

    Attributes:
        opset: version of the standard operator set; None: the exporter's plain one.
        static: the batch and the sequence are the numbers traced.
        router_logits: the router logits of every layer are outputs, too (language models).
    """

    opset: int | None = None
    static: bool = False
    router_logits: bool = False


VARIANTS: Mapping[str, Variant] = {
    "": Variant(),
    "static": Variant(static=True),
    "opset14": Variant(opset=14),
    "opset18": Variant(opset=18),
    "opset21": Variant(opset=21),
    "opset24": Variant(opset=24),
    "router_logits": Variant(router_logits=True),
}

OPSETS: Mapping[str, int] = {"dynamo": 20, "legacy": 18, "transformers": 20, "transformers_grouped": 20}
"""The plain opset of each exporter."""


@dataclass(frozen=True)
class Target:
    """One file to write."""

    architecture: Architecture
    kind: str
    exporter: str
    precision: str
    variant: str = ""

    @property
    def name(self) -> str:
        parts = (self.architecture.name, self.kind, self.exporter, self.precision, self.variant)
        return "_".join(part for part in parts if part)

    @property
    def opset(self) -> int:
        return VARIANTS[self.variant].opset or OPSETS[self.exporter]


def targets() -> list[Target]:
    """Return every fixture that the table of architectures asks for, sorted by name."""
    return sorted((target for row in ARCHITECTURES for target in _targets(row)), key=lambda target: target.name)


def _targets(row: Architecture) -> Iterator[Target]:
    everything = dict.fromkeys(EXPORTERS, PRECISIONS)
    for kind in row.kinds:
        if kind == "block" or row.kinds == ("causal_lm",):
            matrix = everything if row.thorough else BLOCKS
        else:
            matrix = THOROUGH_CAUSAL_LMS if row.thorough else CAUSAL_LMS
        for exporter, precisions in matrix.items():
            for precision in precisions:
                if (exporter, precision) not in row.not_exported:
                    yield Target(row, kind, exporter, precision)
    for kind, exporter, precision, variant in row.variants:
        yield Target(row, kind, exporter, precision, variant)
