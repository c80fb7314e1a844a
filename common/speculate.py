"""Speculative decoding: something cheap drafts tokens, and one step of the model verifies them and
keeps those that it would have produced itself.

Leviathan et al., arXiv 2211.17192. Here a token depends on its slot's logits, parameters and
position alone (`sample`), so a draft is kept only if the model draws the same token. The text is
the same with drafts and without them, greedy or sampled, wherever the drafts come from."""

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from common.kernels.dispatch import AUTO, KERNEL_FREE
from common.recurrent import newest_steps
from common.sampling import RULES_SPEC, Rules, Sampling, Scores, count_token, ruled, sample, scores
from common.sharding import DATA, MODEL, P
from common.weights import specs_like

NO_TOKEN = -2  # stands after the tokens that a step produced, where drafts were wrong
NO_DRAFT = -3  # stands in place of a draft that there is not, and then in place of NO_TOKEN


def verify(
    logits_BTV: Array,
    draft_BK: Array,
    sampling: Sampling,
    length_B: Array,
    vocab_size: int,
    rules: Rules | None = None,
) -> tuple[Array, Array]:
    """Verifies the K drafts of each slot. Called inside `shard_map`.

    Args:
      logits_BTV: float32, of T = K + 1 tokens, which are the slot's newest token and its drafts; of
        the device's part of the vocabulary.
      length_B: the length of the slot before these T tokens.
      rules: of the first of them. A slot that has rules may have no drafts.

    Returns the T tokens [B, T] that the model produces after each of them, and how many of these
    count [B]: all up to and including the first that differs from the draft for its position.
    """
    logits = [logits_BTV[:, t] for t in range(logits_BTV.shape[1])]
    logits[0] = ruled(logits[0], rules)
    new = [sample(x, sampling, length_B + t + 1, vocab_size, MODEL) for t, x in enumerate(logits)]
    tokens_BT = jnp.stack(new, axis=1)
    right_BK = tokens_BT[:, :-1] == draft_BK
    return tokens_BT, 1 + jnp.cumprod(right_BK, axis=1).sum(axis=1).astype(jnp.int32)


def counting(new_BT: Array, count_B: Array) -> Array:
    """The first count_B tokens of each slot, with NO_TOKEN in place of the others."""
    return jnp.where(jnp.arange(new_BT.shape[1]) < count_B[:, None], new_BT, NO_TOKEN)


def lookup(text_BS: Array, length_B: Array, K: int) -> Array:
    """Prompt lookup decoding: drafts K tokens, int32 [B, K]. Finds the last earlier place in the
    slot's text that has the same three newest tokens, or else the same two. Drafts what followed
    it, repeated if that is shorter than K. NO_DRAFT if there is no such place.

    Args:
      text_BS: int32, the tokens of each slot, of which the newest is at length_B.
    """
    at_S = jnp.arange(text_BS.shape[1])

    def equal(back: int) -> Array:
        """Whether the token `back` before a position is the one `back` before the newest."""
        newest_B1 = jnp.take_along_axis(text_BS, jnp.maximum(length_B - back, 0)[:, None], axis=1)
        return jnp.roll(text_BS, back, axis=1) == newest_B1

    two_BS = equal(0) & equal(1) & (at_S < length_B[:, None])
    found_BS = (two_BS & (at_S >= 1)) * 1 + (two_BS & equal(2) & (at_S >= 2)) * len(at_S)
    best_BS = jnp.where(found_BS > 0, found_BS + at_S, 0)
    at_B = best_BS.argmax(1)
    period_B = length_B - at_B
    next_BK = at_B[:, None] + 1 + jnp.arange(K) % jnp.maximum(period_B, 1)[:, None]
    draft_BK = jnp.take_along_axis(text_BS, jnp.minimum(next_BK, len(at_S) - 1), axis=1)
    return jnp.where(best_BS.max(1)[:, None] > 0, draft_BK, NO_DRAFT)


