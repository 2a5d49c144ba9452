"""The same random histories with prefix reuse on: prompts that repeat, tenants that must not meet, evictions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import strategies as st

from kvcache_core.config import PrefixCacheConfig
from kvcache_core.errors import StepError
from kvcache_core.testing.comparison import Line
from kvcache_core.testing.machine import COUNTS, PARTS, PICKS, CacheMachine, Draw

if TYPE_CHECKING:
    from kvcache_core.testing.oracle import OracleConformance

__all__ = ["ReuseMachine"]


class ReuseMachine(CacheMachine):
    """What a prompt finds cached is what sequences of the same tenant stored, token for token."""

    operations: ClassVar[dict[str, int]] = {
        **CacheMachine.operations,
        "prompt": 9,
        "let_go": 4,
        "share": 1,
        "forget_now_and_then": 1,
    }
    prefix_settings = PrefixCacheConfig(enabled=True, namespace="model", max_prefixes=4)

    def __init__(self, kit: OracleConformance) -> None:
        super().__init__(kit)
        self.stored: dict[str | None, list[list[int]]] = {}

    def compare(self) -> None:
        """Compare, and remember what each tenant's sequences hold, since a prompt may find it later."""
        super().compare()
        for line in self.lines:
            known = self.stored.setdefault(line.salt, [])
            if line.known_ids not in known:
                known.append(list(line.known_ids))

    def prompt(self, draw: Draw[Any]) -> None:
        """Open a sequence for a prompt that begins like something stored, perhaps by another tenant."""
        if len(self.lines) > 5:
            self.let_go(draw)
            return
        salt, own = draw(st.sampled_from([None, None, "", "a"])), draw(st.sampled_from([True, True, True, False]))
        known = [tokens for name, stored in self.stored.items() if (name == salt) == own for tokens in stored]
        known = [tokens for tokens in known if len(tokens) > self.cache.block_size]
        begin = known[-1 - draw(PICKS) % len(known)] if known else []
        begin = begin[: round(draw(st.sampled_from([1.0, 1.0, 0.75, 0.5])) * len(begin))]
        prompt = (begin + self.new_tokens(draw(COUNTS)))[: self.limit]
        fill = draw(st.sampled_from([True, True, True, False]))
        made = self.has_room(lambda: self.cache.allocate(token_ids=prompt, salt=salt))
        if made is None:
            return
        found = made.num_tokens
        assert found % self.cache.block_size == 0
        assert found < len(prompt) or found == 0
        assert not found or any(tokens[:found] == prompt[:found] for tokens in self.stored.get(salt, []))
        self.kit.tokens_found += found
        line = Line([made], self.limit, prompt[:found], [True] * found, salt)
        self.lines.append(line)
        rest = prompt[found:]
        if rest and fill:
            self.compare()
            self.kit.feed(self.cache, {made: rest})
            line.tokens += rest
            line.named += [True] * len(rest)

    def share(self, draw: Draw[Any]) -> None:
        """Let an empty sequence take over the beginning of another by hand."""
        giver, taker = self.pick(draw(PICKS)), self.pick(draw(PICKS))
        count = round(draw(PARTS) * len(giver.tokens))
        if giver is taker or taker.tokens or count > taker.limit or giver.limit < taker.limit:
            return
        if giver.step is not None or taker.step is not None:
            try:
                self.cache.share_prefix(giver.handle, taker.handle, count)
            except StepError:
                return
            raise AssertionError("a prefix was shared with a handle of an open step")
        before = taker.handle.num_tokens
        self.has_room(lambda: self.cache.share_prefix(giver.handle, taker.handle, count))
        if taker.handle.num_tokens > before:
            taker.tokens, taker.named = giver.tokens[:count], giver.named[:count]
            if taker.salt != giver.salt:
                taker.salt = "nobody's"

    def forget_now_and_then(self, draw: Draw[Any]) -> None:
        """Forget every cached prefix, once in a while."""
        if not draw(st.integers(0, 4)):
            self.cache.reset_prefix_cache()
            assert self.cache.stats().cached_blocks == 0
            self.stored.clear()
