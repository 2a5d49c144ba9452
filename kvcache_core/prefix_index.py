"""The tree of all blocks that prompts can find.

A block is found by walking: from the root of its key, token block by token block, each compared in full. So a hit
never rests on a hash. A block is *named* by a SHA-256 chain, the digest of the name of the block before it and of
its own token ids, starting from the key; names are what may leave the process, and are worked out when asked for.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, cast

from kvcache_core.prefix import MissReason, PrefixKey

if TYPE_CHECKING:
    from kvcache_core.sequence import CachedSequence

__all__ = ["PrefixIndex", "PrefixNode", "name_after"]


def name_after(name: bytes, tokens: bytes) -> bytes:
    """The name of the block with these tokens after the block of this name."""
    return sha256(name + tokens).digest()


class PrefixNode:
    """One full block that prompts can find, below the block before it; or the root of one key's tree.

    A sequence that holds a block holds every block before it. It is entered at the last one, its *tip*.

    Attributes:
        parent: The block before it; a root has none.
        tokens: Its token ids, 8 bytes each; a root's are its encoded key.
        depth: Blocks from the root down to it, itself included.
        home: A sequence that holds it, one that is kept rather than a live one; a root has none.
        child: The first of the blocks that follow it, or None: most have one at most, which is found by a comparison.
        others: The further ones by their tokens, or None.
        tips: The sequences whose tip it is, in order of arrival, or None: most blocks are no sequence's last one.
    """

    __slots__ = ("_name", "child", "depth", "home", "others", "parent", "tips", "tokens")

    parent: PrefixNode
    home: CachedSequence
    child: PrefixNode | None
    others: dict[bytes, PrefixNode] | None
    tips: dict[CachedSequence, None] | None
    _name: bytes | None

    def __init__(self, tokens: bytes, depth: int) -> None:
        self.tokens = tokens
        self.depth = depth
        self.child = self.others = self.tips = self._name = None

    @classmethod
    def root(cls, key: PrefixKey) -> PrefixNode:
        """Return the root of a key's tree."""
        root = cls(key.encoded, 0)
        root._name = sha256(key.encoded).digest()
        return root

    def add_child(self, tokens: bytes, home: CachedSequence) -> PrefixNode:
        """Enter a block below this one."""
        child = PrefixNode(tokens, self.depth + 1)
        child.parent = self
        child.home = home
        if self.child is None:
            self.child = child
        elif self.others is None:
            self.others = {tokens: child}
        else:
            self.others[tokens] = child
        return child

    def remove_child(self, child: PrefixNode) -> None:
        """Take a block out that follows this one."""
        if child is not self.child:
            del cast("dict[bytes, PrefixNode]", self.others)[child.tokens]
        elif self.others:
            self.child = self.others.pop(next(iter(self.others)))
        else:
            self.child = None

    def follow(self, tokens: bytes) -> PrefixNode | None:
        """The block with these tokens below this one, or None."""
        child = self.child
        if child is None or child.tokens == tokens:
            return child
        return None if self.others is None else self.others.get(tokens)

    @property
    def children(self) -> Sequence[PrefixNode]:
        """The blocks that follow it, in order of arrival."""
        if self.child is None:
            return ()
        return (self.child, *self.others.values()) if self.others else (self.child,)

    @property
    def name(self) -> bytes:
        """The SHA-256 chain of its tokens and all before them."""
        unnamed, node = [], self
        while node._name is None:
            unnamed.append(node)
            node = node.parent
        for child in reversed(unnamed):
            child._name = node.name_of_child(child.tokens)
            node = child
        return self._name  # type: ignore[return-value]

    def name_of_child(self, tokens: bytes) -> bytes:
        """The name of the block with these tokens below this one."""
        return name_after(self.name, tokens)

    def ancestor(self, depth: int) -> PrefixNode | None:
        """The block of this depth, or this one if it is not that deep; None where `depth` is 0."""
        node = self
        while node.depth > depth:
            node = node.parent
        return node if node.depth else None

    def holders(self) -> Iterator[CachedSequence]:
        """Sequences that hold the block: those whose tip it is, and one for each block that follows."""
        yield from self.tips or ()
        for child in self.children:
            yield child.home


