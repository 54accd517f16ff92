"""Save a run and go on from it. `checkpoints/README.md` documents what is on disk.

folder     which checkpoints a run's folder holds, and which one a run goes on from
look       what `dtrain checkpoint` says of one
manifest   whether what is on disk is what was written
saving     how a checkpoint is written, in the background too, and appears only when it is whole
start      a run's first weights, of a Hugging Face folder or of a checkpoint
tensors    a rank's shards as pieces of global, unpadded tensors, through torch.distributed.checkpoint
"""

from dtrain.checkpoint.folder import Record, candidates, choose, claimed, compare, find, latest, read, steps, verify
from dtrain.checkpoint.manifest import problems
from dtrain.checkpoint.saving import SaveConfig, Saver, open_saver, save
from dtrain.checkpoint.start import read_weights, starting_weights
from dtrain.checkpoint.tensors import CheckpointError, Piece, open_tensors, pieces, restore

__all__ = [
    "CheckpointError",
    "Piece",
    "Record",
    "SaveConfig",
    "Saver",
    "candidates",
    "choose",
    "claimed",
    "compare",
    "find",
    "latest",
    "open_saver",
    "open_tensors",
    "pieces",
    "problems",
    "read",
    "read_weights",
    "restore",
    "save",
    "starting_weights",
    "steps",
    "verify",
]
