"""The one error that a bad checkpoint gives."""

from __future__ import annotations

import os


class CheckpointError(ValueError):
    """A file that cannot be taken at its word. The message reads "file: tensor: what is wrong"."""

    def __init__(self, file: str | os.PathLike[str], tensor: str | None, what: str) -> None:
        self.file, self.tensor = os.fspath(file), tensor
        super().__init__(": ".join(part for part in (self.file, tensor, what) if part))
