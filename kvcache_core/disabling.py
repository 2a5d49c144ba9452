"""What must not be used: the configuration's `disable` and the environment's `KVCACHE_DISABLE`.

Either may name backends, distributions, `distribution:backend`, or everything with `*`. The variable is read when
a selection is made, so it also works on programs that build their configuration in code.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvcache_core.discovery import Entry
from kvcache_core.errors import BackendDisabledError, ConfigWarning
from kvcache_core.messages import DISABLE_VARIABLE, FIRST_PARTY, disabled
from kvcache_core.names import parse_request
from kvcache_core.registry import Backend, BackendRegistry

if TYPE_CHECKING:
    from kvcache_core.fit import Wishes

__all__ = ["Disabled", "Ban"]

_EVERYTHING = "*"


class Ban(NamedTuple):
    """One item of a list: the user's word, and the variable or key that holds it."""

    word: str
    origin: str


@dataclass(frozen=True)
class Disabled:
    """All that is switched off at the moment."""

    bans: tuple[Ban, ...] = ()

    @classmethod
    def read(cls, wishes: Wishes | None = None, environ: Mapping[str, str] | None = None) -> Disabled:
        """Collect what the configuration and the environment switch off.

        Args:
            wishes: The configuration, if any.
            environ: The environment; that of the process, as it is now, when None.
        """
        variable = (os.environ if environ is None else environ).get(DISABLE_VARIABLE, "")
        bans = [Ban(word.strip(), f"environment variable {DISABLE_VARIABLE}") for word in variable.split(",")]
        if wishes is not None and wishes.disable:
            origin = wishes.origin("disable")
            key = "the config key 'disable'"
            bans += [
                Ban(word, origin if DISABLE_VARIABLE in origin else f"{key} ({origin})") for word in wishes.disable
            ]
        return cls(tuple(ban for ban in bans if ban.word))

    def ban_on(self, item: Entry | Backend) -> Ban | None:
        """Return what switches a backend or an observer off, or None."""
        owner = item.distribution.key if item.distribution else None
        names = {item.name, item.qualified, owner}
        return next(
            (ban for ban in self.bans if ban.word == _EVERYTHING or str(parse_request(ban.word)) in names), None
        )

    def error(self, item: Entry | Backend) -> BackendDisabledError | None:
        """Return the error for using a backend that is switched off, or None when it is not."""
        ban = self.ban_on(item)
        return disabled(item.name, item.distribution, ban.word, ban.origin) if ban else None

    def warn_unknown(self, registry: BackendRegistry) -> None:
        """Warn, once for each word, about what names nothing that is or could be installed."""
        known: set[str] = {*FIRST_PARTY, *FIRST_PARTY.values()}
        items: list[Entry | Backend] = [*registry.entries(), *registry.observers(), *registry.registered()]
        for item in items:
            known |= {item.name, item.qualified}
            if item.distribution:
                known.add(item.distribution.key)
        for ban in self.bans:
            if ban.word != _EVERYTHING and str(parse_request(ban.word)) not in known and registry.first_time(ban):
                warnings.warn(
                    f"{ban.origin} names {ban.word!r}, but no installed backend or distribution is called that",
                    ConfigWarning,
                    stacklevel=3,
                )
