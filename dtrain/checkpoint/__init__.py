"""Save a run and go on from it. `checkpoints/README.md` documents what is on disk.

folder     which steps a folder holds, and how one appears only when complete
start      a run's first weights, of a Hugging Face folder or of a checkpoint
tensors    a rank's shards as pieces of global, unpadded tensors, through torch.distributed.checkpoint
"""

from dtrain.checkpoint.folder import Record, compare, find, latest, read, save, steps
from dtrain.checkpoint.start import read_weights, starting_weights
from dtrain.checkpoint.tensors import CheckpointError, Piece, open_tensors, pieces, restore

__all__ = [
    "CheckpointError",
    "Piece",
    "Record",
    "compare",
    "find",
    "latest",
    "open_tensors",
    "pieces",
    "read",
    "read_weights",
    "restore",
    "save",
    "starting_weights",
    "steps",
]
