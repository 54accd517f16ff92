"""Tensors that are there against those that are wanted, by name and shape: strict unless a difference is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]
_LISTED = 8  # differences that a message names


@dataclass(frozen=True)
class Allow:
    """Which differences do not stop: wanted tensors that are `missing`, and `extra` ones that nobody wants."""

    missing: bool = False
    extra: bool = False


@dataclass(frozen=True)
class Differences:
    """Names that are missing, names that are extra, and a sentence for each that has another shape."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    shaped: tuple[str, ...]

    def refused(self, allow: Allow) -> str | None:
        """What stops, in one line that says how to allow it, or None."""
        faults = [f"{n} is missing" for n in self.missing if not allow.missing]
        faults += [f"{n} is surplus" for n in self.extra if not allow.extra] + list(self.shaped)
        if not faults:
            return None
        more = f" and {len(faults) - _LISTED} more" if len(faults) > _LISTED else ""
        flags = ["--allow-missing"] * bool(self.missing and not allow.missing)
        flags += ["--allow-extra"] * bool(self.extra and not allow.extra)
        hint = f"; allow it with {' '.join(flags)}" if flags and not self.shaped else ""
        return f"{', '.join(faults[:_LISTED])}{more}{hint}"

    def said(self, instead: str = "initial values") -> list[str]:
        """What was done about each that was allowed."""
        return [f"missing: {n}: {instead}" for n in self.missing] + [f"surplus: {n}: left out" for n in self.extra]


def differences(found: Mapping[str, Shape], wanted: Mapping[str, Shape], rest: Iterable[str] = ()) -> Differences:
    """What is there against what is wanted; `rest` may be there or not."""
    both = ((n, found[n], shape) for n, shape in wanted.items() if n in found)
    return Differences(
        tuple(sorted(wanted.keys() - found.keys())),
        tuple(sorted(found.keys() - wanted.keys() - set(rest))),
        tuple(f"{n} has shape {list(has)}, not {list(shape)}" for n, has, shape in both if has != shape),
    )
