"""What tells the K and V of one model from those of another: the live object, and the state of its weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import torch

__all__ = ["model_identity"]

_numbers = itertools.count(1)
_known: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()


def model_identity(model: torch.nn.Module) -> str:
    """A text that changes with the model object and whenever its weights are replaced or changed in place.

    Two fine-tunes may have the same configuration, and one model other weights from one day to the next, so nothing
    less tells whether keys and values of earlier prompts are still those of the model.
    """
    number = _known.get(model)
    if number is None:
        number = _known[model] = next(_numbers)
    state = sha256(repr(list(_states(model))).encode()).hexdigest()
    return f"{type(model).__name__}-{number}-{state[:32]}"


def _states(model: torch.nn.Module) -> Iterator[tuple[int, int, Any]]:
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        # Tensors made in inference mode count no versions; they cannot be trained either.
        yield (
            id(tensor),
            0 if tensor.is_inference() else tensor._version,
            tensor.device.type != "meta" and tensor.data_ptr(),
        )
