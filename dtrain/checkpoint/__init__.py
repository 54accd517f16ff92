"""Save a run and go on from it. `checkpoints/README.md` documents what is on disk.

folder     which steps a folder holds, and how one appears only when complete
tensors    a rank's shards as pieces of global, unpadded tensors, through torch.distributed.checkpoint
"""

from dtrain.checkpoint.folder import Record, compare, find, latest, read, save, steps
from dtrain.checkpoint.tensors import CheckpointError, Piece, pieces, restore

__all__ = [
    "CheckpointError",
    "Piece",
    "Record",
    "compare",
    "find",
    "latest",
    "pieces",
    "read",
    "restore",
    "save",
    "steps",
]
