"""Whether a cache and its sequences can be used, and why not."""

from __future__ import annotations

from kvcache_core import locking
from kvcache_core.errors import HandleError, StepError
from kvcache_core.sequence import CachedSequence, HandleState

__all__ = ["Usability"]

_ACTIVE = HandleState.ACTIVE


class Usability:
    """What a cache knows about whether it can be used.

    Attributes:
        closed: Whether it was closed.
        generation: Rises when the cache is reset; sequences of an older one are stale.
    """

    def __init__(self) -> None:
        self.closed = False
        self.generation = 0
        self._process = locking.process_generation

    @property
    def _is_usable(self) -> bool:
        return not self.closed and self._process == locking.process_generation

    @property
    def unusable(self) -> HandleError | None:
        """Why nothing here can be used any more, or None."""
        if self._is_usable:
            return None
        if self.closed:
            return HandleError("the cache was closed; open it again", reason="closed")
        return HandleError(
            "the cache was opened before this process was forked; open one of its own in the child",
            reason="forked-process",
        )

    def require_usable(self) -> None:
        """Raise HandleError if the cache is closed or this is a forked child."""
        if self.closed or self._process != locking.process_generation:  # not by the properties: all ask twice
            problem = self.unusable
            if problem is not None:
                raise problem

    def problem_with(self, sequence: CachedSequence) -> HandleError | None:
        """Why this sequence cannot be used, or None."""
        if sequence.state is _ACTIVE and sequence.generation == self.generation and self._is_usable:
            return None
        return self._explained(sequence)

    def _explained(self, sequence: CachedSequence) -> HandleError | None:
        problem = self.unusable
        if problem is not None:
            return problem
        name = sequence.request_id
        if sequence.generation != self.generation:
            return HandleError(
                f"the handle of {name!r} is from before the cache was reset; allocate again", reason="stale"
            )
        if sequence.state is HandleState.FREED:
            return HandleError(f"the handle of {name!r} was freed; allocate or fork a new one", reason="freed")
        if sequence.state is HandleState.SWAPPED:
            return HandleError(f"the cache of {name!r} is swapped out; swap it in first", reason="swapped")
        return None

    def require_freeable(self, sequence: CachedSequence, operation: str) -> None:
        """As `require_changeable`, but a sequence that is swapped out will do."""
        if sequence.state is not HandleState.SWAPPED or sequence.generation != self.generation:
            self.require_changeable(sequence, operation)

    def require_changeable(self, sequence: CachedSequence, operation: str) -> None:
        """Raise unless the sequence is usable and no open step includes it. Under the lock."""
        if sequence.state is _ACTIVE and sequence.generation == self.generation and sequence.transaction is None:
            return
        problem = self.problem_with(sequence)
        if problem is not None:
            raise problem
        if sequence.transaction is not None:
            raise StepError(
                f"cannot {operation} {sequence.request_id!r} while it is part of an open step; commit or abort the step"
            )
