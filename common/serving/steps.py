"""The steps of a session: what it computes, and what it moves between the places that hold texts.

A prompt begins with a copy of what a place holds, is read chunk by chunk, and moves into a slot,
which decodes. A text whose slot is needed moves into a kept slot or into host memory."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from common.cache import COPY_BLOCK, copy_prefixes
from common.recurrent import is_recurrent
from common.sampling import INVALID, PARAMETERS, RULES_SPEC, sampling_params
from common.serving import prefixes
from common.serving.prefixes import HOST, KEPT, PROMPT, READING, SLOT, Place, Text
from common.serving.rules import rules_of, seen_tokens
from common.serving.score import prefill_asked, score_of
from common.serving.session import PROMPT_CHUNK, Ahead, Request, Session, Work, publish, timed
from common.speculate import decode

SMALLEST_BUCKET = 32
AFTER = {PROMPT: (KEPT, HOST), SLOT: (KEPT, HOST), KEPT: (HOST,), HOST: ()}  # tiers
MEMORY = {KEPT: "device", HOST: "pinned_host"}


def begin(session: Session, row: int, work: Work, place: Place, length: int) -> None:
    """Begins to read a prompt on a data shard, behind the `length` tokens copied from `place`."""
    index = session.prefixes[row]
    if length:
        copy(session, row, place, length)
        prefixes.use(index, place)
        # A ring is copied as a whole, so it may hold later positions of the other text.
        work.text.written = index.texts[place].written
    work.cached, work.counts = length, work.counts._replace(cached=length)
    # A state is kept at the last whole chunk, and where another prompt went on otherwise.
    if any(is_recurrent(state.cache) for state in session.states):
        shared = prefixes.known(index, work.tokens, work.text.salt)
        ends = shared, len(work.tokens) - 1
        work.keep_at = [n // PROMPT_CHUNK * PROMPT_CHUNK for n in ends]
    session.reading[row] = work
    session.stats.cached_tokens += length
    session.stats.prefill_tokens += len(work.tokens) - length
    works = [session.reading.get(row) for row in range(session.rows)]
    requests = [work.request if work else Request((), 1) for work in works]
    asked = {name: [getattr(request, name) for request in requests] for name in PARAMETERS}
    length_B = np.array([work.cached if work else 0 for work in works], np.int32)
    for i, state in enumerate(session.prompts):  # with arrays of its own, because it is donated
        own = jax.device_put((length_B, sampling_params(session.rows, **asked)), session.by_shard)
        session.prompts[i] = state._replace(length_B=own[0], sampling=own[1])


def bucket_for(count: int) -> int:
    """How many of `count` prompt tokens are read at once: a chunk, or a padded power of two."""
    return min(PROMPT_CHUNK, max(SMALLEST_BUCKET, 1 << (count - 1).bit_length()))


def prefill(session: Session) -> None:
    """Dispatches one program that reads a chunk of the prompt that has waited longest. All data
    shards take part whose next chunk has the same bucket and the same program. So the chunks in
    which a prompt is read do not depend on the other prompts."""
    stats, model = session.stats, session.model
    if model.on_cpu:  # otherwise the last chunk would be computed while this one is compiled
        with timed(stats, "prefill_s"):
            jax.block_until_ready(session.prompts[0].token_B)

    def chunk_of(work: Work) -> tuple[int, bool, bool]:
        asks = work.left <= PROMPT_CHUNK and work.request.is_ruled  # a token is sampled
        return bucket_for(work.left), work.request.logprobs is not None, asks

    chunk = chunk_of(next(iter(session.reading.values())))
    together = {row: work for row, work in session.reading.items() if chunk_of(work) == chunk}
    (bucket, scored, asks), rows = chunk, session.rows
    tokens_BT = np.zeros((rows, bucket), np.int32)
    count_B, after_B = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
    for row, work in together.items():
        part = work.tokens[work.cached : work.cached + bucket]
        count_B[row], tokens_BT[row, : len(part)] = len(part), part
        work.cached += len(part)
        del session.reading[row]
        if work.left:
            after_B[row], session.reading[row] = work.tokens[work.cached], work  # now the last one
        else:
            session.read[row] = work
    compiled_s = stats.compile_s
    with timed(stats, "prefill_s"):
        *given, after = jax.device_put((tokens_BT, count_B, after_B), session.by_shard)
        rules = rules_of(session, together, rows) if asks else None
        for i, (prompts, reader) in enumerate(zip(session.prompts, session.models, strict=True)):
            known = reader.weights, prompts, *given
            if i > 0 or not (scored or asks):
                session.prompts[i] = reader.module.prefill(*known, **reader.static)
                continue
            known = reader.module, *known, after if scored else None, rules
            session.prompts[0], scores = prefill_asked(*known, **reader.static)
            if scores is not None:
                scores = jax.tree.map(np.asarray, publish(scores, model.mesh))
                for row, work in together.items():
                    n, T = work.request.logprobs or 0, range(count_B[row])
                    work.scores += [score_of(scores, row, t, n) for t in T]
        for row, work in together.items():
            if work.cached in work.keep_at:
                keep_state(session, row, work)
        if session.read:
            new = publish((session.prompts[0].token_B, None), model.mesh)
            session.ahead = Ahead(new, session.read)
    # A call for several CPU devices ends when they have computed, so a compilation hides that.
    if stats.compile_s == compiled_s or not model.on_cpu or model.mesh.size == 1:
        stats.prefill_timed += int(count_B.sum())


def settle(session: Session) -> None:
    """Copies each prompt that has been read completely into a slot that is not running, and lets it
    run there. This happens one step after its first token, so that the token need not wait."""
    if not session.read:
        return
    slot_B, slots = np.full(session.rows, -1, np.int32), list[int]()
    texts = np.zeros((len(session.read), session.capacity + 1), np.int32)
    for i, (row, work) in enumerate(session.read.items()):
        index, first, many = session.prefixes[row], row * session.per_row, session.reuse_multiple
        prompt = work.request.prompt
        written = max(work.text.written, len(work.tokens))
        work.text = Text(prompt[: len(prompt) // many * many], written, salt=work.text.salt)
        # While READING holds the text, a slot that holds no more of it counts as missed least.
        prefixes.hold(index, READING, work.text)
        free = [n for n in range(session.per_row) if first + n not in session.running]
        place = prefixes.least_missed(index, [Place(SLOT, n) for n in free])
        empty(session, row, place)
        prefixes.forget(index, READING)
        prefixes.hold(index, place, work.text)
        slot_B[row], texts[i, : len(work.tokens)] = place.number, work.tokens
        slots.append(first + place.number)
        session.running[slots[-1]] = work
    new, session.read = dict(enumerate(session.read.values())), {}
    if any(work.request.has_penalty for work in new.values()):
        seen = seen_tokens(session.model, new, len(new))
        sharding = NamedSharding(session.model.mesh, RULES_SPEC.seen_BV)
        if session.seen_BV is None:
            session.seen_BV = jnp.zeros((session.slots, seen.shape[1]), jnp.int32, device=sharding)
        session.seen_BV = set_rows(session.seen_BV, seen, np.array(slots), sharding)
    for i, model in enumerate(session.models):
        state, prompts = session.states[i], session.prompts[i]
        session.states[i] = model.module.insert(state, prompts, slot_B, mesh=model.mesh)
    if session.text_BS is not None:
        session.text_BS = set_rows(session.text_BS, texts, np.array(slots), session.by_shard)


@partial(jax.jit, static_argnames="sharding", donate_argnames="x")
def set_rows(x: jax.Array, rows: np.ndarray, at: np.ndarray, sharding: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x.at[at].set(rows), sharding)


def generate(session: Session) -> None:
    """Dispatches a decode step of all slots, and copies its tokens, which the next overwrites."""
    model, models, works = session.model, session.models, dict(session.running)
    session.stats.decode_steps += 1
    filled = sum(len(work.tokens) for work in works.values())
    session.stats.filled += filled / (session.slots * session.capacity)
    with timed(session.stats, "decode_s"):
        rules = rules_of(session, works, session.slots, session.seen_BV)
        if session.text_BS is None and not session.logprobs and rules is None:
            state = model.module.generate(model.weights, session.states[0], **model.static)
            session.states[0] = state
            new = getattr(state, "new_BT", state.token_B), None
        else:
            wanted = any(work.request.logprobs is not None for work in works.values())
            is_ruled_B = np.zeros(session.slots, bool)
            is_ruled_B[[slot for slot, work in works.items() if work.request.is_ruled]] = True
            session.states, session.text_BS, rules, *new = decode(
                [model.weights for model in models],
                session.states,
                session.text_BS,
                # An array, so that one program serves steps with and without scores.
                np.array(wanted) if session.logprobs else None,
                rules,
                is_ruled_B,
                files=tuple((model.module, model.config) for model in models),
                mesh=model.mesh,
                implementation=model.static["implementation"],
                K=session.draft_tokens,
            )
            session.seen_BV = rules and rules.seen_BV
        new = publish(new, model.mesh)
    session.ahead = Ahead(new, works, bool(session.reading))


def drop_ended(session: Session) -> None:
    """Frees the slots of requests that have ended, or were given up. A text stays in its slot until
    that is needed; the newest token is not in the cache."""
    ended = {n: x for n, x in session.running.items() if x.number not in session.works}
    state = session.states[0]
    for slot, work in ended.items():
        row, number = divmod(slot, session.per_row)
        index, place = session.prefixes[row], Place(SLOT, number)
        if work.tokens[-1] == INVALID:
            prefixes.forget(index, place)
        elif session.reuse_multiple > 1:  # a decoded text may differ from a read one by rounding
            prefixes.use(index, place)
        else:
            # A step of several tokens may have gone on behind the last one that counts.
            is_at_end = work.made and session.text_BS is None and not hasattr(state, "new_BT")
            end = len(work.tokens) - 1 if is_at_end else 0
            text = Text(work.tokens[:-1], work.text.written, salt=work.text.salt, state_at=end)
            prefixes.hold(index, place, text)
        del session.running[slot]
    if ended:
        keep_B = np.isin(np.arange(session.slots), [*session.running])
        keep_B = jax.device_put(keep_B, session.by_shard)
        hot_B = state.sampling.temperature_B * keep_B  # `sample` need not search for an empty slot
        sampling = state.sampling._replace(temperature_B=hot_B)
        session.states[0] = state._replace(length_B=state.length_B * keep_B, sampling=sampling)


def copy(session: Session, row: int, place: Place, length: int) -> None:
    """Copies the first `length` positions of a place to where prompts are read."""
    held, number = tuple(state.cache for state in session.states), place.number
    if place.tier != SLOT:
        held, number = jax.tree.map(whole, session.prefixes[row].texts[place].arrays), 0
    prompts = tuple(state.cache for state in session.prompts)
    copied = copy_prefix(session, row, prompts, held, number, length)
    pairs = zip(session.prompts, copied, strict=True)
    session.prompts = [state._replace(cache=cache) for state, cache in pairs]


def copy_prefix(session: Session, row: int, to: Any, source: Any, number: int, length: int) -> Any:
    """`copy_prefixes` of all models, from slot `number` of one data shard to its slot 0."""
    at = np.zeros((3, session.rows), np.int32)  # nothing is copied on the other shards
    at[:, row] = number, 0, length
    spec = tuple(model.module.STATE_SPEC.cache for model in session.models)
    placed = jax.device_put([*at], session.by_shard)
    return copy_prefixes(to, source, *placed, spec=spec, mesh=session.model.mesh)


# ---- texts without a slot


@dataclass(frozen=True)
class DataShard:
    """The part of an array that belongs to one data shard. It is in the memory of the devices, or
    of their hosts. Each process has what its own devices hold."""

    like: jax.ShapeDtypeStruct  # the whole array, which has a slot for each data shard
    parts: dict[jax.Device, jax.Array]


def shard_of(x: jax.Array, row: int) -> DataShard:
    mine = (s for s in x.addressable_shards if (s.index[0].start or 0) == row)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return DataShard(like, {s.device: s.data for s in mine})


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


def size_of(arrays: Any) -> int:
    """Bytes in all processes, so that all decide alike."""
    likes = [x.like for x in jax.tree.leaves(arrays)]
    return sum(x.size * x.dtype.itemsize // x.shape[0] for x in likes)


def take(session: Session, row: int, place: Place, length: int) -> Any:
    """A copy of a place's first `length` positions, with room up to the next power of two."""
    size = min(session.capacity, max(COPY_BLOCK, 1 << (length - 1).bit_length()))

    def room(x: jax.Array) -> jax.Array:
        own = x.sharding.shard_shape(x.shape)[2]  # positions that a device holds
        shape = session.rows, x.shape[1], x.shape[2] // own * min(own, size), *x.shape[3:]
        return jnp.zeros(shape, x.dtype, device=x.sharding)

    states = session.prompts if place.tier == PROMPT else session.states
    caches = tuple(state.cache for state in states)
    new = jax.tree.map(room, caches)
    held = copy_prefix(session, row, new, caches, place.number, length)
    return jax.tree.map(partial(shard_of, row=row), held)


