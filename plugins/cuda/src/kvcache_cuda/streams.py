"""The order of work on a GPU that several streams ask for."""

from __future__ import annotations

import threading

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

    def enter(self) -> None:
        """Order the current stream after all others that have entered before."""
        current = torch.cuda.current_stream(self._device)
        if len(self._streams) == 1 and current.cuda_stream in self._streams:
            return
        if torch.cuda.is_current_stream_capturing():
            return  # a graph cannot wait for what is outside of it; who replays it enters first
        with self._lock:
            others = [stream for key, stream in self._streams.items() if key != current.cuda_stream]
            self._streams[current.cuda_stream] = current
        for stream in others:
            current.wait_stream(stream)
