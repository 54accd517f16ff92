"""What can be wrong with data, told in one line."""

from __future__ import annotations

import importlib
from typing import Any


class DataError(ValueError):
    """The data cannot serve the run; the message is one line for a person."""


def need(module: str, why: str) -> Any:
    """An optional module. Raises DataError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise DataError(f"{why} needs the package {package!r}; install it: pip install 'dtrain[data]'") from e
