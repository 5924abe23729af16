"""`ort-moe export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ort_moe.choices import Precision
from ort_moe.cli.arguments import Force
from ort_moe.cli.console import progress, show


def export(
    model_folder: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face model folder.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT", help="The folder to write.", show_default=False)
    ],
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Tokens that the cache holds. [default: as many as the model was made for, at most 4096]",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Sequences side by side.")] = 1,
    precision: Annotated[
        Precision | None, typer.Option(help="Of the weights. [default: as stored]", show_default=False)
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Run both graphs and compare them with PyTorch before the output is put in place.")
    ] = True,
    force: Force = False,
) -> None:
    """Export a Hugging Face model to ONNX, in the form that `optimize` fuses whole.

    A decode graph of fixed shapes and a prefill graph over one file of weights and one key-value cache, with the
    model's configurations and tokenizer beside them. Needs PyTorch and transformers: the extra `export`.
    """
    from ort_moe.exporting.export import export as run

    with progress(f"exporting {model_folder}") as tell:
        result = run(
            model_folder,
            output,
            max_length=max_length,
            batch=batch,
            precision=precision,
            verify=verify,
            force=force,
            progress=lambda step: tell(f"exporting {model_folder}: {step}"),
        )
    show(result)