@partial(
    jax.jit, static_argnames=("model", "config", "mesh", "implementation"), donate_argnames="state"
)
def generate(
    model: ModuleType,
    weights: Any,
    state: Any,
    draft_BK: Array,
    wanted: Array | None = None,
    rules: Rules | None = None,
    *,
    config: Any,
    mesh: Mesh,
    implementation: str = AUTO,
) -> tuple[Any, Array, Scores | None, Rules | None]:
    """`model.generate` with K drafted tokens for each slot, int32 [B, K]; K may be 0.

    Returns the state; the new tokens, int32 [B, K + 1], filled up with NO_TOKEN or NO_DRAFT; their
    scores with those of the likeliest tokens: zeros if the bool scalar `wanted` is false, None if
    it is None; and the rules, in which the new tokens count. `state` is donated. Tokens past the
    capacity are not cached, so those after them are wrong, and the caller must not take them.
    """

    def run(weights: Any, state: Any, draft_BK: Array, wanted: Array | None, rules: Any) -> Any:
        tokens_BT = jnp.concatenate([state.token_B[:, None], draft_BK], axis=1)
        length_B, is_filled = state.length_B, state.length_B > 0
        end_B = jnp.where(is_filled, length_B + tokens_BT.shape[1], 0)
        given: Any = weights, state.cache, tokens_BT, end_B, config, implementation
        logits_BTV, cache = model.forward(*given)
        known: Any = state.sampling, length_B, config.vocab_size, rules
        new_BT, count_B = verify(logits_BTV, draft_BK, *known)
        count_B = jnp.where(is_filled, count_B, 0)
        newest_B = new_BT[jnp.arange(len(new_BT)), count_B - 1]
        token_B = jnp.where(is_filled, newest_B, state.token_B)
        state = state._replace(cache=cache, length_B=length_B + count_B, token_B=token_B)
        scored = None if wanted is None else scores(logits_BTV, new_BT, wanted, config.vocab_size)
        rules = rules and count_token(rules, newest_B, is_filled)
        new_BT = counting(new_BT, count_B)
        return state, jnp.where(tokens_BT == NO_DRAFT, NO_DRAFT, new_BT), scored, rules

    spec, ruled_by = model.STATE_SPEC, rules and RULES_SPEC
    specs = specs_like(weights, model.weight_layout(config)), spec, P(DATA), P(), ruled_by
    out_specs, check = (spec, P(DATA), P(DATA), ruled_by), implementation in KERNEL_FREE
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check)
    return run(weights, state, draft_BK, wanted, rules)


@partial(
    jax.jit,
    static_argnames=("files", "mesh", "implementation", "K"),
    donate_argnames=("states", "text_BS", "rules"),
)
def decode(
    weights: Sequence[Any],
    states: Sequence[Any],
    text_BS: Array | None,
    wanted: Array | None,
    rules: Rules | None,
    is_ruled_B: Array,
    *,
    files: tuple[tuple[ModuleType, Any], ...],
    mesh: Mesh,
    implementation: str,
    K: int,
) -> tuple[list[Any], Array | None, Rules | None, Array, Scores | None]:
    """`generate` with K drafts for each slot: looked up in `text_BS`, or made by the second of two
    models. `files` has each model's file and config. Slots with rules, is_ruled_B, verify no draft.

    Returns the states, text_BS with the new tokens, the rules, the new tokens [B, K + 1], and their
    scores. If text_BS is None, there are no drafts.
    """
    (main, *rest), where = states, dict[str, Any](mesh=mesh, implementation=implementation)
    (model, config), length_B = files[0], main.length_B
    draft_BK = jnp.zeros((len(length_B), 0), jnp.int32)
    if rest:
        draft_BK, rest[0] = draft(*files[1], weights[1], rest[0], main, text_BS, K, **where)
    elif text_BS is not None:
        draft_BK = lookup(text_BS, length_B, K)
    draft_BK = jnp.where(is_ruled_B[:, None], NO_DRAFT, draft_BK)
    known: Any = weights[0], main, draft_BK, wanted, rules
    main, new_BT, scored, rules = generate(model, *known, config=config, **where)
    if text_BS is not None:
        at_BT = length_B[:, None] + 1 + jnp.arange(new_BT.shape[1])
        text_BS = text_BS.at[jnp.arange(len(text_BS))[:, None], at_BT].set(new_BT, mode="drop")
    return [main, *rest], text_BS, rules, new_BT, scored


def draft(
    model: ModuleType,
    config: Any,
    weights: Any,
    state: Any,
    main: Any,
    text_BS: Any,
    K: int,
    **where: Any,
) -> tuple[Array, Any]:
    """Decodes K tokens [B, K] after the newest of each slot of `main`, the state of another model.
    Returns this model's own state, too. The token before the newest is appended once more: the
    cache lacks it if all drafts of the last step were right. Recurrent layers can only go back to
    where their newest step began, so they take all tokens anew in each step. Behind a prompt they
    do not lack that token, and cannot go back to it."""
    recurrent, row_B = newest_steps(state.cache), jnp.arange(len(main.length_B))
    start_B, drafts = jnp.maximum(main.length_B - 1, 0), list[Array]()
    if recurrent is not None:
        start_B = jnp.maximum(start_B, recurrent)
    count_B = main.length_B + 1 - start_B
    tokens_BT = jnp.take_along_axis(text_BS, start_B[:, None] + jnp.arange(2), axis=1)
    state = state._replace(sampling=main.sampling)
    for _ in range(K):
        given = state._replace(length_B=start_B), tokens_BT, count_B * (main.length_B > 0)
        state = model.prefill(weights, *given, config=config, **where)
        drafts.append(state.token_B)
        if recurrent is None:
            start_B, tokens_BT = state.length_B, state.token_B[:, None]
            count_B = jnp.ones_like(count_B)
        else:
            tokens_BT = jnp.pad(tokens_BT, ((0, 0), (0, 1)))
            tokens_BT = tokens_BT.at[row_B, count_B].set(state.token_B)
            count_B += 1
    return jnp.stack(drafts, axis=1), state
