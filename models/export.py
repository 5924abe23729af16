"""Rebuild the fixtures: `python -m models.export [--only NAME] [--out DIR]`.

Needs the `export` extra (torch and transformers, pinned). The weights are seeded by name, so a rebuild with the same
versions gives the same files. Every file is run in ONNX Runtime and compared with torch before it is put in place.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import re
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import onnxruntime
import torch
import transformers

from models.architectures import (
    ARCHITECTURES,
    COMMON_CONFIG,
    EXPERT_COUNT_NAMES,
    EXPERTS_PER_TOKEN_NAMES,
    Architecture,
)
from models.fixtures import INDEX_PATH, Fixture, load_index

OPSET = 20
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
# Largest difference to torch, relative to the largest output. In half precision ORT's CPU rounds oftener than torch.
TOLERANCES = {"fp32": 1e-5, "fp16": 1e-2}
# (batch, tokens) of the check; neither is the traced shape.
CHECKED_SHAPES = ((1, 1), (2, 7), (4, 3))
# Differs from every constant of the geometry, and from 0 and 1, which torch.export would bake in.
TRACED_SHAPE = (3, 5)


class ExportError(Exception):
    """An exported file does not say what the torch model says."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One file to write."""

    architecture: Architecture
    kind: str
    precision: str
    exporter: str = "dynamo"

    @property
    def name(self) -> str:
        return f"{self.architecture.name}_{self.kind}_{self.exporter}_{self.precision}"


def targets() -> list[Target]:
    """Return every fixture that the table of architectures asks for, sorted by name."""
    found = [Target(row, kind, precision) for row in ARCHITECTURES for kind in row.kinds for precision in DTYPES]
    return sorted(found, key=lambda target: target.name)


