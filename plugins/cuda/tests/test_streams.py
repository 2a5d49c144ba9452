"""Work on several streams is ordered; work on one is not touched. The streams are stand-ins that keep a log."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache_cuda.streams import StreamOrder


class Stream:
    def __init__(self, number: int, log: list[tuple[int, int]]) -> None:
        self.cuda_stream = number
        self._log = log

    def wait_stream(self, other: Stream) -> None:
        self._log.append((self.cuda_stream, other.cuda_stream))


class Device:
    """Which stream is current, whether it is being captured, and who has waited for whom."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int]] = []
        self.streams = [Stream(number, self.log) for number in range(4)]
        self.current = 0
        self.capturing = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.streams[device.current])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.capturing)
    return device


def enter(order: StreamOrder, device: Device, *streams: int) -> list[tuple[int, int]]:
    """Enter on each stream in turn; return who has waited for whom."""
    del device.log[:]
    for stream in streams:
        device.current = stream
        order.enter()
    return list(device.log)


def test_a_single_stream_waits_for_nobody(device: Device) -> None:
    assert enter(StreamOrder(torch.device("cuda")), device, 0, 0, 0) == []


def test_vllm_45704_a_second_stream_waits_for_the_first(device: Device) -> None:
    assert enter(StreamOrder(torch.device("cuda")), device, 0, 1) == [(1, 0)]


def test_vllm_47282_every_use_waits_for_all_other_streams_that_have_used_the_pool(device: Device) -> None:
    """Also when the current stream did not change: another may have been asked something since."""
    order = StreamOrder(torch.device("cuda"))
    enter(order, device, 0, 1, 2)
    assert enter(order, device, 2) == [(2, 0), (2, 1)]
    assert enter(order, device, 0) == [(0, 1), (0, 2)]


def test_a_captured_stream_waits_for_nobody_and_is_not_remembered(device: Device) -> None:
    order = StreamOrder(torch.device("cuda"))
    enter(order, device, 0)
    device.capturing = True
    assert enter(order, device, 3) == []
    device.capturing = False
    assert enter(order, device, 1) == [(1, 0)]
