"""A session: a model with slots in which it decodes, and the single steps that fill and empty them.

One prompt per `data` shard is read at a time, in chunks whose lengths come from a short list of
buckets. Its cache is then inserted into a free slot. All filled slots decode together. A slot whose
request has ended keeps what it holds until another request needs it; then its text may be kept
without a slot, on the devices or in host memory. `serve` decides what happens when.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from operator import index
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from common.kernels.dispatch import AUTO, Impl
from common.sampling import check_sampling, sampling_params
from common.serving import drafts
from common.serving.load import Model, cache_dtype
from common.serving.prefixes import HOST, KEPT, Place, Prefixes
from common.serving.score import prefill_scored
from common.sharding import DATA, P, model_shards
from common.text.harmony import FINAL, Speech

PROMPT_CHUNK = 512  # tokens read at once; enough to be compute-bound, few enough for memory
SMALLEST_BUCKET = 32
DRAFT_TOKENS = 4
LIKELIEST = 20  # tokens that are scored beside the one taken


class Request(NamedTuple):
    """A prompt and its settings; the sampling fields are those of `Sampling`."""

    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: Collection[int] = ()  # the reply ends with any of these
    stop: Sequence[str] = ()  # its text ends before any of these
    is_chat: bool = False  # it is a message, which may have channels; else it continues the prompt
    logprobs: int | None = None  # scores the tokens of the reply, and this many of the likeliest
    echo: bool = False  # with logprobs: scores the tokens of the prompt, too

    @property
    def sampling(self) -> tuple[Any, ...]:
        return self[2:7]


NO_REQUEST = Request((), 1)


class Score(NamedTuple):
    """The log-probability of a token, and ids and log-probabilities of the likeliest, under the
    model's own distribution, before temperature and filters."""

    logprob: float
    likeliest: list[tuple[int, float]]


class Counts(NamedTuple):
    """How many tokens of a request were reused or drafted."""

    cached: int = 0  # prompt tokens that were not read, because a cache already held them
    drafts: int = 0
    drafts_right: int = 0


class Event(NamedTuple):
    """One new token of a request. `finish` is None if more tokens will come; else "stop", "length",
    or "invalid": the logits are NaN or infinite, and there is no token."""

    request: int
    token: int
    finish: str | None = None
    text: str = ""  # what is certain now; "" without a tokenizer
    channel: str = FINAL  # of the text
    score: Score | None = None
    echo: Sequence[Score] = ()  # with the first token: of all prompt tokens but the first
    counts: Counts = Counts()


