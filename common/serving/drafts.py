"""Drafts and scores for any model: `with_drafts` replaces the module of a model file by one whose
`generate` verifies drafted tokens, and which may score the tokens that it takes.

Drafts come from the text itself (`lookup`), or from a smaller model, whose cache is then a further
part of every slot: it is read, copied and kept with the layers of the model.
"""

from dataclasses import dataclass, field
from functools import partial
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from common.cache import copy_slots
from common.kernels.dispatch import AUTO
from common.sampling import Sampling, Scores
from common.serving.load import Model
from common.serving.score import extend_scored
from common.sharding import DATA, UNSPLIT, P, Shards
from common.speculate import NO_TOKEN, counting, lookup
from common.speculate import generate as verify

Array = jax.Array


class Parts(NamedTuple):
    """What is put together: all that is known before a program is compiled."""

    main: ModuleType
    layers: int  # of the model, whose caches come before those of the draft model
    draft: ModuleType | None = None
    draft_config: Any = None
    K: int = 0  # drafts per step
    likeliest: int | None = None  # how many tokens are scored beside the one taken; None: no scores


class DecodeState(NamedTuple):
    """The state of a model file, and what drafts and scores need."""

    cache: tuple[Any, ...]
    length_B: Array
    token_B: Array
    sampling: Sampling
    text_BS: Array  # int32: the tokens of each slot; the newest is at length_B
    new_BT: Array  # int32 [B, K + 1]: the tokens of the last step, then NO_TOKEN
    scored_B: Array | None  # bool: whether a slot's tokens are wanted with scores
    scores: Scores | None  # of new_BT


def state_spec(parts: Parts, layers: int) -> DecodeState:
    """Partition specs, for a cache of so many layers in all."""
    main = (parts.main.STATE_SPEC.cache,) * parts.layers
    more = () if parts.draft is None else (parts.draft.STATE_SPEC.cache,) * (layers - parts.layers)
    scored = None if parts.likeliest is None else P(DATA)
    return DecodeState(
        cache=(*main, *more),
        length_B=P(DATA),
        token_B=P(DATA),
        sampling=P(DATA),
        text_BS=P(DATA),
        new_BT=P(DATA),
        scored_B=scored,
        scores=scored,
    )


def set_tokens(text_BS: Array, tokens_BT: Array, start_B: Array) -> Array:
    """Writes tokens of each slot from start_B on; those that do not fit are dropped."""
    at_BT = start_B[:, None] + jnp.arange(tokens_BT.shape[1])
    return text_BS.at[jnp.arange(len(text_BS))[:, None], at_BT].set(tokens_BT, mode="drop")


class Weights(NamedTuple):
    main: Any
    draft: Any  # None without a draft model


def init_state(
    config: Any,
    slots: int,
    capacity: int,
    dtype: DTypeLike,
    shards: Shards = UNSPLIT,
    *,
    parts: Parts,
) -> DecodeState:
    main = parts.main.init_state(config, slots, capacity, dtype, shards)
    more: Any = ()
    if parts.draft is not None:
        more = parts.draft.init_state(parts.draft_config, slots, capacity, dtype, shards).cache
    scored_B = scored = None
    if (n := parts.likeliest) is not None:
        T = parts.K + 1
        shapes = ((slots, T), jnp.float32), ((slots, T, n), jnp.int32), ((slots, T, n), jnp.float32)
        scored_B, scored = jnp.zeros(slots, bool), Scores(*(jnp.zeros(*shape) for shape in shapes))
    text_BS = jnp.zeros((slots, capacity + 1), jnp.int32)
    new_BT = jnp.full((slots, parts.K + 1), NO_TOKEN, jnp.int32)
    known = main.length_B, main.token_B, main.sampling
    return DecodeState((*main.cache, *more), *known, text_BS, new_BT, scored_B, scored)


