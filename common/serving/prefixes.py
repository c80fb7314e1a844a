"""Remembers which tokens are held where, so that a prompt can start from the longest beginning that
was read before.

A text is cut into blocks of BLOCK tokens. A dict maps the digest of the first n blocks, for each n,
to the places that hold these blocks. So the longest common beginning is found block by block, and
not by comparing a prompt with every text.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile
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
    written: int  # positions written in this place so far, including any after the text
    last: bytes | None  # the digest of all its whole blocks; None if it is shorter than a block


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


# Whether a place can be continued from its first n tokens: by default, from all that it holds.
Reaches = Callable[[Place, int], bool]
ALL: Reaches = lambda place, n: True


def longest(prefixes: Prefixes, tokens: Sequence[int], reaches: Reaches = ALL) -> tuple[Place, int]:
    """Returns the place that can be continued from the longest beginning of `tokens`, and the
    length of that; READING and 0 if it is shorter than a block. Host memory comes last among
    equals."""
    keys = takewhile(prefixes.holders.__contains__, beginnings(tokens))
    levels = [prefixes.holders[key] for key in keys]  # each holds all places of the next
    tried = set[Place]()
    for n in range(len(levels) * BLOCK, 0, -BLOCK):

        def held(place: Place, n: int = n) -> tuple[int, bool, Place]:
            more = prefixes.texts[place].tokens[n : n + BLOCK]
            length = n + common_prefix(more, tokens[n : n + BLOCK])
            return length, place.tier != HOST, place  # the place itself: all processes choose alike

        for length, _, place in sorted(map(held, levels.pop() - tried), reverse=True):
            if reaches(place, length):
                return place, length
            tried.add(place)
    return READING, 0


def is_covered(prefixes: Prefixes, place: Place, reaches: Reaches = ALL) -> bool:
    """Whether another place holds the same text, up to its last whole block, and can be continued
    from there."""
    text = prefixes.texts[place]
    if text.last is None:
        return True
    n = len(text.tokens) // BLOCK * BLOCK
    return any(reaches(other, n) for other in prefixes.holders[text.last] - {place})


def least_missed(prefixes: Prefixes, places: Iterable[Place], reaches: Reaches = ALL) -> Place:
    """Returns the place to overwrite: an empty one, else one whose text is held elsewhere too, else
    the one that was used least recently."""

    def loss(place: Place) -> tuple[bool, int]:
        if (text := prefixes.texts.get(place)) is None:
            return False, 0
        return not is_covered(prefixes, place, reaches), text.used

    return min(places, key=loss)
