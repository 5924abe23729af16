"""The folder that an export goes to: written beside its place, and moved there when it is whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from ort_moe.errors import OutputError


def check_output_folder(output: str | os.PathLike[str], *, source: str | os.PathLike[str], force: bool = False) -> None:
    """Looks whether an export can be written there, before work is put into it.

    Raises:
        OutputError: It cannot; or it is the model's own folder; or it exists and `force` is not set.
    """
    path = Path(os.path.abspath(output))
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {path}: the folder {path.parent} is read-only")
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise OutputError(f"cannot write {path}: it exists and is no folder")
    if Path(source).exists() and path.samefile(source):
        raise OutputError(f"cannot write {path}: it is the model's own folder; name another output")
    if not force:
        raise OutputError(
            f"cannot write {path}: it exists; name another output, or let --force replace the files of the same names"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {path}: the folder is read-only")


class StagedFolder:
    """A folder beside its place; a context manager that leaves nothing behind where `commit` does not come.

    Args:
        output: Where it shall go.

    Attributes:
        path: Where files are written until then.

    Raises:
        OutputError: Nothing can be written beside it.
    """

    def __init__(self, output: str | os.PathLike[str]) -> None:
        self.output = Path(os.path.abspath(output))
        try:
            self.path = Path(tempfile.mkdtemp(prefix=f".{self.output.name}.", suffix=".tmp", dir=self.output.parent))
        except OSError as error:
            raise OutputError(f"cannot write {self.output}: {error.strerror or error}") from error

    def commit(self) -> None:
        """Moves the folder into place; into one that exists, file by file.

        Raises:
            OutputError: A move failed.
        """
        mask = os.umask(0)
        os.umask(mask)
        try:
            if self.output.exists():
                for file in sorted(self.path.iterdir(), key=lambda file: file.suffix == ".onnx"):  # models last
                    file.replace(self.output / file.name)
            else:
                self.path.chmod(0o777 & ~mask)  # mkdtemp's 0700 would outlive the move
                self.path.replace(self.output)
        except OSError as error:
            raise OutputError(f"cannot write {self.output}: {error.strerror or error}") from error

    def __enter__(self) -> StagedFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
