"""The order of work on a GPU that several streams ask for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["StreamOrder"]


class StreamOrder:
    """Makes a stream wait for what others were asked before, whenever the current stream changes.

    Blocks go from one sequence to another as soon as they are free, which the host knows and the device does not: a
    kernel that reads a block for its old owner may still be waiting on one stream when the new owner writes to it on
    another. So whoever uses the pool first waits for every other stream that has used it. With a single stream that
    is one comparison, and nothing is asked of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._side: torch.cuda.Stream | None = None

    def enter(self) -> None:
        """Order the current stream after all others that have entered before."""
        current = torch.cuda.current_stream(self._device)
        if len(self._streams) == 1 and current.cuda_stream in self._streams:
            return
        if torch.cuda.is_current_stream_capturing():
            return  # a graph cannot wait for what is outside of it; who replays it enters first
        with self._lock:
            if self._side is not None and self._side.query():
                self._streams.pop(self._side.cuda_stream, None)  # it is idle, and whoever uses it notes it again
            others = [stream for key, stream in self._streams.items() if key != current.cuda_stream]
            self._streams[current.cuda_stream] = current
        for stream in others:
            current.wait_stream(stream)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run what is inside on a stream of its own, after all that was asked before and before all that comes later.

        Only one thread may be inside at a time.
        """
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call,unused-ignore]
        side = self._side
        try:
            with torch.cuda.stream(side):
                self.enter()
                yield
        finally:
            with self._lock:  # again, for it may have been idle and forgotten before the work inside was asked for
                self._streams[side.cuda_stream] = side

    def wait_aside(self) -> None:
        """Have the host wait for the stream aside."""
        if self._side is not None:
            self._side.synchronize()  # type: ignore[no-untyped-call,unused-ignore]
