"""Moves what is held of texts: into the place where a prompt is read, from there into a slot, and
from a slot that is needed into a kept slot or into host memory."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from common.cache import COPY_BLOCK, copy_prefixes, slot_beginnings
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
from common.serving.session import Session, Work, describe_prompts, per_shard


def find_beginning(session: Session, row: int, work: Work) -> tuple[Place, int]:
    """Returns which place of a data shard holds the longest beginning of a prompt, and how many
    tokens of it a request may start from. Tokens whose logits are needed are read: the last one;
    all, if the prompt is scored."""
    if work.request.echo:
        return READING, 0
    place, length = longest(session.prefixes[row], work.tokens[:-1])
    return place, length // session.reuse_multiple * session.reuse_multiple


def begin(session: Session, row: int, work: Work, place: Place, length: int) -> None:
    """Makes a request the one whose prompt is read on a data shard. It starts from the first
    `length` tokens that a place of that shard holds."""
    if length:
        copy(session, row, place, READING, length)
        use(session.prefixes[row], place)
    work.cached, session.reading[row] = length, work
    session.stats.cached_tokens += length
    session.stats.prefill_tokens += len(work.tokens) - length
    describe_prompts(session)


def settle(session: Session) -> None:
    """Moves the prompts that were read into slots that do not run. This comes a step after their
    first tokens, so those need not wait for the copy."""
    slot_B = [-1] * session.rows
    for row, work in session.read.items():
        prefixes, first = session.prefixes[row], row * session.per_row
        tokens = work.request.prompt
        tokens = tokens[: len(tokens) // session.reuse_multiple * session.reuse_multiple]
        hold(prefixes, READING, tokens)  # so that a slot that holds no more than this goes first
        free = [n for n in range(session.per_row) if first + n not in session.running]
        place = least_missed(prefixes, [Place(SLOT, n) for n in free])
        empty(session, row, place)
        forget(prefixes, READING)
        hold(prefixes, place, tokens)
        slot_B[row] = place.number
        session.running[first + place.number] = work
        if work.ended:
            release(session, first + place.number)
    if session.read:
        session.read = {}
        session.state = session.model.module.insert(
            session.state, session.prompts, np.array(slot_B, np.int32), mesh=session.model.mesh
        )


def release(session: Session, slot: int) -> None:
    """Frees the slot of a request that has ended, or was given up. Its text stays until the slot is
    needed; the newest token is not in the cache."""
    work, session.freed = session.running.pop(slot), True
    prefixes, place = session.prefixes[slot // session.per_row], Place(SLOT, slot % session.per_row)
    if work.tokens[-1] == INVALID:
        forget(prefixes, place)
    elif session.reuse_multiple == 1:  # a reply is not read in chunks, so it may round otherwise
        hold(prefixes, place, work.tokens[:-1])
    else:
        use(prefixes, place)


def only(session: Session, row: int, value: int) -> jax.Array:
    return per_shard(session, [value if r == row else 0 for r in range(session.rows)])


def copy(session: Session, row: int, source: Place, to: Place, length: int) -> None:
    """Copies the first `length` positions of a place to where prompts are read, or into a kept
    slot."""
    if source.tier == HOST:
        held = jax.tree.map(to_device, session.stored[row][source])
    else:
        held = session.state.cache if source.tier == SLOT else session.kept
    copied = copy_prefixes(
        session.kept if to.tier == KEPT else session.prompts.cache,
        held,
        only(session, row, 0 if source.tier == HOST else source.number),
        only(session, row, to.number),
        only(session, row, length),
        spec=session.model.module.STATE_SPEC.cache,
        mesh=session.model.mesh,
    )
    if to.tier == KEPT:
        session.kept = copied
    else:
        session.prompts = session.prompts._replace(cache=copied)


def empty(session: Session, row: int, place: Place) -> None:
    """Makes room in a place. If no other place holds its text, that moves to the next tier."""
    prefixes = session.prefixes[row]
    if place in prefixes.texts and place.tier != HOST and not is_covered(prefixes, place):
        text = prefixes.texts[place]
        if place.tier == SLOT and session.keep:
            kept = least_missed(prefixes, [Place(KEPT, n) for n in range(session.keep)])
            empty(session, row, kept)
            copy(session, row, place, kept, len(text.tokens))
            hold(prefixes, kept, *text)
        elif session.host_bytes:
            store(session, row, place)
    forget(prefixes, place)
    session.stored[row].pop(place, None)


# ---- host memory


@dataclass(frozen=True)
class HostArray:
    """The part of an array that belongs to one data shard, in host memory. Each process has what
    its own devices held."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    parts: dict[str, np.ndarray]  # by the indices of a device's part
    nbytes: int


def to_host(row: int, rows: int, x: jax.Array) -> HostArray:
    mine = (s for s in x.addressable_shards if (s.index[0].start or 0) == row)
    parts = {str(s.index): np.asarray(s.data) for s in mine}
    return HostArray(x.shape, x.dtype, x.sharding, parts, x.nbytes // rows)


def to_device(x: HostArray) -> jax.Array:
    """The array again, with zeros for the other data shards."""
    zeros = partial(np.zeros, x.sharding.shard_shape(x.shape), x.dtype)
    return jax.make_array_from_callback(
        x.shape, x.sharding, lambda index: x.parts[str(index)] if str(index) in x.parts else zeros()
    )


def size_of(stored: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(stored))


def store(session: Session, row: int, place: Place) -> None:
    """Copies the text of a place into host memory, in place of those that are missed least. Their
    bytes are counted over all processes, so that all decide alike."""
    prefixes, stored, spec = (
        session.prefixes[row],
        session.stored[row],
        session.model.module.STATE_SPEC.cache,
    )
    text = prefixes.texts[place]
    size = min(session.capacity, max(COPY_BLOCK, 1 << (len(text.tokens) - 1).bit_length()))
    cache = session.state.cache if place.tier == SLOT else session.kept
    held = slot_beginnings(
        cache, only(session, row, place.number), size=size, spec=spec, mesh=session.model.mesh
    )
    new = jax.tree.map(partial(to_host, row, session.rows), held)
    if size_of(new) <= session.host_bytes:
        while size_of(stored) + size_of(new) > session.host_bytes:
            empty(session, row, least_missed(prefixes, stored))
        to = Place(HOST, prefixes.time)
        stored[to] = new
        hold(prefixes, to, *text)
