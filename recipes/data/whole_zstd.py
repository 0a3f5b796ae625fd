"""Read .zst files to their end: with the package zstandard, fsspec takes a file that was cut for a whole one."""

import io

from fsspec.compression import compr, register_compression

from .derived_file import DerivedFile


try:
    from zstandard import ZstdDecompressor
except ImportError:
    ZstdDecompressor = None

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


def read_whole_frames():
    """Let fsspec, and so `datasets`, read .zst files as `WholeFrames`."""
    if ZstdDecompressor is not None:
        write = compr["zstd"]
        read = lambda file, mode="rb": io.BufferedReader(WholeFrames(file)) if "r" in mode else write(file, mode)  # noqa: E731
        register_compression("zstd", read, "zst", force=True)
