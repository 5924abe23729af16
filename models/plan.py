"""The columns of the table of architectures: exporters, precisions and variants. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

EXPORTERS = ("dynamo", "legacy", "transformers", "transformers_grouped")
"""What writes graphs; `models.exporters` says how."""

OPSETS: Mapping[str, int] = {"dynamo": 20, "legacy": 18, "transformers": 20, "transformers_grouped": 20}
"""The standard opset of each exporter's plain exports."""

PRECISIONS = ("fp32", "fp16", "bf16")

Exports = Mapping[str, tuple[str, ...]]
"""Precisions by exporter."""

# All exporters in all precisions, of all architectures, would be 12 MB. One router of each family has the second.
PLAIN: Exports = {"dynamo": ("fp32", "fp16"), "legacy": ("fp32",), "transformers": ("fp32",)}
FAMILY: Exports = {
    "dynamo": PRECISIONS,
    "legacy": ("fp32", "fp16"),
    "transformers": ("fp32", "bf16"),
    "transformers_grouped": ("fp32",),
}
EVERYTHING: Exports = dict.fromkeys(EXPORTERS, PRECISIONS)


@dataclass(frozen=True)
class Variant:
    """What sets an export apart from the plain one.

    Attributes:
        opset: version of the standard operator set; None: the exporter's plain one.
        static: batch and sequence are the numbers traced.
        router_logits: the router logits of every layer are outputs, too (language models).
    """

    opset: int | None = None
    static: bool = False
    router_logits: bool = False


VARIANTS: Mapping[str, Variant] = {
    "": Variant(),
    "static": Variant(static=True),
    "opset13": Variant(opset=13),
    "opset18": Variant(opset=18),
    "opset21": Variant(opset=21),
    "opset24": Variant(opset=24),
    "opset26": Variant(opset=26),
    "router_logits": Variant(router_logits=True),
}