@dataclass
class Work:
    """A request in a session."""

    number: int
    request: Request
    tokens: list[int]  # of the prompt and the reply so far
    speech: Speech | None  # the text of the reply; None without a tokenizer
    cached: int = 0  # how many prompt tokens are read
    written: int = 0  # positions written in the place from which its beginning was copied
    ended: bool = False  # or given up
    scores: list[Score] = field(default_factory=list)  # of the prompt and of the first token
    counts: Counts = field(default_factory=Counts)

    @property
    def made(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@dataclass
class Stats:
    """Seconds and tokens, which `step` counts as it goes."""

    compile_s: float = 0.0  # in calls that compiled a program
    first_token_s: float = 0.0  # from the first request to its first token, compilation included
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    prefill_timed: int = 0  # of these, the ones whose seconds are in prefill_s
    cached_tokens: int = 0  # prompt tokens already cached by an earlier prompt
    decode_s: float = 0.0
    decode_steps: int = 0
    filled: float = 0.0  # the filled share of the cache, summed over decode steps
    decode_tokens: int = 0
    drafts: int = 0  # tokens that were drafted
    drafts_right: int = 0


class Ahead(NamedTuple):
    """Tokens that are being computed, and are still to be fetched."""

    new: Any  # token ids [B] or [B, T], and their scores, or None
    works: dict[int, Work]  # by row
    drafted: bool = False
    mixed: bool = True  # whether a chunk of a prompt is computed before them


@dataclass
class Session:
    """A model with slots in which it decodes, and all requests that are not done."""

    models: list[Model]  # the model, and a smaller one if that drafts; their slots hold the same
    slots: int
    capacity: int  # positions per slot
    implementation: str
    reuse_multiple: int  # see `start_session`
    states: list[Any]  # for each model: the DecodeState of all slots
    prompts: list[Any]  # a DecodeState with one slot per data shard, in which prompts are read
    room: dict[str, int]  # by tier: the bytes of texts that are kept for each data shard
    text_BS: jax.Array | None  # int32: the tokens of each slot, if drafts come from them
    draft_tokens: int
    logprobs: bool  # whether requests may ask for them
    gain: drafts.Gain | None  # if drafts are turned off where they do not pay
    prefixes: list[Prefixes]  # what each data shard holds
    stored: list[dict[Place, Any]]  # what each data shard keeps without a slot
    arrived: list[tuple[int, Request | None]] = field(default_factory=list)  # None: given up
    works: dict[int, Work] = field(default_factory=dict)  # all that have not ended, by number
    waiting: deque[Work] = field(default_factory=deque)
    reading: dict[int, Work] = field(default_factory=dict)  # by data shard; the first is next
    read: dict[int, Work] = field(default_factory=dict)  # by data shard; not in a slot yet
    running: dict[int, Work] = field(default_factory=dict)  # by slot
    first: Ahead | None = None  # the first tokens of prompts that were read
    ahead: Ahead | None = None  # the decode step that is under way
    budget: int = PROMPT_CHUNK  # prompt tokens that may be read before the next decode step
    drafting: bool = True  # whether the next step verifies drafts, if there are any
    closed: bool = False  # whether process 0 has told the others that it ends
    ids: int = 0  # requests so far
    began: float = 0.0  # when the first of them came
    stats: Stats = field(default_factory=Stats)

    @property
    def model(self) -> Model:
        return self.models[0]

    @property
    def rows(self) -> int:
        """The number of data shards."""
        return len(self.prefixes)

    @property
    def per_row(self) -> int:
        return self.slots // self.rows

    @property
    def placement(self) -> dict[str, Any]:
        """Where the caches of all models are."""
        spec = tuple(model.module.STATE_SPEC.cache for model in self.models)
        return dict(spec=spec, mesh=self.model.mesh)


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
    *,
    keep: int = 0,
    keep_host: float = 0.0,
    reuse_multiple: int = PROMPT_CHUNK,
    draft: Model | str | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    logprobs: bool = False,
) -> Session:
    """Allocates `slots` slots of `capacity` positions on the model's mesh. ValueError if that
    cannot be.

    Args:
      dtype: of the cache; by default that of `cache_dtype`.
      implementation: AUTO on CPU means BLOCKED, which does not import the kernels of other
        platforms: the import takes half a second.
      keep: the memory of so many further slots keeps the texts of requests that have ended, for
        prompts that begin alike.
      keep_host: gigabytes of host memory for texts that have no room there.
      reuse_multiple: beginnings of prompts are reused in multiples of this. With the default, a
        prompt is read in the same chunks whatever came before, so its reply does not depend on
        that, not even by a rounding error. A conversation passes 1, which also reuses replies.
      draft: where drafts come from: a smaller model on the same mesh, or "lookup", which is the
        text itself, or "auto", which is "lookup" while that is faster than no drafts.
      draft_tokens: how many tokens are drafted at once.
      logprobs: whether requests may ask for log-probabilities.
    """
    models, mesh, rows = [model], model.mesh, model.mesh.shape[DATA]
    if slots < 1 or slots % rows:
        raise ValueError(f"{slots} slots cannot be split evenly over data={rows}")
    limit = model.config.max_position_embeddings
    if not 1 <= capacity <= limit:
        raise ValueError(f"a slot has 1 to {limit} positions, the model's context, not {capacity}")
    least = (
        (keep, "keep", 0),
        (reuse_multiple, "reuse_multiple", 1),
        (draft_tokens, "draft_tokens", 1),
    )
    for value, name, minimum in least:
        if not isinstance(value, Integral) or value < minimum:
            raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")
    if not 0 <= keep_host < math.inf:
        raise ValueError(f"keep_host must be finite and at least 0, got {keep_host}")
    if isinstance(draft, Model):
        drafts.check_fits(model, draft)
        models.append(draft)
    elif draft not in (None, "lookup", "auto"):
        raise ValueError(f"draft {draft!r} is neither a model nor one of lookup, auto")
    dtype = cache_dtype(model.dtype, model.on_cpu) if dtype is None else jnp.dtype(dtype)
    if implementation == AUTO and model.on_cpu:
        implementation = Impl.BLOCKED

    def states(count: int) -> list[Any]:
        shape: Any = dict(slots=count, capacity=capacity, dtype=dtype, mesh=mesh)
        return [init_state(model.module, model.config, **shape) for model in models]

    prompts = states(rows)
    publish((prompts[0].token_B, None))  # compiled here, not while a CPU already reads a prompt
    slot = sum(x.nbytes for x in jax.tree.leaves([state.cache for state in prompts])) // rows
    text = partial(jnp.zeros, (slots, capacity + 1), jnp.int32, device=NamedSharding(mesh, P(DATA)))
    return Session(
        models=models,
        slots=slots,
        capacity=capacity,
        implementation=implementation,
        reuse_multiple=reuse_multiple,
        states=states(slots),
        prompts=prompts,
        room={KEPT: keep * slot // rows, HOST: int(keep_host * 1e9) // rows},
        text_BS=None if draft is None else text(),
        draft_tokens=draft_tokens,
        logprobs=logprobs,
        gain=drafts.Gain() if draft == "auto" else None,
        prefixes=[Prefixes() for _ in range(rows)],
        stored=[{} for _ in range(rows)],
    )


@partial(jax.jit, static_argnames=("module", "config", "slots", "capacity", "dtype", "mesh"))
def init_state(
    module: ModuleType, config: Any, slots: int, capacity: int, dtype: DTypeLike, mesh: Mesh
) -> Any:
    """`init_state` of a model file, on the mesh."""
    state = module.init_state(config, slots, capacity, dtype, model_shards(mesh))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), module.STATE_SPEC)
    return jax.lax.with_sharding_constraint(state, shardings)


