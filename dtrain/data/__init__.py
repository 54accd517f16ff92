"""What a run reads: sources of tokens, and batches that are a pure function of (seed, step)."""

from .batches import batch, permute, validation_batches
from .sources import DataConfig, DataError, Source, open_source

__all__ = ["DataConfig", "DataError", "Source", "batch", "open_source", "permute", "validation_batches"]
