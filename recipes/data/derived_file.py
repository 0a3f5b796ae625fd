"""A file to read that is made from another one, piece by piece."""

import io
from abc import abstractmethod
from typing import Any


class DerivedFile(io.RawIOBase):
    def __init__(self, file: Any):
        self.file, self.left = file, memoryview(b"")  # left: made, but not yet read

    @abstractmethod
    def more(self) -> bytes | None:
        """Return what comes next, which may be empty, or None at the end."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.left:
            made = self.more()
            if made is None:
                return 0
            self.left = memoryview(made)
        size = min(len(buffer), len(self.left))
        buffer[:size], self.left = self.left[:size], self.left[size:]
        return size

    def close(self):
        self.file.close()
        super().close()
