"""Names of backends and distributions: one spelling for look-up, blocking, extras and collisions; and of devices.

Entry-point names are free text and case-sensitive, distribution names are not; users mix the two. Everything
is compared in the form of `canonical`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["AUTO", "Request", "canonical", "device_fits", "name_problem", "parse_request"]

#: The request that leaves the choice of backend to core.
AUTO = "auto"

_SEPARATORS = re.compile(r"[-_.]+")
_BACKEND_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def canonical(name: str) -> str:
    """Return `name` in lower case with every run of `-`, `_` and `.` as one hyphen."""
    return _SEPARATORS.sub("-", name.strip()).lower()


def name_problem(name: str) -> str | None:
    """Say why a plugin cannot go by `name`, or return None when it can by its canonical form."""
    if canonical(name) == AUTO:
        return f"{name!r} is reserved for the automatic choice"
    # Only ASCII: some other letters, such as the Kelvin sign, become ASCII when lowered and could pose as it.
    if not name.isascii() or not _BACKEND_NAME.fullmatch(canonical(name)):
        return f"{name!r} is not a usable name (letters, digits and single hyphens, starting with a letter)"
    return None


class Request(NamedTuple):
    """What a user asked for, in canonical form: `name`, or `distribution:name`."""

    distribution: str | None
    name: str

    def __str__(self) -> str:
        return f"{self.distribution}:{self.name}" if self.distribution else self.name


def parse_request(text: str) -> Request:
    """Split `"name"` or `"distribution:name"`; anything can be asked for, so nothing is refused here."""
    distribution, colon, name = text.rpartition(":")
    return Request(canonical(distribution) if colon and distribution.strip() else None, canonical(name))


def device_fits(asked: str, offered: str) -> bool:
    """Whether a concrete device is what was asked for: any device, any of a type, or one with its index."""
    if asked in (AUTO, offered):
        return True
    wanted, offer = asked.split(":"), offered.split(":")
    # A device type with a single device, such as "cpu", may be spelled with or without its index 0.
    return wanted[0] == offer[0] and (len(wanted) == 1 or (len(offer) == 1 and wanted[1:] == ["0"]))
