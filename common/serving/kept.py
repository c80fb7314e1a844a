"""Moves what is held of texts: into the place where a prompt is read, from there into a slot, and
from a slot that is needed into a kept slot or into host memory."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from common.cache import COPY_BLOCK, copy_prefixes, shortest_beginning, slot_beginnings
from common.sampling import INVALID
from common.serving.prefixes import (
    HOST,
    KEPT,
    READING,
    SLOT,
    Place,
    forget,
    hold,
    is_covered,
    least_missed,
    longest,
    use,
)
from common.serving.session import (
    PROMPT_CHUNK,
    Counts,
    Session,
    Work,
    describe_prompts,
    insert,
    per_shard,
)

AFTER = {SLOT: (KEPT, HOST), KEPT: (HOST,), HOST: ()}  # tiers
MEMORY = {KEPT: "device", HOST: "pinned_host"}


def find_beginning(session: Session, row: int, work: Work) -> tuple[Place, int]:
    """Returns the place of a data shard that holds the longest beginning of a prompt, and how many
    tokens of it can be reused. The last prompt token is never reused, because its logits are
    needed. Nothing is reused if the prompt is scored, which needs the logits of all tokens."""
    if work.request.echo:
        return READING, 0
    many = session.reuse_multiple

    def usable(place: Place, length: int) -> bool:
        length = length // many * many
        return length > 0 and reaches(session, row, place, length)

    place, length = longest(session.prefixes[row], work.tokens[:-1], usable)
    return place, length // many * many


def reaches(session: Session, row: int, place: Place, length: int) -> bool:
    """Whether a place still has all that is needed to go on from its first `length` tokens: a layer
    with a window or a chunk may have overwritten that."""
    end = written(session, row, place) + PROMPT_CHUNK  # at least what padding and drafts took
    return all(length >= shortest_beginning(state.cache, end) for state in session.states)


def to_overwrite(session: Session, row: int, places: list[Place]) -> Place:
    return least_missed(session.prefixes[row], places, partial(reaches, session, row))


def written(session: Session, row: int, place: Place) -> int:
    """How many positions have been written to the rings of a place: by its own text, or by the text
    from which its beginning was copied, if that was longer. A ring is copied as a whole, so it may
    hold later positions of that other text."""
    slot = row * session.per_row + place.number
    runs = place.tier == SLOT and slot in session.running
    tokens = len(session.running[slot].tokens) if runs else 0
    return max(tokens, session.prefixes[row].texts[place].written)


def begin(session: Session, row: int, work: Work, place: Place, length: int) -> None:
    """Begins to read a request's prompt on a data shard, after copying the first `length` tokens
    from a place of that shard."""
    if length:
        work.written = written(session, row, place)
        copy(session, row, place, length)
        use(session.prefixes[row], place)
    work.cached, work.counts, session.reading[row] = length, Counts(length), work
    session.stats.cached_tokens += length
    session.stats.prefill_tokens += len(work.tokens) - length
    describe_prompts(session)


def settle(session: Session) -> None:
    """Moves each prompt that has been read completely into a slot that is not running. This happens
    one step after its first token, so that the token need not wait for the copy."""
    if not session.read:
        return
    slots = dict[int, int]()
    for row, work in session.read.items():
        prefixes, first = session.prefixes[row], row * session.per_row
        tokens = work.request.prompt
        tokens = tokens[: len(tokens) // session.reuse_multiple * session.reuse_multiple]
        # So that a slot that holds no more than this goes first.
        hold(prefixes, READING, tokens, written=work.written)
        free = [n for n in range(session.per_row) if first + n not in session.running]
        place = to_overwrite(session, row, [Place(SLOT, n) for n in free])
        empty(session, row, place)
        forget(prefixes, READING)
        hold(prefixes, place, tokens, written=work.written)
        slots[row] = first + place.number
    insert(session, slots)


def release(session: Session, slot: int) -> None:
    """Frees the slot of a request that has ended, or was given up. Its text stays until the slot is
    needed; the newest token is not in the cache."""
    work = session.running.pop(slot)
    prefixes, place = session.prefixes[slot // session.per_row], Place(SLOT, slot % session.per_row)
    if work.tokens[-1] == INVALID:
        forget(prefixes, place)
    elif session.reuse_multiple == 1:  # a reply is not read in chunks, so it may round otherwise
        hold(prefixes, place, work.tokens[:-1], written=work.written)
    else:
        use(prefixes, place, len(work.tokens))


def copy(session: Session, row: int, place: Place, length: int) -> None:
    """Copies the first `length` positions of a place to where prompts are read."""
    held, number = tuple(state.cache for state in session.states), place.number
    if place.tier != SLOT:
        held, number = jax.tree.map(whole, session.stored[row][place]), 0
    prompts = tuple(state.cache for state in session.prompts)
    at = (only(session, row, n) for n in (number, 0, length))
    copied = copy_prefixes(prompts, held, *at, **session.placement)
    pairs = zip(session.prompts, copied, strict=True)
    session.prompts = [state._replace(cache=cache) for state, cache in pairs]


def only(session: Session, row: int, value: int) -> jax.Array:
    return per_shard(session, [value if r == row else 0 for r in range(session.rows)])


# ---- texts without a slot


@dataclass(frozen=True)
class DataShard:
    """The part of an array that belongs to one data shard. It is in the memory of the devices, or
    of their hosts. Each process has what its own devices hold."""

    like: jax.ShapeDtypeStruct  # the whole array
    parts: dict[jax.Device, jax.Array]
    nbytes: int  # over all processes, so that all decide alike


def shard_of(x: jax.Array, row: int, rows: int) -> DataShard:
    mine = (s for s in x.addressable_shards if (s.index[0].start or 0) == row)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return DataShard(like, {s.device: s.data for s in mine}, x.nbytes // rows)


def moved(x: DataShard, memory: str) -> DataShard:
    """Starts a copy to "device" memory or to that of the host, and does not wait for it."""
    to = {device: part.sharding.with_memory_kind(memory) for device, part in x.parts.items()}
    return replace(x, parts={d: jax.device_put(part, to[d]) for d, part in x.parts.items()})


def whole(x: DataShard) -> jax.Array:
    """The array again, with zeros for the other data shards."""
    shape, sharding, parts = x.like.shape, x.like.sharding, moved(x, "device").parts
    zeros = partial(jnp.zeros, sharding.shard_shape(shape), x.like.dtype)
    here = [parts[d] if d in parts else zeros(device=d) for d in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, here)


def size_of(stored: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(stored))


def take(session: Session, row: int, slot: int, length: int) -> Any:
    """A copy of the first `length` positions of a slot, with room up to the next power of two."""
    size = min(session.capacity, max(COPY_BLOCK, 1 << (length - 1).bit_length()))
    caches = tuple(state.cache for state in session.states)
    at = (only(session, row, n) for n in (slot, length))
    held = slot_beginnings(caches, *at, size=size, **session.placement)
    return jax.tree.map(partial(shard_of, row=row, rows=session.rows), held)


def empty(session: Session, row: int, place: Place) -> None:
    """Makes room in a place. If no other place holds its text, that moves to the next tier."""
    prefixes, held = session.prefixes[row], session.stored[row].pop(place, None)
    if place in prefixes.texts and not is_covered(prefixes, place, partial(reaches, session, row)):
        keep(session, row, place, held)
    forget(prefixes, place)


def keep(session: Session, row: int, place: Place, held: Any) -> None:
    """Moves a text to the next tier that is large enough for it. Texts that `least_missed` picks
    leave that tier until there is room."""
    prefixes, stored, room = session.prefixes[row], session.stored[row], session.room
    text, tiers = prefixes.texts[place], [tier for tier in AFTER[place.tier] if room[tier]]
    if not tiers:
        return
    held = held or take(session, row, place.number, len(text.tokens))
    size = size_of(held)
    tier = next((tier for tier in tiers if size <= room[tier]), None)
    if tier is None:
        return
    there = [place for place in stored if place.tier == tier]
    while sum(size_of(stored[place]) for place in there) + size > room[tier]:
        least = to_overwrite(session, row, there)
        there.remove(least)
        empty(session, row, least)
    to = Place(tier, prefixes.time)
    stored[to] = jax.tree.map(partial(moved, memory=MEMORY[tier]), held)
    hold(prefixes, to, text.tokens, text.used, text.written)
