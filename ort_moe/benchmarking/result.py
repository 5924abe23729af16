"""What a benchmark tells: models, and for each what it took to load and to run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ort_moe.printing.printable import Printable, byte_size, table
from ort_moe.printing.wording import counted
from ort_moe.running.session import CPU

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = 1
"""Version of the JSON document; any change of its form raises it."""

AS_GIVEN = "as given"
"""Name of the variant that the others are compared with."""


@dataclass(frozen=True)
class Timing:
    """Runs of one model at one number of tokens.

    Attributes:
        tokens: Of one sequence; None where the model's inputs have fixed lengths.
        steps: Runs that were timed, each with other inputs than the one before but for a cache, which goes on.
        step_ms: Median host time of a run, the device's work included; None: it does not run.
        fastest_ms: The fastest of them.
        graph_ms: The median where a captured CUDA graph is replayed; None: there is none.
        why: Why it does not run; empty where it does.
        why_no_graph: Why there is no CUDA graph; empty where there is.
        expert_gbps: Where a run has one token, the bytes of experts' weights that it reads by the shorter of the two
            medians, in 10^9 bytes per second; None where these bytes are not known, or tokens may share experts.
    """

    tokens: int | None
    steps: int = 0
    step_ms: float | None = None
    fastest_ms: float | None = None
    graph_ms: float | None = None
    why: str = ""
    why_no_graph: str = ""
    expert_gbps: float | None = None

    @property
    def best_ms(self) -> float | None:
        """The median as one would run it: by a CUDA graph where that is shorter."""
        known = [ms for ms in (self.step_ms, self.graph_ms) if ms is not None]
        return min(known, default=None)


@dataclass(frozen=True)
class Variant:
    """One of the models.

    Attributes:
        name: `as given`, `contrib`, or `ours`, with a format where weights were packed on the way.
        model: Its path; None where it was made for the measurement.
        status: `measured`; `failed`: it does not load or run; `impossible`: there is no such model.
        why: Why it was not measured; empty where it was.
        remark: What else one should know of it; mostly empty.
        weight_bytes: Bytes of all weights; None where it was not made.
        expert_bytes_per_token: Of these, what one token reads of the experts'; None where not known.
        load_seconds: Creation of the session, once its provider has started; None where it was not measured.
        host_bytes: Most memory of the process, with mapped files, Python and packages; None where not measured.
        host_bytes_before: The same before the session was created.
        device_bytes: What the GPU has less free memory after the runs than before the session; None on the CPU.
        timings: At each number of tokens.
    """

    name: str
    model: str | None
    status: str
    why: str = ""
    remark: str = ""
    weight_bytes: int | None = None
    expert_bytes_per_token: int | None = None
    load_seconds: float | None = None
    host_bytes: int | None = None
    host_bytes_before: int | None = None
    device_bytes: int | None = None
    timings: tuple[Timing, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether it ran at any number of tokens."""
        return any(timing.step_ms is not None for timing in self.timings)


@dataclass(frozen=True)
class Benchmark(Printable):
    """Models beside each other.

    Attributes:
        source: Path of the model as given.
        provider: Name of the execution provider.
        device: What it ran on.
        onnxruntime: Version of ONNX Runtime.
        steps: Runs that were asked for at each number of tokens.
        past: Tokens that went before, where the model's inputs hold a past.
        variants: The model as given first.
    """

    source: str
    provider: str
    device: str
    onnxruntime: str
    steps: int
    past: int
    variants: tuple[Variant, ...]

    @property
    def measured(self) -> bool:
        """Whether anything was."""
        return any(variant.measured for variant in self.variants)

    @property
    def failed(self) -> tuple[Variant, ...]:
        """Models that were there before and did not load or run."""
        return tuple(v for v in self.variants if v.model is not None and v.status == "failed")

    def times_faster(self, variant: Variant, timing: Timing) -> float | None:
        """Time of the model as given by that of a variant, at the same number of tokens; None where one is missing."""
        given = [t for v in self.variants if v.name == AS_GIVEN for t in v.timings if t.tokens == timing.tokens]
        if variant.name == AS_GIVEN or not given or given[0].best_ms is None or timing.best_ms is None:
            return None
        return given[0].best_ms / timing.best_ms

    def to_dict(self) -> dict[str, Any]:
        """The document that `ort_moe/json_schemas/bench.json` describes; what was not measured is null."""

        def timing_to_dict(variant: Variant, timing: Timing) -> dict[str, Any]:
            return {**asdict(timing), "times_faster": self.times_faster(variant, timing)}

        return {
            "schema": SCHEMA,
            "source": self.source,
            "provider": self.provider,
            "device": self.device,
            "onnxruntime": self.onnxruntime,
            "steps": self.steps,
            "past": self.past,
            "variants": [
                {**asdict(each), "timings": [timing_to_dict(each, timing) for timing in each.timings]}
                for each in self.variants
            ],
        }

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        head = f"{self.source}: on {self.device}, {self.provider}, ONNX Runtime {self.onnxruntime}"
        head += f", behind {counted(self.past, 'token')}" if self.past else ""
        tables = [self._models_table(), *([self._timings_table()] if any(v.timings for v in self.variants) else [])]
        return Group(Text(head), *tables, *map(Text, self._notes()))

    def _models_table(self) -> RenderableType:
        on_device = any(variant.device_bytes is not None for variant in self.variants)
        numbers = ("load", "weights", "a token reads", "host memory", *(["GPU memory"] if on_device else []))
        listing = table("model", *numbers, numbers=numbers)
        for each in self.variants:
            if each.weight_bytes is None:
                continue
            sizes = [each.weight_bytes, each.expert_bytes_per_token, each.host_bytes, each.device_bytes]
            cells = ["-" if size is None else byte_size(size) for size in sizes[: 4 if on_device else 3]]
            listing.add_row(each.name, "-" if each.load_seconds is None else f"{each.load_seconds:.2f} s", *cells)
        return listing

    def _timings_table(self) -> RenderableType:
        with_graph = self.provider != CPU
        numbers = ("tokens", "ms", *(["CUDA graph"] if with_graph else []), "times faster", "GB/s of experts")
        listing = table("model", *numbers, numbers=numbers)
        for number in dict.fromkeys(timing.tokens for each in self.variants for timing in each.timings):
            listing.add_section()
            for each in self.variants:
                for timing in each.timings:
                    if timing.tokens == number:
                        cells = [_number(timing.step_ms), *([_number(timing.graph_ms)] if with_graph else [])]
                        cells += [_number(self.times_faster(each, timing)), _number(timing.expert_gbps)]
                        listing.add_row(each.name, "fixed" if number is None else str(number), *cells)
        return listing

    def _notes(self) -> list[str]:
        """What the tables have no room for: why there is no number, and what else to know."""
        notes = [f"{each.name}: {each.why}" for each in self.variants if each.why]
        for each in self.variants:
            reasons = {t.why: f"at {counted(t.tokens or 0, 'token')}: {t.why}" for t in each.timings if t.why}
            if self.provider != CPU:
                graph = {t.why_no_graph for t in each.timings if t.why_no_graph and not t.why}
                reasons |= {why: f"no CUDA graph: {why}" for why in sorted(graph)}
            notes += [f"{each.name}, {reason}" for why, reason in reasons.items() if why != each.why]
            notes += [f"{each.name}: {each.remark}"] if each.remark else []
        return notes


def _number(value: float | None) -> str:
    """With three significant digits, and all before the point."""
    if value is None:
        return "-"
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"
