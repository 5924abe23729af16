"""Optimises the models in a folder of onnxruntime-genai, and writes a folder that it loads as it is."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ort_moe.choices import Target
from ort_moe.errors import EnvironmentUnfitError, OutputError
from ort_moe.files import genai_config
from ort_moe.files.genai_config import GenaiConfig, read_config
from ort_moe.files.loading import data_files, load_model
from ort_moe.files.model_path import check_output_name
from ort_moe.files.staged_folder import StagedFolder, check_folder, files_of
from ort_moe.installation.library import NAME as LIBRARY
from ort_moe.installation.library import build_info, library_path
from ort_moe.ops import DOMAIN
from ort_moe.optimization.folder_report import FolderReport
from ort_moe.optimization.optimize_model import Settings, optimize_model, packing_warnings

if TYPE_CHECKING:
    from ort_moe.optimization.report import Report


def optimize_folder(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    settings: Settings,
    *,
    target: Target | None = None,
    require_match: bool = False,
    force: bool = False,
) -> FolderReport:
    """Fuses routers and experts in the models that a genai_config.json names; see `ort_moe.optimize`.

    Models in which something matched are written anew. The configuration then names our library, of which a copy lies
    in the output: onnxruntime-genai takes none from elsewhere, and the folder can be moved. All else is carried over
    byte for byte.

    Args:
        source: The folder.
        output: A new folder; None: a dry run, which writes and verifies nothing.
        settings: What shall be done to each model, but for the target.
        target: Where the models shall run; None: where the configuration has them run.
        require_match: Write nothing where nothing matched in any model.
        force: Replace another model folder that is there, with all that lies in it.

    Raises:
        ModelError: The folder is no model folder, or one of its models cannot be read or run.
        OutputError: The output cannot be written there.
        VerificationError: The results of a model differ; nothing was put in place.
        EnvironmentUnfitError: There is no library to copy.
        ValueError: A setting is unknown.
    """
    folder = Path(source)
    config = read_config(folder)
    settings = replace(settings, target=target or config.target)
    settings.packing()
    files = files_of(folder)
    report = FolderReport(os.fspath(source), None, settings.target, ())
    if output is None:
        models = [optimize_model(folder / name, None, settings) for name in config.models]
        return replace(report, models=tuple(models), warnings=_warnings(config, settings, models))
    check_output_name(output)
    final = Path(os.path.abspath(output))
    check_folder(final, folder, lambda there: (there / genai_config.NAME).is_file(), force=force)
    if settings.external_data in (genai_config.NAME, LIBRARY):
        raise OutputError(f"cannot write external data to '{settings.external_data}': another file has that name")
    if settings.external_data != "keep" and len(config.models) > 1:
        raise OutputError(
            f"cannot write the weights of {len(config.models)} models to one file '{settings.external_data}'; "
            "without --external-data each keeps its own"
        )
    if settings.target != "contrib":
        library_path()  # looked for before work is put into the models
    with StagedFolder(final, force=force) as staged, _told_of(final, staged.path):
        models = []
        for name in config.models:
            (staged.path / name).parent.mkdir(parents=True, exist_ok=True)
            # What does not match is carried over with the other files.
            models.append(optimize_model(folder / name, staged.path / name, settings, require_match=True))
        report = replace(report, models=tuple(models), warnings=_warnings(config, settings, models))
        if require_match and not report.matched:
            return report
        ours = [name for name, model in zip(config.models, models, strict=True) if _has_our_nodes(model)]
        if ours:
            text = config.with_library(LIBRARY, ours)
            staged.copy(library_path(), LIBRARY)
            if text != config.text:
                (staged.path / genai_config.NAME).write_bytes(text.encode("utf-8"))
        rest = _carried(folder, files, config, models, set(files_of(staged.path)))
        for name in rest:
            staged.copy(folder / name, name)
        staged.commit()
    return replace(
        report,
        output=os.fspath(output),
        models=tuple(replace(m, output=str(final / n)) for n, m in zip(config.models, models, strict=True)),
        library=LIBRARY if ours else None,
        carried=len(rest),
    )


def _carried(
    folder: Path, files: Sequence[str], config: GenaiConfig, models: Sequence[Report], written: Collection[str]
) -> list[str]:
    """The files that are carried over: all but those that were written anew, and weights that no model reads any more.

    Raises:
        OutputError: A file of the input has the name of one that was written, and is none of its models' nor theirs.
    """
    data: dict[bool, set[str]] = {False: set(), True: set()}
    for name, model in zip(config.models, models, strict=True):
        parent = Path(name).parent
        data[model.matched] |= {os.path.normpath(parent / place) for place in data_files(load_model(folder / name))}
    taken = {*config.models, *data[False], *data[True], genai_config.NAME, LIBRARY}
    for name in written:
        if name in files and name not in taken:
            raise OutputError(f"cannot write {folder / name}: the input has a file of that name; choose another")
    stale = data[True] - data[False]
    return [name for name in files if name not in written and name not in stale]


def _has_our_nodes(report: Report) -> bool:
    return any(operator.startswith(f"{DOMAIN}::") for operator in report.operators_after)


def _warnings(config: GenaiConfig, settings: Settings, models: Sequence[Report]) -> tuple[str, ...]:
    """What the models are told of together."""
    return *packing_warnings(settings, models), *_place_warnings(config, models)


def _place_warnings(config: GenaiConfig, models: Sequence[Report]) -> tuple[str, ...]:
    """What keeps fused nodes from running where the configuration has the models run."""
    if not any(_has_our_nodes(model) for model in models):
        return ()
    if strange := config.strange_providers:
        return (
            f"{config.path} asks for {', '.join(strange)}, for which there are no kernels: fused nodes run on the CPU",
        )
    if config.target == "cuda" and _is_without_cuda():
        return (
            f"{config.path} asks for cuda, for which the library of this installation has no kernels: fused nodes run "
            "on the CPU",
        )
    return ()


def _is_without_cuda() -> bool:
    """Whether a library is installed that runs on the CPU alone."""
    try:
        return build_info()["cuda"] is None
    except EnvironmentUnfitError:
        return False


@contextmanager
def _told_of(final: Path, staged: Path) -> Iterator[None]:
    """Lets errors tell of the output, not of where it is made."""
    try:
        yield
    except OutputError as error:
        raise OutputError(str(error).replace(str(staged), str(final))) from error