def empty(session: Session, row: int, place: Place) -> None:
    """Makes room in a place. If no other place holds its text, that moves to the next tier."""
    index = session.prefixes[row]
    if place in index.texts and not prefixes.is_covered(index, place):
        keep(session, row, place)
    prefixes.forget(index, place)


def keep_state(session: Session, row: int, work: Work) -> None:
    """Keeps what is read of a prompt so far, unless it is kept already."""
    index, n = session.prefixes[row], work.cached
    text = Text(work.tokens[:n], n, salt=work.text.salt, state_at=n)
    prefixes.hold(index, READING, text)
    empty(session, row, READING)


def keep(session: Session, row: int, place: Place) -> None:
    """Moves a text to the next tier that is large enough. `least_missed` picks what leaves that."""
    index, room = session.prefixes[row], session.room
    text, tiers = index.texts[place], [tier for tier in AFTER[place.tier] if room[tier]]
    if not tiers:
        return
    arrays = text.arrays or take(session, row, place, len(text.tokens))
    size = size_of(arrays)
    tier = next((tier for tier in tiers if size <= room[tier]), None)
    if tier is None:
        return
    there = [place for place in index.texts if place.tier == tier]
    while sum(size_of(index.texts[place].arrays) for place in there) + size > room[tier]:
        least = prefixes.least_missed(index, there)
        there.remove(least)
        empty(session, row, least)
    text.arrays = jax.tree.map(partial(moved, memory=MEMORY[tier]), arrays)
    prefixes.hold(index, Place(tier, next(index.clock)), text)
