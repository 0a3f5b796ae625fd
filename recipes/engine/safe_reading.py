"""Read torch's sharded checkpoints without executing code that they contain.

The index of such a checkpoint is a pickle, and a pickle may call any function. Here it may only make the types of
objects that an index consists of. Tensors are read with `weights_only`, and all other entries are refused.
"""

import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import StorageMeta


ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "StorageMeta"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}  # types of the path to which it was written


class IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_path = module in ("pathlib", "pathlib._local") and name in PATHS
        if (module, name) in ALLOWED or is_dtype or is_path:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its index asks for {module}.{name}, which has no place in a checkpoint")


class TensorReader(FileSystemReader):
    """Reads the index with the safe unpickler, and the tensors that it lists."""

    def read_metadata(self, *args, **kwargs):
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = IndexUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TensorPlanner(DefaultLoadPlanner):
    """Refuses entries that are not tensors, because they would be unpickled."""

    def load_bytes(self, read_item, value):
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is no tensor")
