"""The census of a cache: every block accounted for, every count equal to the names it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvcache_core.allocator import BlockAllocator
from kvcache_core.block_table import blocks_for
from kvcache_core.demotion import DemotedBlocks
from kvcache_core.prefix_index import PrefixIndex, PrefixNode
from kvcache_core.sequence import CachedSequence, HandleState
from kvcache_core.storage import Storage

__all__ = ["audit_books", "audit_prefixes", "audit_tier"]


def audit_books(
    allocator: BlockAllocator, sequences: Iterable[CachedSequence], retained: Iterable[CachedSequence] = ()
) -> list[str]:
    """Return a line for each inconsistency between the allocator and the block tables.

    Args:
        allocator: The block ids and their counts.
        sequences: Every live sequence.
        retained: Every sequence that is kept for reuse.
    """
    problems: list[str] = []
    names: Counter[int] = Counter()
    for sequence in sequences:
        problems += _audit_sequence(sequence, allocator.block_size)
        names.update(sequence.blocks)
        names.update(_held_by_step(sequence))
    keeps: Counter[int] = Counter()
    for sequence in retained:
        keeps.update(sequence.blocks)
    free = allocator.free_ids()
    loose = allocator.loose
    names.update(loose)
    total = allocator.total_block_count
    problems += [f"block {block} is free twice" for block, count in Counter(free).items() if count > 1]
    for block in range(1, total + 1):
        if allocator.references(block) != names[block]:
            problems.append(
                f"block {block} counts {allocator.references(block)} references and {names[block]} tables name it"
            )
        if allocator.retentions(block) != keeps[block]:
            problems.append(
                f"block {block} counts {allocator.retentions(block)} retentions and {keeps[block]} kept tables name it"
            )
    cached = sum(not names[block] for block in keeps)
    if allocator.cached_block_count != cached:
        problems.append(f"cached count is {allocator.cached_block_count} but {cached} blocks are only kept")
    named = {block for counts in (names, keeps) for block, count in counts.items() if count}
    problems += [f"block {block} is free and named" for block in free if block in named]
    exist = set(range(1, total + 1))
    problems += [f"block {block} does not exist but is named" for block in sorted(named - exist)]
    problems += [f"block {block} does not exist but is free" for block in sorted(set(free) - exist)]
    lost = sorted(exist - named - set(free))
    if lost:
        problems.append(f"blocks {lost} are neither free nor named by anybody")
    if len(free) != allocator.free_block_count:
        problems.append(f"free count is {allocator.free_block_count} but {len(free)} blocks are free")
    return problems


def _audit_sequence(sequence: CachedSequence, block_size: int) -> list[str]:
    problems = []
    name = sequence.request_id
    if sequence.state is HandleState.SWAPPED:
        if sequence.blocks or sequence.swapped is None:
            problems.append(f"{name}: is swapped out and still holds blocks, or nothing at all")
    elif blocks_for(sequence.num_tokens, block_size) > len(sequence.blocks):
        problems.append(f"{name}: {sequence.num_tokens} tokens do not fit {len(sequence.blocks)} blocks")
    if sequence.num_tokens > sequence.max_tokens:
        problems.append(f"{name}: {sequence.num_tokens} tokens exceed its maximum of {sequence.max_tokens}")
    if len(sequence.token_ids) > sequence.num_tokens:
        problems.append(f"{name}: {len(sequence.token_ids)} token ids are known of {sequence.num_tokens} tokens")
    if len(set(sequence.blocks)) != len(sequence.blocks):
        problems.append(f"{name}: its table names a block twice")
    if sequence.references < 1:
        problems.append(f"{name}: is live with {sequence.references} references")
    if sequence.state is HandleState.FREED:
        problems.append(f"{name}: is live though it was freed")
    if sequence.transaction is not None and sequence.transaction.state != "open":
        problems.append(f"{name}: is held by a step that was {sequence.transaction.state}")
    return problems


def _held_by_step(sequence: CachedSequence) -> list[int]:
    """Blocks that the open step of this sequence keeps so that it can go back to them."""
    if sequence.transaction is None:
        return []
    rooms = sequence.transaction.rooms.values()
    return [block for room in rooms if room.sequence is sequence for block in room.held_blocks]


def audit_prefixes(
    index: PrefixIndex, sequences: Iterable[CachedSequence], retained: Iterable[CachedSequence]
) -> list[str]:
    """Return a line for each block of the index that does not lead to what it promises.

    Args:
        index: The blocks that prompts can find.
        sequences: Every live sequence.
        retained: Every sequence that is kept for reuse.
    """
    problems: list[str] = []
    nodes = {id(node) for node in index}
    if len(nodes) != len(index):
        problems.append(f"the index counts {len(index)} blocks and has {len(nodes)}")
    held: dict[CachedSequence, set[int]] = {}
    for sequence in sequences:
        held[sequence] = _held_nodes(sequence)
        if sequence.is_kept:
            problems.append(f"{sequence.request_id}: is live though it was given up for reuse")
    for sequence in retained:
        held[sequence] = _held_nodes(sequence)
        problems += _audit_retained(sequence, index.block_size)
    for sequence, own in held.items():
        lost = len(own - nodes)
        if lost:
            problems.append(f"{sequence.request_id}: {lost} of its named blocks are not in the index")
        if sequence.tip is not None and sequence not in (sequence.tip.tips or ()):
            problems.append(f"{sequence.request_id}: its last named block does not know it")
    for node in index:
        problems += [f"prefix block {node.name.hex()[:8]}: {problem}" for problem in _audit_node(node, held, index)]
    return problems


def audit_tier(storage: Storage, sequences: Iterable[CachedSequence], demoted: DemotedBlocks) -> list[str]:
    """Return a line if the host tier holds more or less than the books say.

    Args:
        storage: The memory, with its tier.
        sequences: Every live sequence.
        demoted: What was evicted to the tier.
    """
    size = storage.spec.block_size
    swapped = sum(blocks_for(each.num_tokens, size) for each in sequences if each.state is HandleState.SWAPPED)
    held = storage.tier_blocks - storage.tier_free_blocks
    if not storage.tier_blocks or held == swapped + len(demoted):
        return []
    return [f"the host tier holds {held} blocks; {swapped} of swapped sequences and {len(demoted)} demoted are known"]


def _held_nodes(sequence: CachedSequence) -> set[int]:
    nodes = set()
    node = sequence.tip
    while node is not None and node.depth:
        nodes.add(id(node))
        node = node.parent
    return nodes


def _audit_retained(sequence: CachedSequence, block_size: int) -> list[str]:
    name, depth = sequence.request_id, 0 if sequence.tip is None else sequence.tip.depth
    problems = []
    if not sequence.is_kept or sequence.transaction is not None:
        problems.append(f"{name}: is kept for reuse and still in use")
    if not depth == len(sequence.blocks) == sequence.num_tokens / block_size == len(sequence.token_ids) / block_size:
        problems.append(
            f"{name}: is kept for {depth} blocks and has {len(sequence.blocks)}, {sequence.num_tokens} tokens and "
            f"{len(sequence.token_ids)} token ids"
        )
    return problems


def _audit_node(node: PrefixNode, held: dict[CachedSequence, set[int]], index: PrefixIndex) -> list[str]:
    home, size = node.home, index.block_size
    problems = []
    if id(node) not in held.get(home, ()):
        problems.append(f"its home {home.request_id} is gone or does not hold it")
    elif home.token_ids[(node.depth - 1) * size : node.depth * size].tobytes() != node.tokens:
        problems.append(f"its home {home.request_id} holds other tokens")
    elif len(home.blocks) < node.depth:
        problems.append(f"its home {home.request_id} has no block for it")
    strangers = [tip.request_id for tip in node.tips or () if tip not in held or tip.tip is not node]
    if strangers:
        problems.append(f"it is not the last one of {', '.join(strangers)}")
    if node.child is None and not node.tips:
        problems.append("nobody holds it")
    if node.name != node.parent.name_of_child(node.tokens) or node.parent.follow(node.tokens) is not node:
        problems.append("its name or its place does not fit its tokens")
    return problems
