"""The serving loop: prompts in, tokens out, more prompts than slots queue.

Works with any module that has the names of a model file (`prefill`, `insert`, `generate`,
`init_state`, ...). One prompt per `data` shard is read at a time, in chunks whose lengths come from
a short list of buckets; then its cache is inserted into a free slot, and all filled slots decode
together. The step after the one whose tokens are being looked at is already under way, so the host
costs no time.
"""

import time
from collections import deque
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from common.sampling import sampling_params
from common.sharding import DATA, model_shards

CHUNK = 512  # prompt tokens read at once: bound by arithmetic, and in need of little memory
SMALLEST_BUCKET = 32


class Request(NamedTuple):
    """What one prompt asks for; the sampling fields are those of `Sampling`."""

    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


class Event(NamedTuple):
    """One new token of a request; `finish` is "stop", "length" or None when more will come."""

    request: int
    token: int
    finish: str | None


class Engine(NamedTuple):
    """A model on its mesh, with the shapes that its compiled programs have."""

    model: ModuleType
    config: Any
    mesh: Mesh
    weights: Any
    slots: int
    capacity: int
    cache_dtype: Any
    implementation: str | None = None


@dataclass
class Stats:
    """Seconds and tokens, counted by `serve` as it goes."""

    compile_s: float = 0.0
    first_token_s: float = 0.0  # from the call of `serve` to its first token, compilation included
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that an earlier prompt's cache already held
    decode_s: float = 0.0
    decode_steps: int = 0
    filled: float = 0.0  # share of the cache that was filled, summed over decode steps
    decode_tokens: int = 0


@dataclass
class Session:
    """What outlives one `serve` call: the slots, the prompts' cache, the tokens it holds, the
    compiled programs."""

    state: Any  # the model's DecodeState
    prompts: Any  # a DecodeState of one row per data shard, in which prompts are read
    held: list[list[int]]  # by row of `prompts`
    programs: dict[Any, Any]
    stats: Stats


def start_session(engine: Engine) -> Session:
    """Allocates the slots and the prompts' cache on the mesh."""
    model, mesh, rows = engine.model, engine.mesh, engine.mesh.shape[DATA]
    if engine.slots % rows:
        raise ValueError(f"{engine.slots} slots cannot be split evenly over data={rows}")
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), model.STATE_SPEC)
    shape = dict(capacity=engine.capacity, dtype=engine.cache_dtype, shards=model_shards(mesh))
    make = partial(model.init_state, engine.config, **shape)
    state, prompts = (
        jax.jit(partial(make, slots=n), out_shardings=shardings)() for n in (engine.slots, rows)
    )
    return Session(state, prompts, [[] for _ in range(rows)], {}, Stats())


def buckets(count: int) -> list[int]:
    """The lengths in which `count` prompt tokens are read: whole chunks, then the smallest power of
    two that fits."""
    whole, rest = divmod(count, CHUNK)
    last = max(SMALLEST_BUCKET, 1 << (rest - 1).bit_length()) if rest else 0
    return [CHUNK] * whole + [last] * (rest > 0)


def check_request(request: Request, capacity: int, name: str = "the prompt") -> None:
    """ValueError when a request cannot be served."""
    if not request.prompt:
        raise ValueError(f"{name} is empty")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
    if len(request.prompt) > capacity:
        raise ValueError(
            f"{name} has {len(request.prompt)} tokens, over the cache's {capacity} (see --max-len)"
        )
    sampling_params(1, *request[2:])


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _call(session: Session, key: Any, function: Any, *args: Any, **static: Any) -> Any:
    """Calls a jitted function through a program compiled once per `key`, and counts the seconds
    that took."""
    if key not in session.programs:
        began = time.perf_counter()
        session.programs[key] = function.lower(*args, **static).compile()
        session.stats.compile_s += time.perf_counter() - began
    return session.programs[key](*args)


def _read_prompts(
    engine: Engine, session: Session, requests: Sequence[Request | None], reuse_multiple: int
) -> Any:
    """Prefills one prompt per data shard (None: that shard has none): the prompts as a DecodeState
    of their rows."""
    prompts = [list(r.prompt) if r else [] for r in requests]
    same = [common_prefix(p[:-1], held) for p, held in zip(prompts, session.held, strict=True) if p]
    start = min(same) // reuse_multiple * reuse_multiple
    session.held = [[] for _ in prompts]  # should this be interrupted
    session.stats.cached_tokens += start * len(same)
    session.stats.prefill_tokens += sum(len(p) - start for p in prompts if p)
    columns = zip(*((r or Request([], 1))[2:] for r in requests), strict=True)
    sampling = sampling_params(len(requests), *map(list, columns))
    static = dict(config=engine.config, mesh=engine.mesh, implementation=engine.implementation)
    rows = session.prompts
    for bucket in buckets(max(map(len, prompts)) - start):
        parts = [p[start : start + bucket] for p in prompts]
        tokens = np.array([part + [0] * (bucket - len(part)) for part in parts], np.int32)
        starts, counts = (
            np.full(len(parts), start, np.int32),
            np.array([*map(len, parts)], np.int32),
        )
        args = (engine.weights, rows.cache, tokens, starts, counts, sampling)
        cache, token_B = _call(session, ("prefill", bucket), engine.model.prefill, *args, **static)
        rows = session.prompts = rows._replace(cache=cache, token_B=token_B)
        start += bucket
    session.held = prompts
    lengths = np.array([*map(len, prompts)], np.int32)
    return rows._replace(
        length_B=jax.device_put(lengths, rows.length_B.sharding), sampling=sampling
    )