class PrefixIndex:
    """All blocks that prompts can find, and which sequence holds which of them.

    Args:
        block_size: Tokens per block.
    """

    #: How many names of dropped blocks are remembered, so that a miss can be explained.
    _REMEMBERED = 4096

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[bytes, PrefixNode] = {}
        self._dropped: deque[bytes] = deque(maxlen=self._REMEMBERED)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[PrefixNode]:
        """Every block, each after the one before it."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children
            if node.depth:
                yield node

    # -- finding -----------------------------------------------------------------------------------------

    def find(self, key: PrefixKey, token_ids: array[int], max_blocks: int) -> PrefixNode | None:
        """Return the last of the leading blocks that are cached, or None if the first is not."""
        node = self._deepest(key, token_ids, max_blocks)
        return node if node is not None and node.depth else None

    def _deepest(self, key: PrefixKey, token_ids: array[int], max_blocks: int) -> PrefixNode | None:
        """As `find`, but the root where nothing else is found; None for an unknown key."""
        node = self._roots.get(key.encoded)
        if node is None:
            return None
        width = self.block_size * token_ids.itemsize
        data = token_ids[: max_blocks * self.block_size].tobytes()
        for start in range(0, len(data), width):
            tokens, child = data[start : start + width], node.child
            if child is None:
                break
            if child.tokens != tokens:
                child = None if node.others is None else node.others.get(tokens)
                if child is None:
                    break
            node = child
        return node

    def explain(
        self, key: PrefixKey, token_ids: array[int], max_blocks: int, *, across_salts: bool
    ) -> tuple[int, MissReason, int | None]:
        """Return how many blocks are found, why the next one is not, and the first differing token if there is one."""
        size = self.block_size
        node = self._deepest(key, token_ids, max_blocks) or PrefixNode.root(key)
        found = node.depth
        if found == max_blocks:
            return found, "hit", None
        block = token_ids[found * size : (found + 1) * size]
        if self.why_nothing_follows(node.name, token_ids, found) == "evicted":
            return found, "evicted", None
        if found == 0 and across_salts and any(root.follow(block.tobytes()) for root in self._roots.values()):
            return found, "salt-differs", None
        common = found * size + max((_common_tokens(block, child.tokens) for child in node.children), default=0)
        if node.child and common:
            return found, "diverged", common
        return found, "never-stored", None

    def why_nothing_follows(self, name: bytes, token_ids: array[int], found: int) -> MissReason:
        """Say whether the block after the first `found` ones, the last of which has this name, was ever stored."""
        block = token_ids[found * self.block_size : (found + 1) * self.block_size]
        return "evicted" if name_after(name, block.tobytes()) in self._dropped else "never-stored"

    # -- entering and leaving ----------------------------------------------------------------------------

    def publish(self, sequence: CachedSequence) -> bool:
        """Enter the full named blocks of a sequence that are not yet entered.

        Returns:
            Whether no other sequence had entered one of them before.
        """
        key, node = sequence.prefix_key, sequence.tip
        size = self.block_size
        full, done = len(sequence.token_ids) // size, node.depth if node else 0
        if key is None or full <= done:
            return True
        if node is None:
            node = self._roots.get(key.encoded)
        if node is None:
            node = self._roots[key.encoded] = PrefixNode.root(key)
        width = size * sequence.token_ids.itemsize
        data = sequence.token_ids[done * size : full * size].tobytes()
        count = self._count
        for start in range(0, len(data), width):
            tokens = data[start : start + width]
            child = node.child and node.follow(tokens)
            if child is None:
                child = node.add_child(tokens, sequence)
                self._count += 1
            node = child
        self.hold(sequence, node)
        return self._count - count == full - done

    def hold(self, sequence: CachedSequence, tip: PrefixNode | None) -> None:
        """A sequence holds the blocks down to `tip`, which are in the index, and no more."""
        former, alone = sequence.tip, None
        if former is not None and (tips := former.tips) and sequence in tips:
            if len(tips) == 1:
                alone, former.tips = tips, None
            else:
                del tips[sequence]
        sequence.tip = tip
        if tip is None:
            return
        if tip.tips is None:
            tip.tips = alone or {sequence: None}  # a sequence that grows takes its dict along from tip to tip
        else:
            tip.tips[sequence] = None

    def prefer(self, sequence: CachedSequence) -> list[CachedSequence]:
        """Make a sequence that is kept from now on the home of its blocks, as far as no other kept one is.

        Where its blocks branch off from those of another kept sequence, the younger one becomes the home: what
        uses the shared blocks again then refreshes it, and not what the older one holds beyond them.

        Returns:
            Kept sequences that end at that last shared block, and so hold nothing that this one does not.
        """
        node = sequence.tip
        if node is None:
            return []
        while node.depth:
            former = node.home
            if former is not sequence:
                node.home = sequence
                if former.is_kept:
                    return [other for other in node.tips or () if other.is_kept]
            node = node.parent
        return []

    def leave(self, sequence: CachedSequence, keep: int) -> None:
        """A sequence lets go of its blocks from logical index `keep` on: give them other homes, or drop them."""
        node = sequence.tip
        if node is None or node.depth <= keep:
            return
        self.hold(sequence, None)
        while node.depth > keep and node.child is None and not node.tips:
            node.parent.remove_child(node)
            self._dropped.append(node.name)
            self._count -= 1
            node = node.parent
        heir: CachedSequence | None = None
        while node.depth > keep:
            if node.home is sequence:
                if heir is None or not heir.is_kept:  # further up a kept one may have branched off
                    heir = _best(node.holders())
                node.home = heir
            node = node.parent
        if keep:
            self.hold(sequence, node)
        elif node.child is None:
            del self._roots[node.tokens]

    def clear(self) -> None:
        """Forget every block, also which ones were dropped."""
        self._roots.clear()
        self._dropped.clear()
        self._count = 0


def _best(holders: Iterator[CachedSequence]) -> CachedSequence:
    """A kept sequence if there is one, which nobody will change, else any."""
    first = next(holders)
    return first if first.is_kept else next((holder for holder in holders if holder.is_kept), first)


def _common_tokens(block: array[int], tokens: bytes) -> int:
    """Leading tokens that two blocks have in common."""
    other = array("q")
    other.frombytes(tokens)
    return next((index for index, (a, b) in enumerate(zip(block, other, strict=False)) if a != b), len(block))