def part(state: DecodeState, module: ModuleType, cache: Any) -> Any:
    """The state of one of the two models."""
    return module.DecodeState(cache, state.length_B, state.token_B, state.sampling)


@partial(
    jax.jit, static_argnames=("parts", "config", "mesh", "implementation"), donate_argnames="state"
)
def prefill(
    weights: Weights,
    state: DecodeState,
    tokens_BT: Array,
    count_B: Array,
    next_BT: Array | None = None,
    *,
    parts: Parts,
    config: Any,
    mesh: Mesh,
    implementation: str = AUTO,
) -> tuple[DecodeState, Scores | None]:
    """`prefill` of the model and of the draft model. With next_BT, the tokens that come after
    tokens_BT, the second result has their scores [B, T]; after the last token of a prompt it is the
    sampled one that comes."""
    own, rest = state.cache[: parts.layers], state.cache[parts.layers :]
    given, where = (tokens_BT, count_B), (mesh, implementation)
    main, scored = part(state, parts.main, own), None
    if next_BT is None:
        main = parts.main.extend(weights.main, main, *given, config, *where)
    else:
        options: Any = next_BT, parts.likeliest, config, *where
        main, scored = extend_scored(parts.main, weights.main, main, *given, *options)
    if parts.draft is not None:
        draft = part(state, parts.draft, rest)
        rest = parts.draft.extend(weights.draft, draft, *given, parts.draft_config, *where).cache
    state = state._replace(
        cache=(*main.cache, *rest),
        length_B=main.length_B,
        token_B=main.token_B,
        text_BS=set_tokens(state.text_BS, main.token_B[:, None], main.length_B),
        new_BT=counting(widen(main.token_B[:, None], parts), count_B > 0),
    )
    return state, scored


def widen(x_BT: Array, parts: Parts) -> Array:
    """[B, T, ..] padded to the K + 1 tokens that a step may produce."""
    extra = parts.K + 1 - x_BT.shape[1]
    return jnp.pad(x_BT, [(0, 0), (0, extra)] + [(0, 0)] * (x_BT.ndim - 2))


def draft_tokens(
    weights: Weights, state: DecodeState, *, parts: Parts, mesh: Mesh, implementation: str
) -> tuple[Array, Any]:
    """Returns K drafts for each slot [B, K], and the caches of the draft model.

    The draft model decodes K tokens. It appends the token before the newest once more, because its
    cache lacks that one if all drafts of the last step were right.
    """
    cache = state.cache[parts.layers :]
    if parts.draft is None:
        return lookup(state.text_BS, state.length_B, parts.K), cache
    is_on_B = (state.length_B > 0).astype(jnp.int32)
    before_B = jnp.maximum(state.length_B - 1, 0)
    before_BT = jnp.take_along_axis(state.text_BS, before_B[:, None], axis=1)
    draft = part(state, parts.draft, cache)._replace(length_B=before_B)
    tokens_BT, drafts = jnp.concatenate([before_BT, state.token_B[:, None]], axis=1), []
    for _ in range(parts.K):
        count_B = is_on_B * tokens_BT.shape[1]
        given: Any = tokens_BT, count_B, parts.draft_config, mesh, implementation
        draft = parts.draft.extend(weights.draft, draft, *given)
        tokens_BT = draft.token_B[:, None]
        drafts.append(tokens_BT)
    return jnp.concatenate(drafts, axis=1), draft.cache


