"""Keeping transformers' progress bars and log lines out of output that is ours to shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_transformers"]


@contextmanager
def quiet_transformers(*, progress_bars: bool = False) -> Iterator[None]:
    """Let transformers log errors only, and draw no progress bars unless asked; as it was before on exit.

    Args:
        progress_bars: Keep the bars, for a download that may take minutes.
    """
    from transformers.utils import logging  # noqa: PLC0415 - importing transformers takes seconds

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not progress_bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
