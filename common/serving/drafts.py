"""Drafts and scores for any model: `with_drafts` replaces the module of a model file by one whose
`generate` verifies drafted tokens, and which may score the tokens that it takes.

Drafts come from the text itself (`lookup`), or from a smaller model, whose cache is then a further
part of every slot: it is read, copied and kept with the layers of the model.
"""

from collections import deque
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
from common.kernels.dispatch import AUTO, KERNEL_FREE
from common.sampling import Sampling, Scores, sample, scores
from common.serving.load import Model
from common.sharding import DATA, MODEL, UNSPLIT, P, Shards
from common.speculate import NO_TOKEN, counting, lookup
from common.speculate import generate as verify
from common.weights import specs_like

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


def extend(
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
    """`extend` of the model and of the draft model. With next_BT, the tokens that come after
    tokens_BT, the second result has their scores [B, T], for slots that want scores."""

    def run(
        weights: Weights, state: DecodeState, tokens_BT: Array, count_B: Array, next_BT: Any
    ) -> tuple[Any, ...]:
        end_B = jnp.where(count_B > 0, state.length_B + tokens_BT.shape[1], 0)
        last_B, rest = count_B - 1, state.cache[parts.layers :]
        if parts.draft is not None:
            given: Any = tokens_BT, end_B, parts.draft_config, implementation, last_B
            _, rest = parts.draft.forward(weights.draft, rest, *given)
        own, given = state.cache[: parts.layers], (tokens_BT, end_B, config, implementation)
        last = last_B if next_BT is None else None
        logits, cache = parts.main.forward(weights.main, own, *given, last)
        logits_BV = logits if next_BT is None else logits[jnp.arange(len(last_B)), last_B]
        length_B = state.length_B + count_B
        token_B = sample(logits_BV, state.sampling, length_B, config.vocab_size, MODEL)
        of_next = of_token = None
        if parts.likeliest is not None:
            options: Any = state.scored_B, parts.likeliest, config.vocab_size, MODEL
            of_token = scores(logits_BV[:, None], token_B[:, None], *options)
            of_next = None if next_BT is None else scores(logits, next_BT, *options)
        return (*cache, *rest), length_B, token_B, of_token, of_next

    spec, check = state_spec(parts, len(state.cache)), implementation in KERNEL_FREE
    of_weights = weight_specs(weights, config, parts)
    in_specs = of_weights, spec, *(P(DATA),) * 3
    out_specs = spec.cache, *(P(DATA),) * 4
    run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check)
    cache, length_B, token_B, of_token, of_next = run(weights, state, tokens_BT, count_B, next_BT)
    is_on_B = count_B > 0
    token_B = jnp.where(is_on_B, token_B, state.token_B)
    state = state._replace(
        cache=cache,
        length_B=length_B,
        token_B=token_B,
        text_BS=set_tokens(state.text_BS, token_B[:, None], length_B),
        new_BT=counting(widen(token_B[:, None], parts), is_on_B),
        scores=jax.tree.map(partial(widen, parts=parts), of_token),
    )
    return state, of_next


def weight_specs(weights: Weights, config: Any, parts: Parts) -> Weights:
    main = specs_like(weights.main, parts.main.weight_layout(config))
    if parts.draft is None:
        return Weights(main, None)
    return Weights(main, specs_like(weights.draft, parts.draft.weight_layout(parts.draft_config)))


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
    before_B = jnp.take_along_axis(
        state.text_BS, jnp.maximum(state.length_B - 1, 0)[:, None], axis=1
    )
    draft = parts.draft.DecodeState(
        cache, jnp.maximum(state.length_B - 1, 0), state.token_B, state.sampling
    )
    tokens_BT, drafts = jnp.concatenate([before_B, state.token_B[:, None]], axis=1), []
    for _ in range(parts.K):
        count_B = is_on_B * tokens_BT.shape[1]
        given: Any = tokens_BT, count_B, parts.draft_config, mesh, implementation
        draft = parts.draft.extend(weights.draft, draft, *given)
        tokens_BT = draft.token_B[:, None]
        drafts.append(tokens_BT)
    return jnp.concatenate(drafts, axis=1), draft.cache


STATIC = ("parts", "config", "mesh", "implementation")
prefill = jax.jit(extend, static_argnames=STATIC, donate_argnames="state")


@partial(jax.jit, static_argnames=(*STATIC, "drafting"), donate_argnames="state")
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
    main = parts.main.DecodeState(state.cache[: parts.layers], *state[1:4])
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


PROBE = 5  # steps with drafts, or without, before they are compared
REST = 16  # steps without drafts when they did not pay; doubled each time, up to 8 times this
CLOSE = 1.5  # a gain below which steps without drafts are measured again after 8 * REST steps


@dataclass
class Gain:
    """Measures whether drafts pay: by the seconds of a step with and without them, and by the
    tokens that a step with drafts gives each slot."""

    drafting: bool = False  # the first steps measure what a step without drafts takes
    left: int = PROBE  # steps before the next decision
    rest: int = REST
    since: int = 0  # steps since the last one without drafts
    seconds: dict[bool, deque[float]] = field(
        default_factory=lambda: {x: deque(maxlen=PROBE) for x in (False, True)}
    )
    tokens: float = 1.0  # smoothed

    @property
    def ratio(self) -> float:
        """How many times as fast as without drafts the text comes."""
        without, drafting = (median(self.seconds[x]) for x in (False, True))
        return self.tokens * without / drafting


def try_again(gain: Gain) -> None:
    """Gives drafts another chance, because a new text begins."""
    gain.left, gain.rest = min(gain.left, PROBE), REST


def measure(gain: Gain, drafted: bool, seconds: float, tokens: float) -> None:
    """Takes in one step, which gave each slot so many tokens, and decides about the next ones."""
    gain.seconds[drafted].append(seconds)
    gain.since = gain.since + 1 if drafted else 0
    if drafted:
        gain.tokens += 0.2 * (tokens - gain.tokens)
    gain.left -= 1
    if gain.left > 0 or drafted != gain.drafting:
        return
    if not drafted:
        gain.drafting, gain.left = True, PROBE
    elif gain.ratio < 1:
        gain.drafting, gain.left, gain.rest = False, gain.rest, min(2 * gain.rest, 8 * REST)
    elif gain.ratio < CLOSE and gain.since > 8 * REST:
        gain.drafting, gain.left, gain.rest = False, PROBE, REST
    else:
        gain.rest = REST


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
        prefill=lambda *args, **given: prefill(*args, **static, **given)[0],
        prefill_scored=partial(prefill, **static),
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
