"""The report of an optimisation of a model folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ort_moe.optimization.report import Report, closing
from ort_moe.printing.printable import Printable
from ort_moe.printing.wording import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = 1
"""Version of the JSON document; any change of its form raises it."""


@dataclass(frozen=True)
class FolderReport(Printable):
    """What `optimize` did with a folder of onnxruntime-genai; printed in short, and `in_full` with all of each model.

    Attributes:
        source: The input.
        output: The output; None where nothing was written.
        target: `cuda`, `cpu` or `contrib`.
        models: What became of each model that the configuration names, in its order.
        library: Name of the copy of our library in the output; None where no model needs it, or nothing was written.
        carried: Number of files that are in the output as they were.
        warnings: Sentences for the user about the folder; each report of a model has its own.
    """

    source: str
    output: str | None
    target: str
    models: tuple[Report, ...]
    library: str | None = None
    carried: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def matched(self) -> bool:
        """Whether anything was fused that was not before."""
        return any(model.matched for model in self.models)

    def to_dict(self) -> dict[str, Any]:
        """The document that `ort_moe/json_schemas/folder.json` describes."""
        return {
            "schema": SCHEMA,
            "source": self.source,
            "output": self.output,
            "target": self.target,
            "matched": self.matched,
            "models": [model.to_dict() for model in self.models],
            "library": self.library,
            "carried": self.carried,
            "warnings": list(self.warnings),
        }

    @property
    def in_full(self) -> Printable:
        """The report with every site of every model explained."""
        return _InFull(self)

    def __rich__(self) -> RenderableType:
        return self.around([part for model in self.models for part in model.parts()])

    def around(self, parts: list[RenderableType]) -> RenderableType:
        """What is told of the models, and then of the folder."""
        from rich.console import Group
        from rich.text import Text

        lines: list[RenderableType] = []
        if self.output is not None:
            library = f"custom ops by {self.library} in the folder, " if self.library else ""
            lines.append(Text(f"for {self.target}: {library}{counted(self.carried, 'file')} carried over"))
        warnings = [warning for model in self.models for warning in model.warnings]
        return Group(*parts, *lines, *closing([*dict.fromkeys(warnings), *self.warnings], self.output))


@dataclass(frozen=True)
class _InFull(Printable):
    """A report with all that it holds."""

    report: FolderReport

    def __rich__(self) -> RenderableType:
        return self.report.around([part for model in self.report.models for part in model.in_full.parts()])
