"""Read .zst files to their end: with the package zstandard, fsspec takes a file that was cut for a whole one."""

import io

from fsspec.compression import compr, register_compression

from .derived_file import DerivedFile


try:
    from zstandard import ZstdDecompressor
except ImportError:
    ZstdDecompressor = None

OF_FSSPEC = compr.get("zstd")
BLOCK = 2**16  # compressed bytes


class WholeFrames(DerivedFile):
    """What the frames of a file hold, one after the other; an EOFError if the file ends within a frame."""

    def __init__(self, file):
        super().__init__(file)
        self.frame = None  # decompressor of the frame that is being read
        self.compressed = b""  # read, but not yet used

    def more(self) -> bytes | None:
        block = self.compressed or self.file.read(BLOCK)
        if not block and self.frame is not None:
            raise EOFError("the file ends within a frame of zstd: it was cut")
        if not block:
            return None
        self.frame = self.frame or ZstdDecompressor().decompressobj()
        decompressed = self.frame.decompress(block)
        self.compressed = self.frame.unused_data
        if self.frame.eof:
            self.frame = None
        return decompressed


def opened(file, mode: str = "rb"):
    return io.BufferedReader(WholeFrames(file)) if "r" in mode else OF_FSSPEC(file, mode)


def read_whole_frames():
    """Let fsspec, and so `datasets`, read .zst files as `WholeFrames`, in the whole process from now on."""
    if ZstdDecompressor is not None:
        register_compression("zstd", opened, "zst", force=True)
