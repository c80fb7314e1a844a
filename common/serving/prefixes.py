"""Remembers which tokens are held where, so that a prompt can start from the longest beginning that
was read before.

A text is cut into blocks of BLOCK tokens. The blocks of all texts form a trie, and each node knows
the places that hold the text up to it. To find a beginning is to walk down from the root, whatever
the number of texts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK = 16  # tokens; beginnings that are shorter are not worth a copy


class Place(NamedTuple):
    """A slot of one tier on a data shard. The tiers are where prompts are read, the slots that
    decode, the kept slots, and host memory."""

    tier: str
    number: int


PROMPT, SLOT, KEPT, HOST = "prompt", "slot", "kept", "host"
READING = Place(PROMPT, 0)


class Text(NamedTuple):
    """Tokens that a place holds."""

    tokens: Sequence[int]
    used: int  # the time of the last use, as `Prefixes` counts it


@dataclass
class Node:
    """A block of tokens behind the blocks above it."""

    places: dict[Place, None] = field(default_factory=dict)  # hold the text up to this block
    after: dict[tuple[int, ...], "Node"] = field(default_factory=dict)


@dataclass
class Prefixes:
    """What the places of one data shard hold."""

    texts: dict[Place, Text] = field(default_factory=dict)
    root: Node = field(default_factory=Node)
    time: int = 0


def blocks(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    whole = len(tokens) // BLOCK * BLOCK
    return [tuple(tokens[i : i + BLOCK]) for i in range(0, whole, BLOCK)]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def use(prefixes: Prefixes, place: Place) -> None:
    """Notes that the text of a place was needed."""
    prefixes.time += 1
    prefixes.texts[place] = prefixes.texts[place]._replace(used=prefixes.time)


def hold(prefixes: Prefixes, place: Place, tokens: Sequence[int], used: int | None = None) -> None:
    """Notes that a place now holds `tokens` and nothing else, last used at `used`, or now."""
    forget(prefixes, place)
    prefixes.time += 1
    prefixes.texts[place] = Text(tokens, prefixes.time if used is None else used)
    node = prefixes.root
    for block in blocks(tokens):
        node = node.after.setdefault(block, Node())
        node.places[place] = None


def forget(prefixes: Prefixes, place: Place) -> None:
    """Notes that a place holds nothing."""
    if place not in prefixes.texts:
        return
    node = prefixes.root
    for block in blocks(prefixes.texts.pop(place).tokens):
        child = node.after[block]
        del child.places[place]
        if not child.places:  # then no place holds anything below it
            del node.after[block]
            return
        node = child


def longest(prefixes: Prefixes, tokens: Sequence[int]) -> tuple[Place, int]:
    """Returns the place that holds the longest beginning of `tokens`, and its length; 0 if that is
    shorter than a block. Host memory comes last among equals."""
    node, n = prefixes.root, 0
    for block in blocks(tokens):
        if block not in node.after:
            break
        node, n = node.after[block], n + BLOCK

    def more(place: Place) -> tuple[int, bool]:
        held = prefixes.texts[place].tokens[n : n + BLOCK]
        return common_prefix(held, tokens[n : n + BLOCK]), place.tier != HOST

    best = max(node.places, key=more, default=None)
    return (READING, 0) if best is None else (best, n + more(best)[0])


def is_covered(prefixes: Prefixes, place: Place) -> bool:
    """Whether another place holds the same text, up to its last whole block."""
    node = prefixes.root
    for block in blocks(prefixes.texts[place].tokens):
        node = node.after[block]
    return len(node.places) != 1


def least_missed(prefixes: Prefixes, places: Iterable[Place]) -> Place:
    """Returns the place to overwrite: an empty one, else one whose text is held elsewhere too, else
    the one that was used least recently."""

    def loss(place: Place) -> tuple[bool, bool, int]:
        if (text := prefixes.texts.get(place)) is None:
            return False, False, 0
        return True, not is_covered(prefixes, place), text.used

    return min(places, key=loss)
