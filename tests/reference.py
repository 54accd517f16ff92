"""Moved: see dtrain/reference.py."""

from dtrain.reference import *  # noqa: F403