def buckets(count: int) -> list[int]:
    """Returns the lengths in which `count` prompt tokens are read: whole chunks, then the smallest
    power of two that holds the rest."""
    whole, rest = divmod(count, PROMPT_CHUNK)
    last = max(SMALLEST_BUCKET, 1 << (rest - 1).bit_length()) if rest else 0
    return [PROMPT_CHUNK] * whole + [last] * (rest > 0)


def check_request(request: Request, capacity: int, config: Any, name: str = "the prompt") -> None:
    """ValueError if a model with this config cannot serve a request in a slot of `capacity`
    positions."""
    limit, vocab_size = config.max_position_embeddings, config.vocab_size
    try:
        index(request.max_new_tokens), index(request.logprobs or 0)
        [index(i) for i in (*request.prompt, *request.stop_ids)]
    except TypeError:
        names = f"{name}, stop_ids, max_new_tokens and logprobs"
        raise ValueError(f"{names} must be whole numbers") from None
    stop = request.stop
    if not isinstance(stop, list | tuple) or not all(isinstance(x, str) for x in stop):
        raise ValueError(f"stop must be a list of texts, not {stop!r}")
    if len(request.prompt) == 0:
        raise ValueError(f"{name} is empty")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
    if (n := len(request.prompt)) > limit:
        raise ValueError(f"{name} has {n} tokens, but the model's context has {limit}")
    if n > capacity:
        raise ValueError(f"{name} has {n} tokens, over the cache's {capacity} (see --max-len)")
    if not all(0 <= i < vocab_size for i in request.prompt):
        raise ValueError(f"{name} has an id that is not in [0, {vocab_size})")
    if request.logprobs is not None and not 0 <= request.logprobs <= LIKELIEST:
        raise ValueError(f"logprobs must be in [0, {LIKELIEST}], got {request.logprobs}")
    check_sampling(*request.sampling)


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


@partial(jax.jit, static_argnames="sharding")
def replicate(x: Any, sharding: Any) -> Any:
    return jax.lax.with_sharding_constraint(jax.tree.map(jnp.copy, x), sharding)


def publish(x: Any) -> Any:
    """A copy of arrays that every process can read."""
    sharding: Any = jax.tree.leaves(x)[0].sharding
    return replicate(x, NamedSharding(sharding.mesh, P()))


def fetch(x: Any) -> Any:
    """Copies arrays from the devices to every host."""
    return jax.tree.map(np.asarray, publish(x))


def per_shard(session: Session, values: Any, dtype: DTypeLike = np.int32) -> jax.Array:
    """One value, or row of values, for each data shard, which holds its own."""
    sharding = NamedSharding(session.model.mesh, P(DATA))
    return jax.device_put(np.asarray(values, dtype), sharding)


def describe_prompts(session: Session) -> None:
    """Writes the cached lengths and sampling parameters of the prompts that are being read into
    `session.prompts`."""
    works = [session.reading.get(row) for row in range(session.rows)]
    requests = [work.request if work else NO_REQUEST for work in works]
    columns = [*zip(*(request.sampling for request in requests), strict=True)]
    cached = [work.cached if work else 0 for work in works]

    def known() -> dict[str, Any]:  # arrays of its own for each state, as states are donated
        params = sampling_params(session.rows, *map(list, columns))
        return dict(
            length_B=per_shard(session, cached),
            sampling=jax.device_put(params, NamedSharding(session.model.mesh, P(DATA))),
        )

    session.prompts = [state._replace(**known()) for state in session.prompts]


class Chunk(NamedTuple):
    """How prompt tokens are read: how many at once, and whether they are scored."""

    bucket: int
    scored: bool


def next_chunk(work: Work) -> Chunk:
    bucket = buckets(len(work.tokens) - work.cached)[0]
    return Chunk(bucket, work.request.logprobs is not None)


