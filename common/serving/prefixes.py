"""Remembers which tokens are held where, so that a prompt can start from the longest beginning.

A text is cut into blocks of BLOCK tokens. A dict maps the digest of the first n blocks, for each n,
to the places that hold these blocks. So the longest common beginning is found block by block, and
not by comparing a prompt with every text.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count, takewhile
from typing import Any, NamedTuple

BLOCK = 16  # tokens; beginnings that are shorter are not worth a copy


class Place(NamedTuple):
    """Where a data shard holds a text. The tiers are where prompts are read, the slots that decode,
    and without a slot device memory and host memory."""

    tier: str
    number: int


PROMPT, SLOT, KEPT, HOST = "prompt", "slot", "kept", "host"
READING = Place(PROMPT, 0)


@dataclass
class Text:
    """Tokens that a place holds, and what else decides from where they can be continued."""

    tokens: Sequence[int] = ()
    written: int = 0  # positions written in this place so far, including any after the tokens
    arrays: Any = None  # their caches, in a place without a slot
    used: int = 0  # the time of the last use, by the clock of `Prefixes`
    salt: str = ""  # only a prompt with the same one can start from this text
    state_at: int = 0  # the one length from which recurrent layers continue, if there are any

    def __post_init__(self) -> None:
        self.keys = [*beginnings(self.tokens, self.salt)]


@dataclass
class Prefixes:
    """What the places of one data shard hold."""

    # How many of the first n tokens of a text can be continued from where it is held.
    usable: Callable[[Text, int], int] = lambda text, n: n
    texts: dict[Place, Text] = field(default_factory=dict)
    holders: defaultdict[bytes, set[Place]] = field(default_factory=lambda: defaultdict(set))
    clock: Iterator[int] = field(default_factory=lambda: count(1))


def beginnings(tokens: Sequence[int], salt: str = "") -> Iterator[bytes]:
    """The digests of the first block, of the first two, and so on; others for another salt."""
    digest = blake2b(digest_size=16, key=blake2b(salt.encode()).digest())
    for i in range(BLOCK, len(tokens) + 1, BLOCK):
        digest.update(array("i", tokens[i - BLOCK : i]).tobytes())
        yield digest.digest()


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def use(prefixes: Prefixes, place: Place) -> None:
    """Notes that the text of a place was needed."""
    prefixes.texts[place].used = next(prefixes.clock)


def hold(prefixes: Prefixes, place: Place, text: Text) -> None:
    """Notes that a place now holds a text and nothing else. If that is new, it is used now."""
    forget(prefixes, place)
    text.used = text.used or next(prefixes.clock)
    prefixes.texts[place] = text
    for key in text.keys:
        prefixes.holders[key].add(place)


def forget(prefixes: Prefixes, place: Place) -> None:
    """Notes that a place holds nothing."""
    if (text := prefixes.texts.pop(place, None)) is not None:
        for key in text.keys:
            prefixes.holders[key].remove(place)
            if not prefixes.holders[key]:
                del prefixes.holders[key]


def longest(prefixes: Prefixes, tokens: Sequence[int], salt: str = "") -> tuple[Place, int]:
    """Returns the place that can be continued from the longest beginning of `tokens`, and the
    length of that; 0 if it is shorter than a block. Host memory comes last among equals."""
    keys = takewhile(prefixes.holders.__contains__, beginnings(tokens, salt))
    levels = [prefixes.holders[key] for key in keys]
    # A place that holds a longer beginning also holds the shorter ones: it is in all levels before.
    best, tried = (0, False, READING), set[Place]()
    for n in range(len(levels) * BLOCK, 0, -BLOCK):
        for place in levels.pop() - tried:
            text = prefixes.texts[place]
            length = n + common_prefix(text.tokens[n : n + BLOCK], tokens[n : n + BLOCK])
            length = prefixes.usable(text, length)
            # The place itself decides last, so all processes choose alike.
            best = max(best, (length, place.tier != HOST, place))
            tried.add(place)
        if best[0] >= n:
            break
    return best[2], best[0]


def known(prefixes: Prefixes, tokens: Sequence[int], salt: str = "") -> int:
    """How many first tokens some place holds, in whole blocks, even if none continues there."""
    keys = takewhile(prefixes.holders.__contains__, beginnings(tokens, salt))
    return BLOCK * sum(1 for _ in keys)


def is_covered(prefixes: Prefixes, place: Place) -> bool:
    """Whether nothing is lost with the text of a place: another place can be continued from the
    same beginning of that text, or a longer one, counted in whole blocks."""
    text = prefixes.texts[place]
    usable = prefixes.usable(text, len(text.keys) * BLOCK)
    others = prefixes.holders[text.keys[-1]] - {place} if text.keys else ()
    lengths = (prefixes.usable(prefixes.texts[other], len(text.keys) * BLOCK) for other in others)
    return usable <= max(lengths, default=0)


def least_missed(prefixes: Prefixes, places: Iterable[Place]) -> Place:
    """The place to overwrite: an empty one, else one held elsewhere too, else the oldest used."""

    def loss(place: Place) -> tuple[bool, int]:
        if (text := prefixes.texts.get(place)) is None:
            return False, 0
        return not is_covered(prefixes, place), text.used

    return min(places, key=loss)