def fetch(array: jax.Array) -> np.ndarray:
    """A device array on every host."""
    if jax.process_count() > 1:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


class _Running(NamedTuple):
    request: int
    left: int  # tokens that it may still produce
    length: int  # tokens of prompt and text so far


def _admit(
    requests: Sequence[Request],
    waiting: deque[int],
    running: dict[int, _Running],
    rows: int,
    per_row: int,
) -> dict[int, tuple[int, int]]:
    """Takes waiting requests in order, one per data shard with a free slot: {shard: (request,
    slot)}.

    Only prompts that are read in the same buckets go together, so that none is read differently for
    its company.
    """
    entering: dict[int, tuple[int, int]] = {}
    for row in range(rows):
        free = [s for s in range(row * per_row, (row + 1) * per_row) if s not in running]
        together = [request for request, _ in entering.values()] + list(waiting)[:1]
        if (
            free
            and waiting
            and len({tuple(buckets(len(requests[i].prompt))) for i in together}) == 1
        ):
            entering[row] = (waiting.popleft(), free[0])
    return entering


def _enter(
    engine: Engine, session: Session, requests: Sequence[Request], entering: Any, reuse: int
) -> np.ndarray:
    """Reads the prompts in `entering` and inserts them into their slots: the first token of each
    row."""
    began, compiled, stats = time.perf_counter(), session.stats.compile_s, session.stats
    rows = range(len(session.held))
    batch = [requests[entering[r][0]] if r in entering else None for r in rows]
    prompts = _read_prompts(engine, session, batch, reuse)
    slots = np.array([entering[r][1] if r in entering else -1 for r in rows], np.int32)
    session.state = _call(
        session, "insert", engine.model.insert, session.state, prompts, slots, mesh=engine.mesh
    )
    tokens = fetch(prompts.token_B)
    stats.prefill_s += time.perf_counter() - began - (stats.compile_s - compiled)
    return tokens


def _step(engine: Engine, session: Session) -> jax.Array:
    """Starts one decode step of all slots: its tokens, which may still be under way."""
    static = dict(config=engine.config, mesh=engine.mesh, implementation=engine.implementation)
    session.state, token_B = _call(
        session, "generate", engine.model.generate, engine.weights, session.state, **static
    )
    session.stats.decode_steps += 1
    return token_B


@partial(jax.jit, static_argnames="sharding")
def _keep(length_B: jax.Array, keep_B: jax.Array, sharding: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.where(keep_B, length_B, 0), sharding)


def _empty_others(session: Session, running: dict[int, _Running]) -> None:
    """Frees every slot that is not running."""
    length_B = session.state.length_B
    keep_B = np.isin(np.arange(length_B.shape[0]), list(running))
    session.state = session.state._replace(
        length_B=_keep(length_B, keep_B, sharding=length_B.sharding)
    )


def serve(
    engine: Engine,
    requests: Sequence[Request],
    stop_ids: Collection[int],
    session: Session,
    reuse_multiple: int = CHUNK,
) -> Generator[Event, None, None]:
    """Yields the tokens of all requests as they are made; ValueError if one cannot be served.

    A prompt that begins as the one before it on its data shard did keeps that part of the cache,
    in multiples of `reuse_multiple` tokens. At the default every prompt is read in the same chunks
    whatever came before, so its text cannot depend on that even by a rounding error; a conversation
    passes 1.
    """
    for i, request in enumerate(requests):
        check_request(request, engine.capacity, f"prompt {i + 1}")
    rows, stats, began = engine.mesh.shape[DATA], session.stats, time.perf_counter()
    waiting, running = deque(range(len(requests))), dict[int, _Running]()
    ahead: tuple[jax.Array, dict[int, int]] | None = None  # tokens under way, and whose they are

    def book(slot: int, token: int) -> Event:
        request, left, length = running.pop(slot)
        finish = "stop" if token in stop_ids else "length" if left == 1 else None
        if finish is None:
            running[slot] = _Running(request, left - 1, length + 1)
        return Event(request, token, finish)

    try:
        while waiting or running:
            while waiting and (
                entering := _admit(requests, waiting, running, rows, engine.slots // rows)
            ):
                tokens = _enter(engine, session, requests, entering, reuse_multiple)
                stats.first_token_s = stats.first_token_s or time.perf_counter() - began
                for row, (i, slot) in entering.items():
                    length = len(requests[i].prompt)
                    room = engine.capacity - length + 1  # the last token needs no place in it
                    left = min(requests[i].max_new_tokens, room)
                    running[slot] = _Running(i, left, length)
                    yield book(slot, int(tokens[row]))
                _empty_others(session, running)
            start, compiled, produced = time.perf_counter(), stats.compile_s, []
            behind, ahead = ahead, None
            if running:
                ahead = (_step(engine, session), {slot: r.request for slot, r in running.items()})
                filled = sum(r.length + 1 for r in running.values())
                stats.filled += filled / (engine.slots * engine.capacity)
            if behind:
                tokens = fetch(behind[0])
                produced = [
                    (s, int(tokens[s]))
                    for s, i in behind[1].items()
                    if s in running and running[s].request == i
                ]
            stats.decode_s += time.perf_counter() - start - (stats.compile_s - compiled)
            stats.decode_tokens += len(produced)
            for slot, token in produced:
                yield book(slot, token)
            if any(slot not in running for slot, _ in produced):
                _empty_others(session, running)
    finally:  # also when the caller stops early
        _empty_others(session, {})
