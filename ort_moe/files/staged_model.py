"""A complete model beside its target, written without reading weights that stay where they are."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Container
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ort_moe.errors import OutputError
from ort_moe.files.fresh_weights import in_need_of_a_file, is_fresh, placed, rename_locations
from ort_moe.files.loading import begins_like_a_model, data_files, external_tensors
from ort_moe.files.staging import (
    HOW_TO_REPLACE,
    check_file_place,
    check_still_free,
    file_beside,
    folder_beside,
    give_usual_mode,
    same_file,
)

if TYPE_CHECKING:
    import onnx_ir as ir

KEEP = "keep"
"""External data stays in its files: referenced from the same folder, copied to another.

Weights that are made anew, such as transposed ones, go to a file of their own, named after the output, where the model
has external data or would not fit into one file.
"""


class StagedModel:
    """A complete model beside its target, moved into place by `commit` and deleted where that does not come.

    `path` can be loaded and run from the moment the object is made. Use it as a context manager: leaving it without
    a commit, by an error or an interrupt, leaves nothing behind.

    Args:
        model: What to write.
        target: Where it shall go; the folder must exist.
        source: The file that it was read from.
        external_data: `KEEP`, or the name of one file beside the target that takes all weights.
        force: Whether what is there is replaced: a model, the source even, and files of external data.

    Raises:
        OutputError: It cannot be written there.
    """

    def __init__(
        self,
        model: ir.Model,
        target: str | os.PathLike[str],
        *,
        source: str | os.PathLike[str],
        external_data: str = KEEP,
        force: bool = False,
    ) -> None:
        self.target = Path(os.path.abspath(target))
        self._source = Path(os.path.abspath(source))
        self._scratch: list[Path] = []
        self._moves: list[tuple[Path, Path]] = []
        self._begun: list[tuple[Path, Path, Path]] = []  # of these moves, and where each puts what was there before
        self._final_names: dict[str, str] = {}  # of data files that cannot have them before they are moved
        check_target(self.target, source=self._source, external_data=external_data, force=force)
        try:
            self._write(model, external_data, force)
        except OSError as error:
            self.discard()
            raise OutputError(f"cannot write {self.target}: {error.strerror or error}") from error
        except BaseException:
            self.discard()
            raise
        places = [final for _, final in self._moves]
        self._free = [] if force else [place for place in places if not os.path.lexists(place)]

    def _write(self, model: ir.Model, external_data: str, force: bool) -> None:
        folder = self.target.parent
        kept = self._kept_files(model)
        if any(same_file(self.target, path) for path in kept.values()):
            raise OutputError(f"cannot write {self.target}: it holds the input's own weights; name another output")
        if external_data != KEEP:
            kept = {}
        elif self.target.name in kept:
            raise OutputError(
                f"cannot write {self.target}: the input's weights lie in a file of that name; name another output"
            )
        own = self._source.parent
        has_files = bool(kept) or bool(_data_files_of(self._source))
        fresh = in_need_of_a_file(model, own, has_files=has_files) if external_data == KEEP else []
        fresh_name = _unlike(f"{self.target.name}.data", kept)
        if fresh:
            self._check_data_target(fresh_name, None, force)
        # A folder for what shall be moved; where data is referenced, it must lie beside the model already.
        self._scratch.append(folder_beside(self.target))
        self.path = self._scratch[0] / self.target.name
        if kept and folder.samefile(self._source.parent):
            self.path = self._beside()
            if fresh:
                staged = self._beside()
                self._final_names[staged.name] = fresh_name
                self._moves.append((staged, folder / fresh_name))
                fresh_name = staged.name
        else:
            for location, path in kept.items():
                self._check_data_target(location, path, force)
                copy = self._scratch[0] / location
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
                self._moves.append((copy, folder / location))
            if fresh:
                self._moves.append((self._scratch[0] / fresh_name, folder / fresh_name))
        if external_data != KEEP:
            self._check_data_target(external_data, None, force)
            _serialize(model, self.path, external_data)
            written = self.path.parent / external_data
            if written.exists():  # a model of small tensors alone has none
                self._moves.append((written, folder / external_data))
        else:
            with placed(model, own, fresh, self.path.parent / fresh_name):
                _serialize(model, self.path, None)
        self._moves.append((self.path, self.target))

    def _beside(self) -> Path:
        """A new empty file beside the target."""
        self._scratch.append(file_beside(self.target))
        return self._scratch[-1]

    def _kept_files(self, model: ir.Model) -> dict[str, Path]:
        """The input's data files that the model still reads: path by location."""
        tensors = [tensor for tensor in external_tensors(model) if not is_fresh(tensor, self._source.parent)]
        return {os.fspath(tensor.location): Path(tensor.path) for tensor in tensors}

    def _check_data_target(self, location: str, copied_from: Path | None, force: bool) -> None:
        """Refuses to overwrite a data file that may be another model's."""
        final = self.target.parent / location
        if same_file(final, self._source):
            raise OutputError(f"cannot write {final}: it is the input; choose another name")
        if not final.exists() or (copied_from is not None and filecmp.cmp(copied_from, final, shallow=True)):
            return
        if self._source.exists() and any(final.samefile(path) for path in _data_files_of(self._source)):
            raise OutputError(f"cannot write {final}: it holds the input's own weights; choose another name")
        if not force:
            raise OutputError(
                f"cannot write {final}: it exists and may belong to another model; name another file with "
                "--external-data, or use --force to replace it"
            )

    def commit(self) -> None:
        """Moves data and model into place, the model last: until that is there, all that was replaced can come back.

        Raises:
            OutputError: A move failed, or something has come meanwhile to a place that was free; what was there before
                is there again.
        """
        try:
            for place in self._free:
                check_still_free(place)
            if self._final_names:
                rename_locations(self.path, self._final_names)
            for number, (staged, final) in enumerate(self._moves):
                final.parent.mkdir(parents=True, exist_ok=True)
                if staged in self._scratch or staged == self.path:
                    give_usual_mode(staged)
                if staged != self.path:
                    aside = Path(f"{self._scratch[0]}.{number}.old")
                    self._begun.append((staged, final, aside))
                    if os.path.lexists(final) and not final.is_dir():
                        final.rename(aside)
                staged.replace(final)
        except OSError as error:
            raise OutputError(f"cannot write {self.target}: {error.strerror or error}") from error
        finally:
            self.discard()

    def discard(self) -> None:
        """Deletes what was staged and not moved, and what was replaced.

        Where the model itself has not been moved, what was replaced comes back in place of its deletion.
        """
        while self._begun:
            staged, final, aside = self._begun[-1]
            if not self.path.exists():
                aside.unlink(missing_ok=True)
            else:
                if not staged.exists():
                    final.rename(staged)
                if os.path.lexists(aside):
                    aside.rename(final)
            self._begun.pop()
        for scratch in self._scratch:
            if scratch.is_dir():
                shutil.rmtree(scratch, ignore_errors=True)
            else:
                scratch.unlink(missing_ok=True)
        self._scratch.clear()

    def __enter__(self) -> StagedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def check_target(
    target: str | os.PathLike[str], *, source: str | os.PathLike[str], external_data: str = KEEP, force: bool = False
) -> None:
    """Looks whether the output can be written there, before work is put into it.

    Raises:
        OutputError: It cannot; or something is there, such as the input, and `force` is not set, or it is no model.
    """
    target = Path(os.path.abspath(target))
    check_file_place(target)
    if not force and os.path.lexists(target):
        what = "is the input" if same_file(target, source) else "exists"
        raise OutputError(f"cannot write {target}: it {what}; {HOW_TO_REPLACE}")
    if target.exists() and not same_file(target, source):
        try:
            replaceable = begins_like_a_model(target)
        except OSError as error:
            raise OutputError(
                f"cannot write {target}: it exists and cannot be read, to see whether it is a model"
            ) from error
        if not replaceable:
            raise OutputError(f"cannot write {target}: it exists and is no ONNX model, and only such are replaced")
    if external_data != KEEP:
        if Path(external_data).name != external_data or external_data in ("", ".", ".."):
            raise OutputError(
                f"cannot write external data to '{external_data}': a file name without a folder is expected"
            )
        if external_data == target.name:
            raise OutputError(f"cannot write external data to '{external_data}': it is the name of the output itself")


def _unlike(name: str, taken: Container[str]) -> str:
    """The name, or where that is taken, such as by weights that go to the same folder, one with a number."""
    stem, number, free = name.removesuffix(".data"), 2, name
    while free in taken:
        free, number = f"{stem}.{number}.data", number + 1
    return free


def _data_files_of(path: Path) -> list[Path]:
    """External data files that exist of the model at `path`; none where it is no model."""
    import onnx_ir as ir

    if not path.is_file():
        return []
    try:
        model = ir.load(path, format="protobuf")
    except Exception:  # whatever is wrong with it, it is then no model that owns data
        return []
    return [file for file in data_files(model).values() if file.exists()]


def _serialize(model: ir.Model, path: Path, external_data: str | None) -> None:
    import google.protobuf.message
    import onnx_ir as ir

    try:
        ir.save(model, path, format="protobuf", external_data=external_data)
    except google.protobuf.message.EncodeError as error:  # its one cause, for a graph that onnx_ir has built
        raise OutputError(
            f"cannot write {path.name}: it is larger than the 2 GB that one file can hold; use --external-data NAME"
        ) from error
