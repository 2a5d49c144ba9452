"""Keeps damaged metadata of a neighbour from breaking `import torch`.

When torch is imported it looks up device extensions among the entry points of everything installed. A single
distribution with damaged metadata makes that look-up raise, and the import of torch with it. Nothing can be mended
afterwards, since a failed import leaves torch half initialised.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import sys

__all__ = ["ensure_torch_can_be_imported"]

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"

logger = logging.getLogger(__name__)


@functools.cache
def ensure_torch_can_be_imported() -> None:
    """Make torch skip its look-up of device extensions where that would raise; called before torch is imported.

    Looks once in a process. Does nothing once torch is there, or when the user has set the variable.
    """
    if "torch" in sys.modules or _AUTOLOAD in os.environ:
        return
    try:
        importlib.metadata.entry_points(group="torch.backends")
    except Exception as error:  # noqa: BLE001 - whatever damaged metadata raises; torch would raise the same
        os.environ[_AUTOLOAD] = "0"
        logger.warning(
            "installed metadata is damaged (%s), so torch is imported without its device extensions; "
            "`kvcache doctor` shows where",
            error,
        )
