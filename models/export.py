"""Rebuild the fixtures: `python -m models.export [--only NAME] [--out DIR]`.

Needs the `export` extra (torch and transformers, pinned). The weights are seeded by name, so a rebuild with the same
versions gives the same files. Every file is run in ONNX Runtime and compared with torch before it is put in place.
"""

import argparse
import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
import transformers

from models.architectures import ARCHITECTURES
from models.exporters import EXPORTERS, export_module
from models.fixtures import INDEX_PATH, STATIC_SHAPE, Fixture, load_index
from models.plan import VARIANTS
from models.targets import Target, targets
from models.torch_models import DTYPES, Block, CausalLM, build_model, moe_blocks
from ort_moe.verification.runnable_model import RunnableModel

# Largest difference to torch, relative to the largest output. In float16 ORT's CPU rounds oftener than torch. For
# bfloat16, which it cannot run, both sides are widened to float32: then only constants in the graph are rounded.
TOLERANCES = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 1e-3}
# (batch, tokens) of the check; neither is the traced shape.
CHECKED_SHAPES = ((1, 1), (2, 7), (4, 3))


class ExportError(Exception):
    """An exported file does not say what the torch model says."""


def compare(fixture: Fixture, module: torch.nn.Module) -> float:
    """Run the file on ONNX Runtime's CPU provider against torch; return the largest relative difference.

    Raises:
        ExportError: if it is above the precision's tolerance, or the outputs are not finite.
    """
    worst = 0.0
    if fixture.precision == "bf16":
        module = copy.deepcopy(module).float()
    with RunnableModel(fixture.path) as model:
        run = model.session(with_library=False)
        for seed, (batch, tokens) in enumerate([STATIC_SHAPE] * 3 if fixture.static else CHECKED_SHAPES):
            feeds = fixture.sample_inputs(seed, batch, tokens)
            if fixture.precision == "bf16":
                feeds = {name: _widen(value) for name, value in feeds.items()}
            with torch.no_grad():
                results = module(*(torch.from_numpy(value) for value in feeds.values()))
            expected = results if isinstance(results, tuple) else (results,)
            for (name, actual), value in zip(run(feeds).items(), expected, strict=True):
                worst = max(worst, _difference(f"{fixture.name}: {name} of {(batch, tokens)}", actual, value.numpy()))
    if not worst <= TOLERANCES[fixture.precision]:
        raise ExportError(
            f"{fixture.name}: ONNX Runtime differs from torch by {worst:.2e} of the largest output, allowed are "
            f"{TOLERANCES[fixture.precision]:.0e}"
        )
    return worst


def _widen(value: np.ndarray) -> np.ndarray:
    return value if np.issubdtype(value.dtype, np.integer) else value.astype(np.float32)


def _difference(what: str, actual: np.ndarray, expected: np.ndarray) -> float:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise ExportError(
            f"{what} (batch, tokens) should be {expected.dtype}{expected.shape}, got {actual.dtype}{actual.shape}"
        )
    difference = np.abs(actual.astype(np.float64) - expected).max() / np.abs(expected).astype(np.float64).max()
    return float(difference) if np.isfinite(difference) else float("inf")


def export(target: Target, out: Path) -> Fixture:
    """Write one fixture into `out` and return its index row; nothing is left there if the check fails."""
    row, variant = target.architecture, VARIANTS[target.variant]
    model = build_model(row, DTYPES[target.precision], EXPORTERS[target.exporter][1])
    blocks = moe_blocks(model, row)
    if target.kind == "block":
        module = Block(blocks[0])
    else:
        module = CausalLM(model, router_logits=variant.router_logits, masked=target.exporter == "legacy")
    module.eval()
    unchecked = Fixture(
        name=target.name,
        path=out / f".{target.name}.onnx",
        architecture=row.name,
        kind=target.kind,
        exporter=target.exporter,
        precision=target.precision,
        variant=target.variant,
        static=variant.static,
        layers=1 if target.kind == "block" else len(blocks),
        experts=row.experts,
        k=row.k,
        opset=target.opset,
        torch=torch.__version__.split("+")[0],
        transformers=transformers.__version__,
    )
    feeds = {name: _tensor(value) for name, value in unchecked.sample_inputs(0, *STATIC_SHAPE).items()}
    outputs = ["output" if target.kind == "block" else "logits"]
    if variant.router_logits:
        outputs += [f"router_logits_{i}" for i in range(len(blocks))]
    onnx_model = export_module(target.exporter, module, feeds, outputs, opset=target.opset, static=variant.static)
    try:
        ir.save(onnx_model, unchecked.path)
        # The standard has no TopK of bfloat16 before opset 24; the exporters write it all the same.
        onnx.checker.check_model(unchecked.path, full_check=target.precision != "bf16")
        difference = compare(unchecked, module)
        path = unchecked.path.replace(out / f"{target.name}.onnx")
    finally:
        unchecked.path.unlink(missing_ok=True)
    print(f"{path.name}: {path.stat().st_size / 1024:.1f} KiB, differs from torch by {difference:.1e}")
    return dataclasses.replace(unchecked, path=path)


def _tensor(value: np.ndarray) -> torch.Tensor:
    """`value` as torch holds it; torch takes no bfloat16 from NumPy."""
    return torch.from_numpy(_widen(value)).bfloat16() if value.dtype.name == "bfloat16" else torch.from_numpy(value)


def index_row(fixture: Fixture) -> dict[str, Any]:
    """Return `fixture` as `index.json` keeps it."""
    values = dataclasses.asdict(fixture)
    return {"name": values.pop("name"), "file": values.pop("path").name, **values}


def write_index(fixtures: list[Fixture], index_path: Path) -> None:
    """Write `index.json`: `fixtures`, and the rows already there that still have a target and are not among them."""
    known = {target.name for target in targets()}
    rows = {old.name: old for old in load_index(index_path) if old.name in known} if index_path.exists() else {}
    rows |= {fixture.name: fixture for fixture in fixtures}
    text = ",\n ".join(json.dumps(index_row(rows[name])) for name in sorted(rows))
    index_path.write_text(f"[\n {text}\n]\n", encoding="utf-8")


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
