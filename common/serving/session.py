"""A session: a model with slots in which it decodes, and the single steps that fill and empty them.

One prompt per `data` shard is read at a time, in chunks whose lengths come from a short list of
buckets. Its cache is then inserted into a free slot. All filled slots decode together. A slot whose
request has ended keeps what it holds until another request needs it; then its text may move to a
kept slot, and from there to host memory. `serve` decides what happens when.
"""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from common.kernels.dispatch import AUTO, Impl
from common.sampling import check_sampling, sampling_params
from common.serving.drafts import Gain, with_drafts
from common.serving.load import Model, cache_dtype
from common.serving.prefixes import Place, Prefixes
from common.sharding import DATA, P, model_shards

PROMPT_CHUNK = 512  # tokens read at once; enough to be compute-bound, few enough for memory
SMALLEST_BUCKET = 32
DRAFT_TOKENS = 4


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
    logprobs: int | None = None  # scores the tokens of the reply, and this many of the likeliest
    echo: bool = False  # scores the tokens of the prompt, too

    @property
    def sampling(self) -> tuple[Any, ...]:
        return self[2:7]


NO_REQUEST = Request((), 1)


class Score(NamedTuple):
    """The log-probability of a token, and ids and log-probabilities of the likeliest, under the
    model's own distribution, before temperature and filters."""

    logprob: float
    likeliest: list[tuple[int, float]]


class Event(NamedTuple):
    """One new token of a request. `finish` is None if more tokens will come; else "stop", "length",
    or "invalid": the logits are NaN or infinite, and there is no token."""

    request: int
    token: int
    finish: str | None
    score: Score | None = None
    echo: Sequence[Score] = ()  # with the first token: of all prompt tokens but the first


@dataclass
class Work:
    """A request in a session."""

    number: int
    request: Request
    tokens: list[int]  # of the prompt and the reply so far
    cached: int = 0  # how many prompt tokens are read
    ended: bool = False
    scores: list[Score] = field(default_factory=list)  # of the prompt and of the first token

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
    cached_tokens: int = 0  # prompt tokens already cached by an earlier prompt
    decode_s: float = 0.0
    decode_steps: int = 0
    filled: float = 0.0  # the filled share of the cache, summed over decode steps
    decode_tokens: int = 0
    drafts: int = 0  # tokens that were drafted
    drafts_right: int = 0


class Ahead(NamedTuple):
    """A decode step whose results are still to be fetched."""

    new: Any  # what `newest` returns
    slots: list[int]  # that were running; none of them has got another request since
    drafted: bool
    mixed: bool  # whether a chunk of a prompt was dispatched before it


