"""Remembers which tokens are held where, so that a prompt can start from the longest beginning that
was read before.

A text is cut into blocks of BLOCK tokens. A dict has the places that hold each beginning of whole
blocks, under a digest of its tokens. So the longest beginning is found block by block, whatever the
number of texts.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

BLOCK = 16  # tokens; beginnings that are shorter are not worth a copy


class Place(NamedTuple):
    """Where a data shard holds a text. The tiers are where prompts are read, the slots that decode,
    and without a slot device memory and host memory."""

    tier: str
    number: int


PROMPT, SLOT, KEPT, HOST = "prompt", "slot", "kept", "host"
READING = Place(PROMPT, 0)


class Text(NamedTuple):
    """Tokens that a place holds."""

    tokens: Sequence[int]
    used: int  # the time of the last use, as `Prefixes` counts it
    written: int  # positions that were written there, also behind the text
    last: bytes | None  # the digest of its whole blocks; None if it has none


@dataclass
class Prefixes:
    """What the places of one data shard hold."""

    texts: dict[Place, Text] = field(default_factory=dict)
    holders: dict[bytes, set[Place]] = field(default_factory=dict)  # of beginnings, by digest
    time: int = 0


def beginnings(tokens: Sequence[int]) -> Iterator[bytes]:
    """The digests of the first block, of the first two, and so on."""
    digest = blake2b(digest_size=16)
    for i in range(BLOCK, len(tokens) + 1, BLOCK):
        digest.update(array("i", tokens[i - BLOCK : i]).tobytes())
        yield digest.digest()


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def use(prefixes: Prefixes, place: Place, written: int = 0) -> None:
    """Notes that the text of a place was needed, and how many positions are written by now."""
    prefixes.time += 1
    text = prefixes.texts[place]
    written = max(written, text.written)
    prefixes.texts[place] = text._replace(used=prefixes.time, written=written)


def hold(
    prefixes: Prefixes,
    place: Place,
    tokens: Sequence[int],
    used: int | None = None,
    written: int = 0,
) -> None:
    """Notes that a place now holds `tokens` and nothing else, last used at `used`, or now."""
    forget(prefixes, place)
    prefixes.time += 1
    used = prefixes.time if used is None else used
    key = None
    for key in beginnings(tokens):
        prefixes.holders.setdefault(key, set()).add(place)
    prefixes.texts[place] = Text(tokens, used, max(written, len(tokens)), key)


def forget(prefixes: Prefixes, place: Place) -> None:
    """Notes that a place holds nothing."""
    if place in prefixes.texts:
        for key in beginnings(prefixes.texts.pop(place).tokens):
            prefixes.holders[key].remove(place)
            if not prefixes.holders[key]:
                del prefixes.holders[key]


def longest(prefixes: Prefixes, tokens: Sequence[int]) -> tuple[Place, int]:
    """Returns the place that holds the longest beginning of `tokens`, and its length; 0 if that is
    shorter than a block. Host memory comes last among equals."""
    places, n = set[Place](), 0
    for key in beginnings(tokens):
        if key not in prefixes.holders:
            break
        places, n = prefixes.holders[key], n + BLOCK

    def more(place: Place) -> tuple[int, bool, Place]:
        held = prefixes.texts[place].tokens[n : n + BLOCK]
        same = common_prefix(held, tokens[n : n + BLOCK])
        return same, place.tier != HOST, place  # the place itself, so that processes choose alike

    best = max(places, key=more, default=READING)
    return best, n + more(best)[0] if places else 0


def is_covered(prefixes: Prefixes, place: Place) -> bool:
    """Whether another place holds the same text, up to its last whole block."""
    last = prefixes.texts[place].last
    return last is None or len(prefixes.holders[last]) > 1


def least_missed(prefixes: Prefixes, places: Iterable[Place]) -> Place:
    """Returns the place to overwrite: an empty one, else one whose text is held elsewhere too, else
    the one that was used least recently."""

    def loss(place: Place) -> tuple[bool, int]:
        if (text := prefixes.texts.get(place)) is None:
            return False, 0
        return not is_covered(prefixes, place), text.used

    return min(places, key=loss)