def read_chunk(session: Session, together: dict[int, Work], chunk: Chunk) -> None:
    """Runs `prefill` on the next `chunk.bucket` prompt tokens of each request in `together`, which
    maps data shards to requests. Collects the scores of the tokens, if the chunk is scored."""
    tokens_BT = np.zeros((session.rows, chunk.bucket), np.int32)
    count_B, after_B = np.zeros(session.rows, np.int32), np.full(session.rows, -1, np.int32)
    for row, work in together.items():
        part = work.tokens[work.cached : work.cached + chunk.bucket + 1]
        after_B[row] = part[chunk.bucket] if len(part) > chunk.bucket else -1
        count_B[row] = min(len(part), chunk.bucket)
        tokens_BT[row, : count_B[row]] = part[: count_B[row]]
        work.cached += int(count_B[row])
    given = [per_shard(session, x) for x in (tokens_BT, count_B, after_B)]
    for i, model in enumerate(session.models):
        known = model.weights, session.prompts[i], *given[:2]
        if i == 0 and chunk.scored:
            more: Any = dict(likeliest=LIKELIEST, **static(session, model))
            session.prompts[0], scores = prefill_scored(model.module, *known, given[2], **more)
            scores = fetch(scores)
            for row, work in together.items():
                work.scores += [score_of(scores, row, t, work.request) for t in range(count_B[row])]
        else:
            session.prompts[i] = model.module.prefill(*known, **static(session, model))


def score_of(scores: Any, row: int, t: int, request: Request) -> Score:
    n = request.logprobs or 0
    likeliest = scores.likeliest_BTX[row, t, :n].tolist(), scores.score_BTX[row, t, :n].tolist()
    return Score(float(scores.token_BT[row, t]), [*zip(*likeliest, strict=True)])


def static(session: Session, model: Model) -> dict[str, Any]:
    return dict(config=model.config, mesh=model.mesh, implementation=session.implementation)


def insert(session: Session, slots: dict[int, int]) -> None:
    """Copies each prompt in `session.read` from its data shard into the slot slots[shard], and lets
    it run there. Slots are numbered over all data shards."""
    works, session.read = session.read, {}
    slot_B = np.full(session.rows, -1, np.int32)
    for row, slot in slots.items():
        slot_B[row], session.running[slot] = slot % session.per_row, works[row]
    for i, model in enumerate(session.models):
        state, prompts = session.states[i], session.prompts[i]
        session.states[i] = model.module.insert(state, prompts, slot_B, mesh=model.mesh)
    if session.text_BS is not None:
        texts, at = np.zeros((len(slots), session.capacity + 1), np.int32), [*slots.values()]
        for text, row in zip(texts, slots, strict=True):
            text[: len(works[row].tokens)] = works[row].tokens
        session.text_BS = set_rows(session.text_BS, texts, np.array(at), session.text_BS.sharding)


@partial(jax.jit, static_argnames="sharding", donate_argnames="x")
def set_rows(x: jax.Array, rows: np.ndarray, at: np.ndarray, sharding: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x.at[at].set(rows), sharding)


def generate(session: Session) -> Ahead:
    """Dispatches one decode step of all slots. What it returns is a copy, because the next step
    overwrites the state's own."""
    model, models, works = session.model, session.models, dict(session.running)
    drafting = session.text_BS is not None and session.drafting
    wanted = any(work.request.logprobs is not None for work in works.values())
    session.stats.decode_steps += 1
    if session.text_BS is None and not session.logprobs:
        state, known = session.states[0], static(session, model)
        session.states[0] = state = model.module.generate(model.weights, state, **known)
        drafting = hasattr(state, "new_BT")
        new = (state.new_BT if drafting else state.token_B), None
    else:
        session.states, session.text_BS, *new = drafts.generate(
            [model.weights for model in models],
            session.states,
            session.text_BS,
            np.array(wanted) if session.logprobs else None,  # one program for all steps
            modules=tuple(model.module for model in models),
            configs=tuple(model.config for model in models),
            mesh=model.mesh,
            implementation=session.implementation,
            K=session.draft_tokens if drafting else 0,
            likeliest=LIKELIEST,
        )
    return Ahead(publish(new), works, drafting, bool(session.reading))


@partial(jax.jit, static_argnames="sharding")
def where(keep_B: np.ndarray, x_B: jax.Array, sharding: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.where(keep_B, x_B, 0), sharding)


def empty_others(session: Session, running: Collection[int]) -> None:
    """Frees every slot that is not running. What its cache holds stays."""
    state, sampling = session.states[0], session.states[0].sampling
    keep_B = np.isin(np.arange(session.slots), list(running))
    length_B, temperature_B = (
        where(keep_B, x_B, sharding=x_B.sharding)
        for x_B in (state.length_B, sampling.temperature_B)
    )
    sampling = sampling._replace(temperature_B=temperature_B)  # `sample` need not search for it
    session.states[0] = state._replace(length_B=length_B, sampling=sampling)