@dataclass
class Session:
    """A model with slots in which it decodes, and all requests that are not done."""

    model: Model
    slots: int
    capacity: int  # positions per slot
    implementation: str
    reuse_multiple: int  # see `start_session`
    state: Any  # the model file's DecodeState of all slots
    prompts: Any  # a DecodeState with one slot per data shard, in which prompts are read
    kept: Any  # the cache of the kept slots
    likeliest: int | None  # the most that a request may set as `logprobs`
    gain: Gain | None  # of drafts, if they are turned off where they do not pay
    keep: int  # how many those are on each data shard
    host_bytes: int  # what may be stored in host memory for each data shard
    prefixes: list[Prefixes]  # what each data shard holds
    stored: list[dict[Place, Any]]  # the caches of each data shard that are in host memory
    arrived: list[tuple[int, Request | None]] = field(default_factory=list)  # None: given up
    waiting: OrderedDict[int, Work] = field(default_factory=OrderedDict)  # by number
    reading: dict[int, Work] = field(default_factory=dict)  # by data shard; the first is next
    read: dict[int, Work] = field(default_factory=dict)  # by data shard; not in a slot yet
    fresh: Any = None  # the first tokens of these, to be fetched
    running: dict[int, Work] = field(default_factory=dict)  # by slot
    ahead: Ahead | None = None  # the decode step that is under way
    budget: int = PROMPT_CHUNK  # prompt tokens that may be read before the next decode step
    freed: bool = False  # whether a slot that no longer runs has not been emptied
    closed: bool = False  # whether process 0 has told the others that it ends
    ids: int = 0  # requests so far
    began: float = 0.0  # when the first of them came
    stats: Stats = field(default_factory=Stats)

    @property
    def rows(self) -> int:
        """The number of data shards."""
        return len(self.prefixes)

    @property
    def per_row(self) -> int:
        return self.slots // self.rows

    @property
    def is_extended(self) -> bool:
        """Whether `with_drafts` made the module."""
        return hasattr(self.model.module, "parts")


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
    logprobs: int | None = None,
) -> Session:
    """Allocates `slots` slots of `capacity` positions on the model's mesh. ValueError if that
    cannot be.

    Args:
      dtype: of the cache; by default that of `cache_dtype`.
      implementation: AUTO on CPU means BLOCKED, which does not import the kernels of other
        platforms: the import takes half a second.
      keep: the number of further slots, which do not decode. They keep the texts of requests that
        have ended, for prompts that begin alike.
      keep_host: gigabytes of host memory for texts that the kept slots have no room for.
      reuse_multiple: beginnings of prompts are reused in multiples of this. With the default, a
        prompt is read in the same chunks whatever came before, so its reply does not depend on
        that, not even by a rounding error. A conversation passes 1, which also reuses replies.
      draft: where drafts come from: a smaller model on the same mesh, or "lookup", which is the
        text itself, or "auto", which is "lookup" while that is faster than no drafts.
      draft_tokens: how many tokens are drafted at once.
      logprobs: the most that a request may set as `logprobs`; by default, no request may.
    """
    if draft is not None or logprobs is not None:
        of_draft = None if isinstance(draft, str) else draft
        model = with_drafts(model, of_draft, draft_tokens if draft else 0, logprobs)
    module, mesh, rows = model.module, model.mesh, model.mesh.shape[DATA]
    for count, what in ((slots, "slots"), (keep, "kept slots")):
        if count < (what == "slots") or count % rows:
            raise ValueError(f"{count} {what} cannot be split evenly over data={rows}")
    dtype = cache_dtype(model.dtype, model.on_cpu) if dtype is None else jnp.dtype(dtype)
    if implementation == AUTO and model.on_cpu:
        implementation = Impl.BLOCKED
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), module.STATE_SPEC)
    shape = dict(capacity=capacity, dtype=dtype, shards=model_shards(mesh))
    make = partial(module.init_state, model.config, **shape)
    state, prompts, kept = (
        jax.jit(partial(make, slots=n), out_shardings=shardings)() for n in (slots, rows, keep)
    )
    return Session(
        model=model,
        slots=slots,
        capacity=capacity,
        implementation=implementation,
        reuse_multiple=reuse_multiple,
        state=state,
        prompts=prompts,
        kept=kept.cache,
        keep=keep // rows,
        host_bytes=int(keep_host * 1e9) // rows,
        likeliest=logprobs,
        gain=Gain() if draft == "auto" else None,
        prefixes=[Prefixes() for _ in range(rows)],
        stored=[{} for _ in range(rows)],
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
    """Writes to the state of the prompts what is known of those that are being read."""
    mesh, prompts = session.model.mesh, session.prompts
    works = [session.reading.get(row) for row in range(session.rows)]
    requests = [work.request if work else NO_REQUEST for work in works]
    columns = zip(*(request.sampling for request in requests), strict=True)
    params = sampling_params(session.rows, *map(list, columns))
    known: dict[str, Any] = dict(
        length_B=per_shard(session, [work.cached if work else 0 for work in works]),
        sampling=jax.device_put(params, NamedSharding(mesh, P(DATA))),
    )
    if session.is_extended:
        rows = [[*r.prompt, *[0] * (session.capacity + 1 - len(r.prompt))] for r in requests]
        known["text_BS"] = per_shard(session, rows)
    if session.is_extended and prompts.scored_B is not None:
        known["scored_B"] = per_shard(session, [r.logprobs is not None for r in requests], bool)
    session.prompts = prompts._replace(**known)


class Chunk(NamedTuple):
    """How prompt tokens are read: how many at once, and whether they are scored."""

    bucket: int
    scored: bool


def next_chunk(work: Work) -> Chunk:
    bucket = buckets(len(work.tokens) - work.cached)[0]
    return Chunk(bucket, work.request.logprobs is not None)


def read_chunk(session: Session, together: dict[int, Work], chunk: Chunk) -> None:
    """Appends the next prompt tokens of each request, which are read on different data shards, to
    what is read of it."""

    def rows(shift: int, beyond: int) -> list[list[int]]:
        found = list[list[int]]()
        for work in map(together.get, range(session.rows)):
            at = work.cached + shift if work else 0
            row = list(work.tokens[at : at + chunk.bucket]) if work else []
            found.append(row + [beyond] * (chunk.bucket - len(row)))
        return found

    counts = [len(w.tokens) - w.cached if w else 0 for w in map(together.get, range(session.rows))]
    count_B = per_shard(session, np.minimum(counts, chunk.bucket))
    given: Any = session.model.weights, session.prompts, per_shard(session, rows(0, 0)), count_B
    next_BT = per_shard(session, rows(1, -1)) if chunk.scored else None
    new = session.model.module.prefill(*given, *([next_BT] * chunk.scored), **static(session))
    session.prompts, scores = new if session.is_extended else (new, None)
    if scores is not None:
        scores = fetch(scores)
        for row, work in together.items():
            count = min(counts[row], chunk.bucket)
            work.scores += [score_of(scores, row, t, work.request) for t in range(count)]


def score_of(scores: Any, row: int, t: int, request: Request) -> Score:
    n = request.logprobs or 0
    likeliest = scores.likeliest_BTX[row, t, :n].tolist(), scores.score_BTX[row, t, :n].tolist()
    return Score(float(scores.token_BT[row, t]), [*zip(*likeliest, strict=True)])


def static(session: Session) -> dict[str, Any]:
    model = session.model
    return dict(config=model.config, mesh=model.mesh, implementation=session.implementation)


def generate(session: Session) -> Ahead:
    """Dispatches one decode step of all slots."""
    model, options = session.model, static(session)
    drafting = session.gain is None or session.gain.drafting
    if session.is_extended:
        options |= dict(drafting=drafting)
    session.state = model.module.generate(model.weights, session.state, **options)
    session.stats.decode_steps += 1
    return Ahead(newest(session.state), [*session.running], drafting, bool(session.reading))


def newest(state: Any) -> Any:
    """The tokens of the newest step [B] or [B, K + 1], and their scores, if any. They are a copy,
    because the next step overwrites the state's own."""
    return publish((getattr(state, "new_BT", state.token_B), getattr(state, "scores", None)))


@partial(jax.jit, static_argnames="sharding")
def where(keep_B: np.ndarray, x_B: jax.Array, sharding: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.where(keep_B, x_B, 0), sharding)


def empty_others(session: Session, running: Collection[int]) -> None:
    """Frees every slot that is not running. What its cache holds stays."""
    state, sampling = session.state, session.state.sampling
    keep_B = np.isin(np.arange(session.slots), list(running))
    length_B, temperature_B = (
        where(keep_B, x_B, sharding=x_B.sharding)
        for x_B in (state.length_B, sampling.temperature_B)
    )
    sampling = sampling._replace(temperature_B=temperature_B)  # `sample` need not search for it
    session.state = state._replace(length_B=length_B, sampling=sampling)
