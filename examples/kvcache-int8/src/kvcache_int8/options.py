"""The options of the int8 backend."""

from __future__ import annotations

from kvcache_core.plugin import BackendOptions
from pydantic import Field

__all__ = ["Int8Options"]


class Int8Options(BackendOptions):
    """Options of the int8 backend.

    Attributes:
        chunk_tokens: Tokens that are converted at a time where a decode step attends.
    """

    chunk_tokens: int = Field(
        default=1024, ge=1, description="tokens that are converted to floats at a time in a decode step"
    )
