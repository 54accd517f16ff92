"""Hugging Face's model folders: config.json, safetensors and their names, against dtrain's models.

config     config.json <-> a family and its config
names      where each parameter lies among a folder's tensors
folder     read parts of a folder's tensors, write a folder tensor by tensor
"""

from dtrain.hf.config import DTYPES, HFError, config_of, dtype_of, model_of
from dtrain.hf.folder import BESIDE, KEPT, Folder, copy_beside, keep, model, open_folder, read_config, write_folder
from dtrain.hf.names import Home, homes

__all__ = [
    "BESIDE",
    "DTYPES",
    "KEPT",
    "Folder",
    "HFError",
    "Home",
    "config_of",
    "copy_beside",
    "dtype_of",
    "homes",
    "keep",
    "model",
    "model_of",
    "open_folder",
    "read_config",
    "write_folder",
]
