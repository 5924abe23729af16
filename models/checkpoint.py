"""Write a tiny checkpoint with random weights, as from a hub: `python -m models.checkpoint ARCHITECTURE FOLDER`.

Needs the `export` extra (torch and transformers).
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from models.architectures import ARCHITECTURES, architecture
from models.torch_models import DTYPES, build_model


def write_checkpoint(name: str, folder: Path, *, precision: str = "fp32", **config: object) -> None:
    """Write the model of an architecture, seeded by name, without a tokenizer and without an end of text.

    Args:
        name: Of a row of `models.architectures`.
        folder: Where; made where it is not there.
        precision: `fp32`, `fp16` or `bf16`.
        config: What its configuration says otherwise.

    Raises:
        ValueError: There is no such row.
    """
    row = architecture(name)
    model: Any = build_model(dataclasses.replace(row, config={**row.config, **config}), DTYPES[precision])
    for part in (model.config, getattr(model, "generation_config", None)):  # a part of a model has none
        if part is not None:
            part.use_cache, part.eos_token_id = True, None
    model.save_pretrained(folder)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m models.checkpoint", description="Write a tiny checkpoint.")
    parser.add_argument("architecture", choices=[row.name for row in ARCHITECTURES], metavar="ARCHITECTURE")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    write_checkpoint(options.architecture, options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