@partial(
    jax.jit,
    static_argnames=("parts", "config", "mesh", "implementation", "drafting"),
    donate_argnames="state",
)
def generate(
    weights: Weights,
    state: DecodeState,
    *,
    parts: Parts,
    config: Any,
    mesh: Mesh,
    implementation: str = AUTO,
    drafting: bool = True,
) -> DecodeState:
    """Appends the newest token of each slot and those of its drafts that are right. Without
    `drafting`, the newest token alone."""
    static: Any = dict(mesh=mesh, implementation=implementation)
    draft_BK, rest = jnp.zeros((len(state.token_B), 0), jnp.int32), state.cache[parts.layers :]
    if drafting and parts.K:
        draft_BK, rest = draft_tokens(weights, state, parts=parts, **static)
    main = part(state, parts.main, state.cache[: parts.layers])
    given: Any = main, draft_BK, state.scored_B
    likeliest = parts.likeliest or 0
    main, new_BT, count_B, scored = verify(
        parts.main, weights.main, *given, config=config, **static, likeliest=likeliest
    )
    return state._replace(
        cache=(*main.cache, *rest),
        length_B=main.length_B,
        token_B=main.token_B,
        text_BS=set_tokens(state.text_BS, new_BT, state.length_B + 1),
        new_BT=counting(widen(new_BT, parts), count_B),
        scores=jax.tree.map(partial(widen, parts=parts), scored),
    )


PROBE = 5  # steps for which the slower way is tried
REST = 16  # steps of the faster way between two tries; doubled each time, up to 8 times this


@dataclass
class Gain:
    """Which of two ways is faster: steps with drafts or steps without them."""

    drafting: bool = False
    left: int = PROBE  # steps before the next change
    rest: int = REST
    seconds: dict[bool, tuple[float, ...]] = field(default_factory=lambda: {False: (), True: ()})
    tokens: float = 1.0  # that a step with drafts gives each slot, smoothed


def measure(gain: Gain, drafted: bool, seconds: float, tokens: float) -> None:
    """Takes in one step, which gave each slot so many tokens, and decides about the next ones."""
    gain.seconds[drafted] = (*gain.seconds[drafted][1 - PROBE :], seconds)
    gain.tokens += 0.2 * (tokens - gain.tokens) if drafted else 0
    gain.left -= 1
    if gain.left > 0:
        return
    without, drafting = (median(gain.seconds[x] or (0.0,)) for x in (False, True))
    pays = gain.tokens * without > drafting
    if gain.drafting == pays or not drafting:  # the other way is tried
        gain.drafting, gain.left = not gain.drafting, PROBE
    else:
        gain.drafting, gain.left, gain.rest = pays, gain.rest, min(2 * gain.rest, 8 * REST)


def with_drafts(
    model: Model, draft: Model | None = None, K: int = 0, likeliest: int | None = None
) -> Model:
    """The model with a module of the same names, for a session. Each step verifies K drafts of the
    model `draft`, or of `lookup`. It scores tokens, and that many of the likeliest, for requests
    that want it, unless `likeliest` is None. ValueError if the models do not fit together."""
    layers = layers_of(model)
    parts = Parts(model.module, layers, K=K, likeliest=likeliest)
    if draft is not None:
        check_fits(model, draft)
        parts = parts._replace(draft=draft.module, draft_config=draft.config)
        layers += layers_of(draft)
    spec, static = state_spec(parts, layers), dict[str, Any](parts=parts)
    module: Any = SimpleNamespace(
        STATE_SPEC=spec,
        init_state=partial(init_state, **static),
        prefill=partial(prefill, **static),
        insert=partial(copy_slots, specs=spec),
        generate=partial(generate, **static),
        parts=parts,
    )
    return model._replace(module=module, weights=Weights(model.weights, draft and draft.weights))


def layers_of(model: Model) -> int:
    """The number of caches in a slot of a model."""
    make = partial(model.module.init_state, model.config, 1, 1, jnp.float32)
    return len(jax.eval_shape(make).cache)


def check_fits(model: Model, draft: Model) -> None:
    """ValueError if a model cannot draft for another one."""
    if model.mesh != draft.mesh:
        raise ValueError("the draft model must be on the mesh of the model")
    main, other = (m.tokenizer and m.tokenizer.backend.get_vocab() for m in (model, draft))
    same = main == other if main and other else model.config.vocab_size == draft.config.vocab_size
    if not same:
        raise ValueError("the draft model has another vocabulary than the model")
