"""A tiny cache beside a list of tokens for each sequence, and the comparison of the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize

from kvcache_core.config import PrefixCacheConfig
from kvcache_core.errors import CacheFullError, StepError
from kvcache_core.handle import KvCacheHandle
from kvcache_core.manager import KvCacheManager

if TYPE_CHECKING:
    from kvcache_core.testing.oracle import OracleConformance

__all__ = ["ComparedCache", "Line", "OpenStep"]


@dataclass(eq=False)
class Line:
    """What a sequence must hold: a list of tokens, and whether each was named.

    Attributes:
        handles: The handles to it.
        limit: Tokens it may hold.
        tokens: Those it holds.
        named: Whether their ids were given.
        salt: The tenant.
        step: The open step it is part of.
    """

    handles: list[KvCacheHandle]
    limit: int
    tokens: list[int] = field(default_factory=list)
    named: list[bool] = field(default_factory=list)
    salt: str | None = None
    step: OpenStep | None = None

    @property
    def handle(self) -> KvCacheHandle:
        """One of the handles to it."""
        return self.handles[0]

    @property
    def known_ids(self) -> list[int]:
        """The leading tokens whose ids were named."""
        count = self.named.index(False) if False in self.named else len(self.named)
        return self.tokens[:count]


@dataclass(eq=False)
class OpenStep:
    """A step that is not over yet, and the new tokens of each of its lines.

    Attributes:
        new: Lines, their new tokens, and whether these are named.
        step: The step; the only reference to it, so that deleting it drops the step.
    """

    new: list[tuple[Line, list[int], bool]]
    step: Any = None


class ComparedCache(RuleBasedStateMachine):
    """The cache, the lists, and what must hold between them."""

    prefix_settings = PrefixCacheConfig(enabled=False)

    def __init__(self, kit: OracleConformance) -> None:
        super().__init__()
        self.kit = kit
        self.lines: list[Line] = []
        self.open_steps: list[OpenStep] = []
        self.loose: list[int] = []
        self.number = 0

    @initialize(block_size=st.integers(0, 63), scrub=st.booleans(), num_blocks=st.integers(3, 14))
    def open(self, block_size: int, scrub: bool, num_blocks: int) -> None:
        """Open the cache."""
        sizes = self.kit.block_sizes
        size = sizes[block_size % len(sizes)]
        self.limit = size * (num_blocks + 2)
        values = {"block_size": size, "num_blocks": num_blocks, "max_sequence_length": self.limit, "scrub": scrub}
        storage = self.kit.open_storage(self.kit.spec(self.kit.geometry("mixed"), **values))
        self.cache = KvCacheManager(storage, backend="under test", prefix=self.prefix_settings)

    def pick(self, index: int) -> Line:
        """One of the live lines; a new one where there is none."""
        if not self.lines:
            self.lines.append(Line([self.cache.allocate()], self.limit))
        return self.lines[index % len(self.lines)]

    def new_tokens(self, count: int) -> list[int]:
        """Tokens that were never used before; more of them where blocks are large."""
        count *= max(1, self.cache.block_size // 4)
        first, self.number = self.number, self.number + count
        return list(range(first, self.number))

    def has_room(self, operation: Callable[[], Any]) -> Any:
        """Do something that may find no room; then the error's numbers must be true, and the result is None."""
        before = self.cache.stats()
        try:
            return operation()
        except CacheFullError as error:
            if "may hold" not in str(error):
                assert error.needed > error.free + error.evictable
            after = self.cache.stats()
            assert error.free == after.free_blocks
            if self.prefix_settings.enabled:  # blocks of equal contents may have been merged meanwhile
                assert after.used_blocks <= before.used_blocks
            else:
                assert (after.used_blocks, after.free_blocks) == (before.used_blocks, before.free_blocks)
            return None

    def refused_in_step(self, line: Line, operation: Callable[[], Any]) -> bool:
        """Whether `line` is part of an open step, in which case `operation` has to be refused."""
        if line.step is None:
            return False
        with pytest.raises(StepError):
            operation()
        return True

    def compare(self) -> None:
        """The cache holds what the lists hold, and its books are right."""
        cache = self.cache
        assert cache.audit() == ()
        for line in self.lines:
            for handle in line.handles:
                assert handle.num_tokens == len(line.tokens)
                assert list(handle.token_ids) == line.known_ids
            self.kit.assert_holds(line.handle, line.tokens)
        stats = cache.stats()
        assert stats.active_caches == len(self.lines)
        assert stats.tokens_stored == sum(len(line.tokens) for line in self.lines)
        assert stats.loose_blocks == len(self.loose)
        accounted = stats.used_blocks + stats.cached_blocks + stats.loose_blocks + stats.free_blocks
        assert accounted == stats.total_blocks

    def teardown(self) -> None:
        """Give everything back; nothing may be missing."""
        cache: KvCacheManager | None = getattr(self, "cache", None)
        if cache is None:
            return
        with cache:
            for opened in self.open_steps:
                opened.step.abort()
            for line in self.lines:
                for handle in line.handles:
                    handle.free()
            cache.block_allocator.free_blocks(self.loose)
            stats = cache.stats()
            assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
            assert cache.audit() == ()
