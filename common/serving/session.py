"""A session: a model with slots in which it decodes, and the single steps that fill and empty them.

One prompt per `data` shard is read at a time, in chunks whose lengths come from a short list of
buckets. Its cache is then inserted into a free slot. All filled slots decode together.
"""

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from common.kernels.dispatch import AUTO, Impl
from common.sampling import check_sampling, sampling_params
from common.serving.load import Model, cache_dtype
from common.sharding import DATA, P, model_shards

NO_TOKEN = -2  # takes the place of a second token if the draft was wrong
PROMPT_CHUNK = 512  # tokens read at once; enough to be compute-bound, few enough for memory
SMALLEST_BUCKET = 32


class Request(NamedTuple):
    """A prompt and its settings; the sampling fields are those of `Sampling`."""

    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


NO_REQUEST = Request((), 1)


class Event(NamedTuple):
    """One new token of a request. `finish` is None if more tokens will come; else "stop", "length",
    or "invalid": the logits are NaN or infinite, and there is no token."""

    request: int
    token: int
    finish: str | None


@dataclass
class Stats:
    """Seconds and tokens, which `serve` counts as it goes."""

    compile_s: float = 0.0  # in calls that compiled a program
    first_token_s: float = 0.0  # from the call of `serve` to its first token, compilation included
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens already cached by an earlier prompt
    decode_s: float = 0.0
    decode_steps: int = 0
    filled: float = 0.0  # the filled share of the cache, summed over decode steps
    decode_tokens: int = 0
    drafts: int = 0  # how many were verified, if the module drafts
    drafts_right: int = 0


@dataclass
class Session:
    """A model with slots in which it decodes, and the state that outlives one call of `serve`."""

    model: Model
    slots: int
    capacity: int  # positions per slot
    implementation: str
    state: Any  # the model file's DecodeState of all slots
    prompts: Any  # a DecodeState with one slot per data shard, in which prompts are read
    held: list[list[int]]  # the tokens in each slot of `prompts`
    stats: Stats = field(default_factory=Stats)


def capacity_for(need: int, limit: int) -> int:
    """Returns the smallest power of two that is at least `need` and 512; or `limit`, if that is
    less. Powers of two let prompts of many lengths share compiled programs."""
    return min(limit, max(512, 1 << (need - 1).bit_length()))


def start_session(
    model: Model,
    slots: int,
    capacity: int,
    dtype: DTypeLike | None = None,
    implementation: str = AUTO,
) -> Session:
    """Allocates `slots` slots of `capacity` positions on the model's mesh, with a cache of `dtype`
    (by default that of `cache_dtype`). AUTO on CPU means BLOCKED, which does not import the kernels
    of other platforms: the import takes half a second."""
    module, mesh, rows = model.module, model.mesh, model.mesh.shape[DATA]
    if slots < 1 or slots % rows:
        raise ValueError(f"{slots} slots cannot be split evenly over data={rows}")
    dtype = cache_dtype(model.dtype, model.on_cpu) if dtype is None else jnp.dtype(dtype)
    if implementation == AUTO and model.on_cpu:
        implementation = Impl.BLOCKED
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), module.STATE_SPEC)
    shape = dict(capacity=capacity, dtype=dtype, shards=model_shards(mesh))
    make = partial(module.init_state, model.config, **shape)
    state, prompts = (
        jax.jit(partial(make, slots=n), out_shardings=shardings)() for n in (slots, rows)
    )
    return Session(
        model, slots, capacity, implementation, state, prompts, [[] for _ in range(rows)]
    )


def buckets(count: int) -> list[int]:
    """Returns the lengths in which `count` prompt tokens are read: whole chunks, then the smallest
    power of two that holds the rest."""
    whole, rest = divmod(count, PROMPT_CHUNK)
    last = max(SMALLEST_BUCKET, 1 << (rest - 1).bit_length()) if rest else 0
    return [PROMPT_CHUNK] * whole + [last] * (rest > 0)


def check_request(request: Request, capacity: int, limit: int, name: str = "the prompt") -> None:
    """ValueError if a request cannot be served in a slot of `capacity` positions, by a model with a
    context of `limit` tokens."""
    if not request.prompt:
        raise ValueError(f"{name} is empty")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
    if (n := len(request.prompt)) > limit:
        raise ValueError(f"{name} has {n} tokens, but the model's context has {limit}")
    if n > capacity:
        raise ValueError(f"{name} has {n} tokens, over the cache's {capacity} (see --max-len)")
    check_sampling(*request[2:])


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


compilations = 0  # programs that XLA compiled in this process


def _count_compilation(event: str, duration_secs: float, **_: Any) -> None:
    global compilations
    if event.endswith("backend_compile_duration"):
        compilations += 1


jax.monitoring.register_event_duration_secs_listener(_count_compilation)