class Block(torch.nn.Module):
    """hidden_states (batch, sequence, H) -> output of that shape, without the router values some blocks return."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output = self.block(hidden_states)
        if isinstance(output, tuple):
            output = output[0]
        # Some blocks leave the tokens flat. Not for all: a reshape to the same shape would add nodes.
        return output if output.ndim == hidden_states.ndim else output.view(hidden_states.shape)


class CausalLM(torch.nn.Module):
    """input_ids (batch, sequence) int64 -> logits (batch, sequence, vocabulary), without a key-value cache."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def draw_weight(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw one fp32 parameter.

    Gains are near 1 and biases are not 0, so that a rewrite that drops one shows. Router logits get a standard
    deviation of about 2, so that experts are seldom nearly equal.
    """
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) < 2 and name.endswith(("weight", "scale")):
        return 1 + np.float32(0.1) * values
    if len(shape) < 2 or name.endswith("bias"):
        return np.float32(0.2) * values
    is_router = re.search(r"\b(router|gate)\b", name) is not None
    gain = np.float32(2 if is_router else 1)
    return gain / np.sqrt(np.float32(shape[-1])) * values


def build_model(row: Architecture, dtype: torch.dtype) -> torch.nn.Module:
    """Build the language model of `row` with seeded weights, in `dtype` but for what its class keeps in fp32."""
    config_class = transformers.CONFIG_MAPPING[row.name]
    names = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    experts = {name: row.experts for name in EXPERT_COUNT_NAMES if name in names}
    per_token = {name: row.k for name in EXPERTS_PER_TOKEN_NAMES if name in names}
    config = config_class(**{**COMMON_CONFIG, **experts, **per_token, **row.config})
    model = transformers.AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float32,
        attn_implementation="eager",
        # The default, grouped_mm, has no ONNX translation; eager loops over data.
        experts_implementation="batched_mm",
    )
    # What from_pretrained would keep in fp32; from_config and .half() do not look at it.
    kept_in_fp32 = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    keep = re.compile("|".join(rf"(^|\.){re.escape(part)}($|\.)" for part in kept_in_fp32) or "$^")
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not tensor.is_floating_point():
                continue
            rng = np.random.default_rng([zlib.crc32(row.name.encode()), zlib.crc32(name.encode())])
            values = torch.from_numpy(draw_weight(name, tuple(tensor.shape), rng))
            tensor.data = values.to(torch.float32 if keep.search(name) else dtype)
    return model.eval().requires_grad_(False)


def moe_blocks(model: torch.nn.Module, row: Architecture) -> list[torch.nn.Module]:
    """Return the MoE blocks of `model` in layer order."""
    blocks = [module for module in model.modules() if type(module).__name__ == row.block_class]
    if not blocks:
        raise ExportError(f"{row.name}: no {row.block_class} in {type(model).__name__}")
    return blocks


def strip(model: ir.Model) -> None:
    """Remove metadata and doc strings in place: stack traces are nine tenths of a freshly exported small file."""
    common_passes.ClearMetadataAndDocStringPass()(model)
    for graph in model.graphs():
        values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
        for value in values:
            value.metadata_props.clear()
            value.doc_string = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporter's progress report and its warnings about optional packages off the terminal."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def export_dynamo(module: torch.nn.Module, feeds: dict[str, np.ndarray], output_name: str) -> ir.Model:
    """Export `module` with dynamic batch and sequence."""
    with quiet():
        program = torch.onnx.export(
            module,
            tuple(torch.from_numpy(value) for value in feeds.values()),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(feeds),
            output_names=[output_name],
            dynamic_shapes=tuple({0: "batch", 1: "sequence"} for _ in feeds),
            verbose=False,
        )
    return program.model


def compare(fixture: Fixture, module: torch.nn.Module) -> float:
    """Run the file on ONNX Runtime's CPU provider against torch; return the largest relative difference.

    Raises:
        ExportError: if it is above the precision's tolerance, or the outputs are not finite.
    """
    session = onnxruntime.InferenceSession(fixture.path, providers=["CPUExecutionProvider"])
    worst = 0.0
    for seed, (batch, tokens) in enumerate(CHECKED_SHAPES):
        feeds = fixture.sample_inputs(seed, batch, tokens)
        (actual,) = session.run(None, feeds)
        with torch.no_grad():
            expected = module(*(torch.from_numpy(value) for value in feeds.values())).numpy()
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            raise ExportError(
                f"{fixture.name}: output for (batch, tokens) = {(batch, tokens)} should be {expected.dtype}"
                f"{expected.shape}, got {actual.dtype}{actual.shape}"
            )
        difference = np.abs(actual.astype(np.float64) - expected).max() / np.abs(expected).astype(np.float64).max()
        if not difference <= TOLERANCES[fixture.precision]:  # also where it is NaN
            raise ExportError(
                f"{fixture.name}: ONNX Runtime differs from torch by {difference:.2e} of the largest output at "
                f"(batch, tokens) = {(batch, tokens)}, allowed are {TOLERANCES[fixture.precision]:.0e}"
            )
        worst = max(worst, float(difference))
    return worst


def export(target: Target, out: Path) -> Fixture:
    """Write one fixture into `out` and return its index row; nothing is left there if the check fails."""
    row = target.architecture
    with quiet():
        model = build_model(row, DTYPES[target.precision])
    blocks = moe_blocks(model, row)
    module = Block(blocks[0]) if target.kind == "block" else CausalLM(model)
    module.eval()
    unchecked = Fixture(
        name=target.name,
        path=out / f".{target.name}.onnx",
        architecture=row.name,
        kind=target.kind,
        exporter=target.exporter,
        precision=target.precision,
        layers=1 if target.kind == "block" else len(blocks),
        experts=row.experts,
        k=row.k,
        opset=OPSET,
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
    )
    feeds = unchecked.sample_inputs(0, *TRACED_SHAPE)
    onnx_model = export_dynamo(module, feeds, "output" if target.kind == "block" else "logits")
    strip(onnx_model)
    try:
        ir.save(onnx_model, unchecked.path)
        onnx.checker.check_model(unchecked.path, full_check=True)
        difference = compare(unchecked, module)
        path = unchecked.path.replace(out / f"{target.name}.onnx")
    finally:
        unchecked.path.unlink(missing_ok=True)
    print(f"{path.name}: {path.stat().st_size / 1024:.1f} KiB, differs from torch by {difference:.1e}")
    return dataclasses.replace(unchecked, path=path)


def index_row(fixture: Fixture) -> dict[str, Any]:
    """Return `fixture` as `index.json` keeps it."""
    values = dataclasses.asdict(fixture)
    return {"name": values.pop("name"), "file": values.pop("path").name, **values}


def write_index(fixtures: list[Fixture], index_path: Path) -> None:
    """Write `index.json`: `fixtures`, and the rows already there that still have a target and are not among them."""
    known = {target.name for target in targets()}
    rows = {old.name: old for old in load_index(index_path) if old.name in known} if index_path.exists() else {}
    rows |= {fixture.name: fixture for fixture in fixtures}
    text = json.dumps([index_row(rows[name]) for name in sorted(rows)], indent=1)
    index_path.write_text(text + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m models.export", description="Rebuild the ONNX fixtures.")
    parser.add_argument("--only", action="append", metavar="NAME", help="a fixture or an architecture; may be repeated")
    parser.add_argument("--out", type=Path, default=INDEX_PATH.parent, metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(arguments)

    chosen = targets()
    if options.only:
        names = {name for target in chosen for name in (target.name, target.architecture.name)}
        for name in options.only:
            if name not in names:
                rows = ", ".join(row.name for row in ARCHITECTURES)
                parser.error(f"--only {name}: no such fixture or architecture; the architectures are {rows}")
        chosen = [target for target in chosen if {target.name, target.architecture.name} & set(options.only)]
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        fixtures = [export(target, options.out) for target in chosen]
    except ExportError as error:
        print(error, file=sys.stderr)
        return 1
    write_index(fixtures, options.out / INDEX_PATH.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
