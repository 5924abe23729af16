"""Which fixtures the table of architectures asks for. Needs no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from models.architectures import ARCHITECTURES, Architecture
from models.plan import OPSETS, VARIANTS


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
    """Return all, sorted by name."""
    return sorted((target for row in ARCHITECTURES for target in _targets(row)), key=lambda target: target.name)


def _targets(row: Architecture) -> Iterator[Target]:
    for kind, exports in (("block", row.block), ("causal_lm", row.causal_lm)):
        for exporter, precisions in exports.items():
            for precision in precisions:
                yield Target(row, kind, exporter, precision)
    for kind, exporter, precision, variant in row.variants:
        yield Target(row, kind, exporter, precision, variant)
