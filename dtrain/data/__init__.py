"""What a run reads: sources of tokens, and batches that are a pure function of (seed, step).

documents, encode, tokenizer     texts out of files, and their tokens
chat                             conversations, and what of them is learnt
tokens, manifest                 files of tokens
config, sources                  what is asked for, and opening it
sequences, order, masking        sequences out of a stream, which of them a sample is, masked models
batches, ahead                   a step's batch, and reading it before it is needed
texts, streaming                 texts that are tokenised when a run starts, and as it goes on
pack, show, perplexity           `dtrain data pack`, `dtrain data show`, and what a held-out loss says
"""

from .ahead import Ahead
from .batches import batch, validation_batches
from .config import DataConfig, From, Source
from .errors import DataError
from .masking import Masking
from .order import passes, permute
from .perplexity import report
from .show import counts
from .sources import open_source
from .streaming import Reader
from .tokenizer import Tokenizer, token
from .tokenizer import load as load_tokenizer

__all__ = [
    "Ahead",
    "DataConfig",
    "DataError",
    "From",
    "Masking",
    "Reader",
    "Source",
    "Tokenizer",
    "batch",
    "counts",
    "load_tokenizer",
    "open_source",
    "passes",
    "permute",
    "report",
    "token",
    "validation_batches",
]
