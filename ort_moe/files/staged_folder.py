"""A folder that is made beside its target and moved into place as a whole."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType

from ort_moe.errors import LeftoverWarning, ModelError, OutputError
from ort_moe.files.readable import check_readable
from ort_moe.files.staging import HOW_TO_REPLACE, check_parent, check_still_free, folder_beside, give_usual_mode


class StagedFolder:
    """A new folder beside its target, which `commit` moves there; deleted where that does not come.

    Use it as a context manager: leaving it without a commit, by an error or an interrupt, leaves nothing behind, and
    after one nothing of what was there before.

    Args:
        target: Where it shall go; `check_folder` has looked at it.
        force: Whether a folder that is there is replaced.

    Attributes:
        target: Where it shall go.
        path: Where it is.

    Raises:
        OutputError: It cannot be made.
    """

    def __init__(self, target: Path, *, force: bool = False) -> None:
        self.target, self._force = target, force
        try:
            self.path = folder_beside(target)
        except OSError as error:
            raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
        self._aside = Path(f"{self.path}.old")

    def copy(self, source: Path, name: str) -> None:
        """Copies a file, byte for byte, under a name relative to the folder.

        Raises:
            ModelError: The source cannot be read.
            OutputError: It cannot be written.
        """
        check_readable(source)
        final = self.path / name
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, final)
        except OSError as error:
            raise OutputError(f"cannot write {self.target / name}: {error.strerror or error}") from error

    def commit(self) -> None:
        """Moves the folder into place.

        Raises:
            OutputError: That failed, or something has come there meanwhile; what was there before is there again.
        """
        try:
            give_usual_mode(self.path)
            if not self._force:
                check_still_free(self.target)
            elif self.target.exists():
                self.target.rename(self._aside)
            self.path.rename(self.target)
        except OSError as error:
            raise OutputError(f"cannot write {self.target}: {error.strerror or error}") from error
        finally:
            self._put_back()

    def _put_back(self) -> None:
        """Gives the folder that was there its name again, unless the new one has it, however far `commit` has come."""
        if self.path.exists() and self._aside.exists():
            self._aside.rename(self.target)

    def __enter__(self) -> StagedFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()  # where another interrupt kept `commit` from it
        for folder in (self.path, self._aside):
            _delete(folder)


def _delete(folder: Path) -> None:
    """Deletes a folder, in spite of an interrupt, which is passed on afterwards; what cannot be deleted is told of."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if folder.exists():
            warnings.warn(f"cannot delete {folder}, which is of no more use", LeftoverWarning, stacklevel=3)


def check_folder(target: Path, source: Path, replaceable: Callable[[Path], bool], *, force: bool) -> None:
    """Looks whether a folder can be put there, before work is put into it.

    Args:
        target: Where it shall go.
        source: The folder that it is made from.
        replaceable: Whether what is there may be replaced at all.
        force: Whether it shall be.

    Raises:
        OutputError: It cannot.
    """
    real, of_source = (Path(os.path.realpath(path)) for path in (target, source))
    if real == of_source:
        raise OutputError(f"cannot write {target}: it is the input, and a folder is never changed in place")
    if real.is_relative_to(of_source):
        raise OutputError(f"cannot write {target}: it lies in the input; name a folder elsewhere")
    if of_source.is_relative_to(real):
        raise OutputError(f"cannot write {target}: the input lies in it; name a folder elsewhere")
    check_parent(target)
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise OutputError(f"cannot write {target}: it exists and is no folder, but the output of a folder is one")
    if not force:
        raise OutputError(f"cannot write {target}: it exists; {HOW_TO_REPLACE}")
    if any(target.iterdir()) and not replaceable(target):
        raise OutputError(f"cannot write {target}: it exists and is no model folder, and only such are replaced")


def files_of(folder: Path, above: Collection[str] = ()) -> list[str]:
    """Names of all files of a folder and the folders in it, relative to it; links count as what they lead to.

    Raises:
        ModelError: It cannot be read, or holds something that is no file, or folders in a circle.
    """
    real = os.path.realpath(folder)
    if real in above:
        raise ModelError(f"cannot read {folder}: it is a link to a folder that it lies in")
    names: list[str] = []
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ModelError(f"cannot read {folder}: {error.strerror or error}") from error
    for path in entries:
        if path.is_dir():
            names += [os.path.join(path.name, name) for name in files_of(path, [*above, real])]
        elif path.is_file():
            check_readable(path)
            names.append(path.name)
        else:
            what = "a link to a file that is not there" if path.is_symlink() else "no regular file"
            raise ModelError(f"cannot read {path}: it is {what}")
    return names
