"""Computes the logits of every token of a text, for log-probabilities, perplexity, training and
tests. Generation computes only the logits of the last token."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from common.cache import APPENDED, capacity_of, real_tokens
from common.kernels.dispatch import AUTO, KERNEL_FREE
from common.sampling import RULES_SPEC, Rules, Scores, ruled, sample, scores
from common.serving.load import Model, cache_dtype, init_state
from common.sharding import DATA, MODEL, P
from common.weights import specs_like


class Score(NamedTuple):
    """`Scores` of one token: its log-probability; ids and log-probabilities of the likeliest."""

    logprob: float
    likeliest: list[tuple[int, float]]


def score_of(scores: Scores, row: int, t: int, n: int) -> Score:
    """The score of token t of a row, with n of the likeliest."""
    likeliest = scores.likeliest_BTX[row, t, :n].tolist(), scores.score_BTX[row, t, :n].tolist()
    return Score(float(scores.token_BT[row, t]), [*zip(*likeliest, strict=True)])


@partial(jax.jit, static_argnames=("model", "config", "mesh", "implementation", "forward"))
def logits(
    model: Any,
    weights: Any,
    cache: Any,
    tokens_BT: jax.Array,
    end_B: jax.Array,
    *,
    config: Any,
    mesh: Mesh,
    implementation: str = AUTO,
    forward: Callable[..., Any] | None = None,
) -> tuple[Any, Any]:
    """Runs `forward` of a model file on a mesh, or another function of the same arguments, which
    returns a device's part of the vocabulary. Returns float32 logits [B, T, vocab_size] and the
    cache. With implementation="reference" they can be differentiated.

    end_B is the length of each text after these T tokens, and padding counts: if it is less than T,
    the logits are NaN; 0 leaves a slot out. ValueError if the cache has no room for T tokens."""
    if tokens_BT.shape[1] > capacity_of(cache):
        raise ValueError(f"the cache has room for {capacity_of(cache)} tokens: see init_state")
    specs, cache_spec = specs_like(weights, model.weight_layout(config)), model.STATE_SPEC.cache
    run = jax.shard_map(
        partial(forward or model.forward, config=config, implementation=implementation),
        mesh=mesh,
        in_specs=(specs, cache_spec, P(DATA), P(DATA)),
        out_specs=(P(DATA, None, MODEL), cache_spec),
        check_vma=implementation in KERNEL_FREE,
    )
    logits_BTV, cache = run(weights, cache, tokens_BT, end_B)
    is_cut_B11 = ((end_B > 0) & (end_B < tokens_BT.shape[1]))[:, None, None]
    known = lambda x: jnp.where(is_cut_B11, jnp.nan, x[..., : config.vocab_size])
    return jax.tree.map(known, logits_BTV), cache


@partial(
    jax.jit, static_argnames=("model", "config", "mesh", "implementation"), donate_argnames="state"
)
def prefill_asked(
    model: Any,
    weights: Any,
    state: Any,
    tokens_BT: jax.Array,
    count_B: jax.Array,
    after_B: jax.Array | None = None,
    rules: Rules | None = None,
    *,
    config: Any,
    mesh: Mesh,
    implementation: str = AUTO,
) -> tuple[Any, Scores | None]:
    """`prefill` of a model file, for what requests may ask beside it: rules of the token that is
    sampled, and scores of the token that follows each of the T tokens.

    Args:
      tokens_BT, count_B: int32, as in `prefill`.
      after_B: int32, the prompt's token after the last of these; negative: the sampled one follows.

    Returns the state and `Scores`, with X = LIKELIEST. `state` is donated.
    """

    def run(
        weights: Any, state: Any, tokens_BT: Any, count_B: Any, after_B: Any, rules: Any
    ) -> Any:
        is_on_B, length_B, scored = count_B > 0, state.length_B + count_B, None
        end_B = jnp.where(is_on_B, state.length_B + tokens_BT.shape[1], 0)
        real_BT = real_tokens(tokens_BT, count_B)
        given: Any = weights, state.cache, real_BT, end_B, config, implementation
        logits, cache = model.forward(*given, count_B - 1 if after_B is None else None)
        last = jnp.arange(len(count_B)), count_B - 1
        last_BV = ruled(logits if after_B is None else logits[last], rules)
        token_B = sample(last_BV, state.sampling, length_B, config.vocab_size, MODEL)
        if after_B is not None:
            next_BT = jnp.roll(tokens_BT, -1, axis=1)
            next_BT = next_BT.at[last].set(jnp.where(after_B < 0, token_B, after_B))
            scored = scores(logits, next_BT, True, config.vocab_size)
        token_B = jnp.where(is_on_B, token_B, state.token_B)
        return state._replace(cache=cache, length_B=length_B, token_B=token_B), scored

    layout, by_slot = model.weight_layout(config), (P(DATA),) * 3
    specs = specs_like(weights, layout), model.STATE_SPEC, *by_slot, rules and RULES_SPEC
    out_specs, check = (model.STATE_SPEC, P(DATA)), implementation in KERNEL_FREE
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check)
    return run(weights, state, tokens_BT, count_B, after_B, rules)


def log_probabilities(model: Model, ids: Sequence[int]) -> jax.Array:
    """The log-probabilities [T, vocab_size] of what may follow each of T tokens, in float32.
    ValueError if there are none or too many, or one is not in the vocabulary."""
    limit, vocab_size = model.config.max_position_embeddings, model.config.vocab_size
    if (ids_T := np.asarray(ids)).ndim != 1 or (ids_T.size and ids_T.dtype.kind not in "iu"):
        raise TypeError(f"ids must be a list of whole numbers, not {ids_T.dtype}{[*ids_T.shape]}")
    if not 1 <= len(ids_T) <= limit:
        raise ValueError(f"there must be 1 to {limit} tokens, not {len(ids_T)}")
    if (wrong := ids_T[(ids_T < 0) | (ids_T >= vocab_size)]).size:
        raise ValueError(f"the id {wrong[0]} is not in [0, {vocab_size})")
    mesh, rows = model.mesh, model.mesh.shape[DATA]
    dtype = cache_dtype(model.dtype, model.on_cpu)
    cache = init_state(model.module, model.config, rows, len(ids_T), dtype, mesh).cache
    tokens_BT = np.tile(ids_T.astype(np.int32), (rows, 1))  # a slot for each data shard
    parts = list[Any]()
    for i in range(0, len(ids_T), APPENDED):  # a ring takes no more at once
        part_BT = tokens_BT[:, i : i + APPENDED]
        end_B = np.full(rows, i + part_BT.shape[1], np.int32)
        scores, cache = logits(model.module, model.weights, cache, part_BT, end_B, **model.static)
        parts.append(scores[0])
    return jax.nn.log_softmax(jnp.concatenate(parts))
