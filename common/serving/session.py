"""A session: a model with slots in which it decodes. `steps` fills and empties them.

One prompt per `data` shard is read at a time, in chunks whose lengths come from a short list of
buckets. Its cache is then inserted into a free slot. All filled slots decode together. A slot whose
request has ended keeps what it holds until another request needs it; then its text may be kept
without a slot, on the devices or in host memory. `serve` decides what happens when.
"""

import contextlib
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from operator import index
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from common.cache import shortest_beginning
from common.recurrent import PENDING, is_recurrent
from common.sampling import LIKELIEST, PARAMETERS, PENALTIES, check
from common.serving.load import Model, cache_dtype, check_fits, init_state
from common.serving.prefixes import HOST, KEPT, Prefixes, Text
from common.serving.score import Score
from common.sharding import DATA, P
from common.text.reply import FINAL, Speech

PROMPT_CHUNK = 512  # tokens read at once; enough to be compute-bound, few enough for memory
DRAFT_TOKENS = 4
BIASES = 512  # tokens of a request that may have one


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
    cache_salt: str = ""  # cached prefixes are reused only by requests with the same salt
    # The rules of its tokens: see `Rules`.
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()  # added to logits, by id
    grammar: str | None = None  # of llguidance, which the whole reply must fit
    keep_special: bool = False  # special tokens come as text

    @property
    def has_penalty(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def is_ruled(self) -> bool:
        return self.has_penalty or bool(self.logit_bias) or self.grammar is not None


class Counts(NamedTuple):
    cached: int = 0  # prompt tokens that were not read, because a cache already held them
    drafts: int = 0
    drafts_right: int = 0


class Event(NamedTuple):
    """One new token of a request. `finish` is None if more tokens will come; else "stop", "length",
    or "invalid": the logits are NaN or infinite, or the grammar has failed, and there is no token.
    """

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
    text: Text = field(default_factory=Text)  # what others can reuse of it
    cached: int = 0  # how many prompt tokens are read
    keep_at: Collection[int] = ()  # the lengths at which the states of recurrent layers are kept
    scores: list[Score] = field(default_factory=list)  # of the prompt and of the first token
    counts: Counts = field(default_factory=Counts)
    guide: Any = None  # how far the reply has come in its grammar

    @property
    def left(self) -> int:
        """How many prompt tokens are not read yet."""
        return len(self.tokens) - self.cached

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
    mixed: bool = True  # whether a chunk of a prompt is computed before them


@dataclass
class Session:
    """A model with slots in which it decodes, and all requests that are not done."""

    models: list[Model]  # the model, and a smaller one if that drafts; their slots hold the same
    slots: int
    capacity: int  # positions per slot
    rows: int  # data shards
    by_shard: NamedSharding  # of arrays that have one row, or equally many, for each data shard
    reuse_multiple: int  # see `start_session`
    states: list[Any]  # for each model: the DecodeState of all slots
    prompts: list[Any]  # a DecodeState with one slot per data shard, in which prompts are read
    room: dict[str, int]  # by tier: the bytes of texts that are kept for each data shard
    text_BS: jax.Array | None  # int32: the tokens of each slot, if drafts come from them
    draft_tokens: int
    logprobs: bool  # whether requests may ask for them
    prefixes: list[Prefixes]  # what each data shard holds
    seen_BV: jax.Array | None = None  # of `Rules`, for all slots, while a request has a penalty
    arrived: list[tuple[int, Request | None]] = field(default_factory=list)  # None: given up
    works: dict[int, Work] = field(default_factory=dict)  # by number, until ended or given up
    waiting: dict[int, Work] = field(default_factory=dict)  # by number, in order
    reading: dict[int, Work] = field(default_factory=dict)  # by data shard; the first is next
    read: dict[int, Work] = field(default_factory=dict)  # by data shard; not in a slot yet
    running: dict[int, Work] = field(default_factory=dict)  # by slot
    ahead: Ahead | None = None  # the decode step under way, or the first tokens of `read`
    budget: int = PROMPT_CHUNK  # prompt tokens that may be read before the next decode step
    closed: bool = False  # whether process 0 has told the others that it ends
    ids: int = 0  # requests so far
    began: float = 0.0  # when the first of them came
    stats: Stats = field(default_factory=Stats)

    @property
    def model(self) -> Model:
        return self.models[0]

    @property
    def per_row(self) -> int:
        return self.slots // self.rows


def capacity_for(need: int, limit: int) -> int:
    """Returns the smallest power of two that is at least `need` and 512; or `limit`, if that is
    less. Powers of two let prompts of many lengths share compiled programs."""
    return min(limit, max(512, 1 << (need - 1).bit_length()))


def start_session(
    model: Model,
    slots: int,
    capacity: int,
    dtype: DTypeLike | None = None,
    *,
    keep: int = 0,
    keep_host: float = 0.0,
    reuse_multiple: int = PROMPT_CHUNK,
    draft: Model | str | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    logprobs: bool = False,
) -> Session:
    """Allocates `slots` slots of `capacity` positions on the model's mesh; ValueError if not.

    Args:
      dtype: of the cache; by default that of `cache_dtype`.
      keep: the memory of so many further slots keeps the texts of requests that have ended, for
        prompts that begin alike.
      keep_host: gigabytes of host memory for texts that have no room there.
      reuse_multiple: beginnings of prompts are reused in multiples of this. With the default, a
        prompt is read in the same chunks whatever came before, so its reply does not depend on
        that, not even by a rounding error. A conversation passes 1, which also reuses replies.
      draft: where drafts come from: a smaller model on the same mesh, or "lookup", in the text.
      draft_tokens: how many tokens are drafted at once.
      logprobs: whether requests may ask for log-probabilities.
    """
    if model.weights is None:
        raise ValueError("the model has no weights: call load, or read_weights")
    models, mesh, rows = [model], model.mesh, model.mesh.shape[DATA]
    least = dict(slots=1, capacity=1, keep=0, reuse_multiple=1, draft_tokens=1)
    given = (slots, capacity, keep, reuse_multiple, draft_tokens)
    for (name, n), value in zip(least.items(), given, strict=True):
        if not isinstance(value, Integral) or value < n:
            raise ValueError(f"{name} must be an integer of at least {n}, got {value!r}")
    if slots % rows:
        raise ValueError(f"{slots} slots cannot be split evenly over data={rows}")
    if capacity > (limit := model.config.max_position_embeddings):
        raise ValueError(f"a slot has 1 to {limit} positions, the model's context, not {capacity}")
    if not 0 <= keep_host < math.inf:
        raise ValueError(f"keep_host must be finite and at least 0, got {keep_host}")
    if isinstance(draft, Model):
        check_fits(model, draft)
        models.append(draft)
    elif draft not in (None, "lookup"):
        raise ValueError(f"draft {draft!r} is neither a model nor lookup")
    dtype = cache_dtype(model.dtype, model.on_cpu) if dtype is None else jnp.dtype(dtype)

    def states(count: int) -> list[Any]:
        return [init_state(m.module, m.config, count, capacity, dtype, mesh) for m in models]

    prompts = states(rows)
    publish((prompts[0].token_B, None), mesh)  # compiles it before anything is timed
    caches = jax.eval_shape(lambda: [state.cache for state in prompts])
    if any(map(is_recurrent, caches)) and draft is not None and draft_tokens >= PENDING:
        raise ValueError(f"with recurrent layers at most {PENDING - 1} tokens are drafted at once")
    slot = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches)) // rows
    by_shard, shape = NamedSharding(mesh, P(DATA)), (slots, capacity + 1)
    text_BS = None if draft is None else jnp.zeros(shape, jnp.int32, device=by_shard)
    return Session(
        models=models,
        slots=slots,
        capacity=capacity,
        rows=rows,
        by_shard=by_shard,
        reuse_multiple=reuse_multiple,
        states=states(slots),
        prompts=prompts,
        room={KEPT: keep * slot // rows, HOST: int(keep_host * 1e9) // rows},
        text_BS=text_BS,
        draft_tokens=draft_tokens,
        logprobs=logprobs,
        prefixes=[Prefixes(partial(usable, caches, reuse_multiple)) for _ in range(rows)],
    )


def usable(caches: Sequence[Any], multiple: int, text: Text, n: int) -> int:
    """How many of the first n tokens of a text another one can start from: a multiple of
    `multiple`. It is 0 if a layer with a window or a chunk may have overwritten what is needed. A
    recurrent layer continues only from where its state stands."""
    if any(map(is_recurrent, caches)):
        return text.state_at if text.state_at <= n else 0
    # Padding and drafts may have written fewer positions than a chunk has, behind the text.
    n, end = n // multiple * multiple, text.written + PROMPT_CHUNK
    return n if all(n >= shortest_beginning(cache, end) for cache in caches) else 0


def check_request(request: Request, capacity: int, config: Any, name: str = "the prompt") -> None:
    """ValueError if a model with this config cannot serve a request in `capacity` positions."""
    if not isinstance(request, Request):
        raise TypeError(f"this is no Request: {str(request)[:80]}")
    if not isinstance(request.grammar, str | None) or not isinstance(request.cache_salt, str):
        raise TypeError("grammar and cache_salt must be texts")
    limit, vocab_size = config.max_position_embeddings, config.vocab_size
    try:
        ids = *request.prompt, *request.stop_ids
        biases = dict(request.logit_bias)
        [index(x) for x in (*ids, *biases, request.max_new_tokens, request.logprobs or 0)]
    except TypeError:
        names = f"{name}, stop_ids, max_new_tokens, logprobs and the ids of logit_bias"
        raise ValueError(f"{names} must be whole numbers") from None
    if isinstance(request.prompt, str | bytes | Mapping | Set):
        raise ValueError(f"{name} must be a list of ids, not {type(request.prompt).__name__}")
    stop = request.stop
    if not isinstance(stop, list | tuple) or not all(isinstance(x, str) and x for x in stop):
        raise ValueError(f"stop must be a list of texts, none of them empty, not {stop!r}")
    if len(request.prompt) == 0:
        raise ValueError(f"{name} is empty")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
    if (n := len(request.prompt)) > limit:
        raise ValueError(f"{name} has {n} tokens, but the model's context has {limit}")
    if n > capacity:
        raise ValueError(f"{name} has {n} tokens, over the cache's {capacity} (see --max-len)")
    if wrong := [i for i in request.prompt if not 0 <= i < vocab_size]:
        raise ValueError(f"{name} has an id that is not in [0, {vocab_size}): {wrong[0]}")
    if request.logprobs is not None and not 0 <= request.logprobs <= LIKELIEST:
        raise ValueError(f"logprobs must be in [0, {LIKELIEST}], got {request.logprobs}")
    for name in (*PARAMETERS, *PENALTIES):
        check(name, getattr(request, name))
    if len(biases) > BIASES:
        raise ValueError(f"logit_bias has more than {BIASES} tokens")
    for i, bias in biases.items():
        if not 0 <= i < vocab_size or not -100 <= bias <= 100:
            what = f"ids in [0, {vocab_size}) and numbers in [-100, 100]"
            raise ValueError(f"logit_bias must have {what}, got {i}: {bias}")


compilations = 0  # programs that XLA compiled in this process


def _count_compilation(event: str, duration_secs: float, **_: Any) -> None:
    global compilations
    if event.endswith("backend_compile_duration"):
        compilations += 1


jax.monitoring.register_event_duration_secs_listener(_count_compilation)


@contextlib.contextmanager
def timed(stats: Stats, phase: str) -> Iterator[None]:
    """Adds its body's seconds to the field `phase` of `stats`; to `compile_s` if it compiled."""
    began, before = time.perf_counter(), compilations
    yield
    phase = phase if compilations == before else "compile_s"
    setattr(stats, phase, getattr(stats, phase) + time.perf_counter() - began)


@partial(jax.jit, static_argnames="mesh")
def publish(x: Any, mesh: Mesh) -> Any:
    """A copy of arrays that every process can read, and that no donation ends."""
    return jax.lax.with_sharding_constraint(jax.tree.map(jnp.copy, x), NamedSharding(mesh, P()))
