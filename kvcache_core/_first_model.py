"""Lets pydantic look for its own plugins before any model of ours is built.

pydantic reads the entry points of everything installed when the first model of a process is built. Where a single
neighbour's metadata is damaged, that look-up raises and takes the model's class with it; after that pydantic does
without plugins. So a model that nobody needs goes first.
"""

from __future__ import annotations

import logging

from pydantic import BaseModel

__all__: list[str] = []

try:

    class _First(BaseModel):
        pass

except Exception:  # whatever damaged metadata raises: UnicodeDecodeError, TypeError, ...
    logging.getLogger(__name__).debug("pydantic cannot look for its plugins", exc_info=True)