@contextlib.contextmanager
def timed(stats: Stats, phase: str) -> Iterator[None]:
    """Adds the seconds of its body to the field `phase` of `stats`; or to `compile_s`, if the body
    compiled a program."""
    began, before = time.perf_counter(), compilations
    yield
    phase = phase if compilations == before else "compile_s"
    setattr(stats, phase, getattr(stats, phase) + time.perf_counter() - began)


def fetch(array: jax.Array) -> np.ndarray:
    """Copies a device array to every host."""
    if jax.process_count() > 1:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def read_prompts(
    session: Session, requests: Sequence[Request], entering: dict[int, tuple[int, int]], reuse: int
) -> np.ndarray:
    """Prefills the `entering` prompts, and returns the first token of each data shard's prompt.
    Tokens that are already cached, in multiples of `reuse`, are not read again."""
    model, stats, rows = session.model, session.stats, len(session.held)
    batch = [requests[entering[r][0]] if r in entering else NO_REQUEST for r in range(rows)]
    prompts = [list(request.prompt) for request in batch]
    same = [common_prefix(p[:-1], held) for p, held in zip(prompts, session.held, strict=True) if p]
    start = min(same) // reuse * reuse
    session.held = [[] for _ in prompts]  # in case this is interrupted
    stats.cached_tokens += start * len(same)
    stats.prefill_tokens += sum(len(p) - start for p in prompts if p)
    static: Any = dict(config=model.config, mesh=model.mesh, implementation=session.implementation)
    place = partial(jax.device_put, device=NamedSharding(model.mesh, P(DATA)))
    columns = zip(*(request[2:] for request in batch), strict=True)
    session.prompts = session.prompts._replace(
        length_B=place(np.array([start if p else 0 for p in prompts], np.int32)),
        sampling=place(sampling_params(rows, *map(list, columns))),
    )
    for bucket in buckets(max(map(len, prompts)) - start):
        parts = [p[start : start + bucket] for p in prompts]
        tokens = np.array([part + [0] * (bucket - len(part)) for part in parts], np.int32)
        counts = np.array([*map(len, parts)], np.int32)
        with timed(stats, "prefill_s"):
            session.prompts = model.module.prefill(
                model.weights, session.prompts, place(tokens), place(counts), **static
            )
        start += bucket
    with timed(stats, "prefill_s"):
        first = fetch(session.prompts.token_B)
    session.held = prompts
    return first


def insert_prompts(session: Session, entering: dict[int, tuple[int, int]]) -> None:
    """Copies the prompts that were read into the slots in which they decode. It runs after their
    first tokens are out, so those need not wait for the copy."""
    model, rows = session.model, len(session.held)
    per_row = session.slots // rows
    slot_B = [entering[r][1] % per_row if r in entering else -1 for r in range(rows)]
    with timed(session.stats, "prefill_s"):
        session.state = model.module.insert(
            session.state, session.prompts, np.array(slot_B, np.int32), mesh=model.mesh
        )


def step(session: Session) -> jax.Array:
    """Dispatches one decode step of all slots. Returns its tokens: [B, 1], or `drafted_tokens` if
    the module drafts. They are a copy, because the next step overwrites the state's own."""
    model, drafts = session.model, hasattr(session.state, "draft_B")
    static: Any = dict(config=model.config, mesh=model.mesh, implementation=session.implementation)
    state = session.state
    before = [jnp.copy(x) for x in (state.draft_B, state.length_B)] if drafts else []
    session.state = model.module.generate(model.weights, state, **static)
    session.stats.decode_steps += 1
    if not drafts:
        return jnp.copy(session.state.token_B)[:, None]
    return drafted_tokens(*before, session.state.length_B, session.state.token_B)


@jax.jit
def drafted_tokens(
    draft_B: jax.Array, length_B: jax.Array, new_length_B: jax.Array, token_B: jax.Array
) -> jax.Array:
    """Returns the tokens that each slot gained, [B, 2]: the draft and the newest token; or, if the
    draft was wrong, the newest token and NO_TOKEN."""
    right_B = new_length_B == length_B + 2
    first_B = jnp.where(right_B, draft_B, token_B)
    return jnp.stack([first_B, jnp.where(right_B, token_B, NO_TOKEN)], axis=1)


@partial(jax.jit, static_argnames="sharding")
def keep(length_B: jax.Array, keep_B: jax.Array, sharding: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.where(keep_B, length_B, 0), sharding)


def empty_others(session: Session, running: Collection[int]) -> None:
    """Frees every slot that is not running."""
    length_B = session.state.length_B
    keep_B = np.isin(np.arange(length_B.shape[0]), list(running))
    session.state = session.state._replace(
        length_B=keep(length_B, keep_B, sharding=length_B.sharding)
    )
