"""Every table of the kernels around the experts, one after the other, as `python -m benchmarks.router` prints its own.

    python -m benchmarks.routing [--json FOLDER] [--only 512/10] [--tables router training_router]
                                 [--without-ort] [--compiled]

With --json each is recorded in the folder under its name, as in benchmarks/results.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import finalize, gather_finalize, permute, router, shared_gate, training_router

TABLES: dict[str, tuple[str, Callable[[list[str]], None], tuple[str, ...]]] = {
    "router": ("FusedRouter", router.main, ("--without-ort", "--compiled")),
    "router_maps": ("FusedRouter with routing maps", router.main, ("--maps", "--without-ort", "--compiled")),
    "permute": ("PermuteTokens", permute.main, ()),
    "finalize": ("FinalizeRouting", finalize.main, ()),
    "training_router": ("RouterProbs, RouterScores, AuxLoss", training_router.main, ("--compiled",)),
    "gather_finalize": ("GatherFinalize", gather_finalize.main, ()),
    "shared_gate": ("SharedGateRouter", shared_gate.main, ()),
}
"""By name: the heading, the command, and the options it gets: its own, and of those below the ones that it knows."""


def main(argv: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument(
        "--json", type=Path, metavar="FOLDER", help="also write the results here, a file for each table"
    )
    options.add_argument("--only", help="shapes whose name contains this")
    options.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="these tables alone")
    options.add_argument("--without-ort", action="store_true", help="open no sessions of ONNX Runtime")
    options.add_argument("--compiled", action="store_true", help="time PyTorch's ops through torch.compile, too")
    args = options.parse_args(argv)
    if args.json is not None:
        args.json.mkdir(parents=True, exist_ok=True)  # not found missing when the first table is measured
    asked = {"--without-ort": args.without_ort, "--compiled": args.compiled}
    for name in args.tables:
        heading, command, known = TABLES[name]
        print(f"## {heading}", flush=True)
        given = [option for option in known if asked.get(option, True)]
        given += ["--only", args.only] if args.only is not None else []
        given += ["--json", str(args.json / f"{name}.json")] if args.json is not None else []
        begin = time.perf_counter()
        command(given)
        print(f"{time.perf_counter() - begin:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
