"""Speculative decoding: something cheap drafts tokens, and one step of the model verifies them and
keeps those that it would have produced itself.

Leviathan et al., arXiv 2211.17192. Here a token depends on its slot's logits, parameters and
position alone (`sample`), so a draft is kept only if the model draws the same token. The text is
the same with drafts and without them, greedy or sampled, wherever the drafts come from."""

from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from common.kernels.dispatch import AUTO, KERNEL_FREE
from common.sampling import Sampling, sample
from common.sharding import DATA, MODEL, P
from common.weights import specs_like

Array = jax.Array


def verify(
    logits_BTV: Array,
    draft_BK: Array,
    sampling: Sampling,
    length_B: Array,
    vocab_size: int,
) -> tuple[Array, Array]:
    """Verifies the K drafts of each slot. Called inside `shard_map`.

    Args:
      logits_BTV: float32, of T = K + 1 tokens, which are the slot's newest token and its drafts; of
        the device's part of the vocabulary.
      length_B: the length of the slot before these T tokens.

    Returns the T tokens [B, T] that the model produces after each of them, and how many of these
    count [B]: all up to and including the first that differs from the draft for its position.
    """
    T = logits_BTV.shape[1]
    tokens_BT = jnp.stack(
        [sample(logits_BTV[:, t], sampling, length_B + t + 1, vocab_size, MODEL) for t in range(T)],
        axis=1,
    )
    right_BK = tokens_BT[:, :-1] == draft_BK
    return tokens_BT, 1 + jnp.cumprod(right_BK, axis=1).sum(axis=1).astype(jnp.int32)


@partial(
    jax.jit, static_argnames=("model", "config", "mesh", "implementation"), donate_argnames="state"
)
def generate(
    model: ModuleType,
    weights: Any,
    state: Any,
    draft_BK: Array,
    *,
    config: Any,
    mesh: Mesh,
    implementation: str = AUTO,
) -> tuple[Any, Array, Array]:
    """`model.generate` with K drafted tokens for each slot.

    Returns the state, and what `verify` returns: the new tokens [B, K + 1], and how many of them
    count [B], 0 in an empty slot. `state` is donated. Tokens past the capacity are not cached, so
    the tokens after them are wrong: the caller must not take tokens beyond the capacity.
    """

    def run(weights: Any, state: Any, draft_BK: Array) -> tuple[Any, Array, Array]:
        tokens_BT = jnp.concatenate([state.token_B[:, None], draft_BK], axis=1)
        is_filled = state.length_B > 0
        end_B = jnp.where(is_filled, state.length_B + tokens_BT.shape[1], 0)
        logits_BTV, cache = model.forward(
            weights, state.cache, tokens_BT, end_B, config, implementation
        )
        new_BT, count_B = verify(
            logits_BTV, draft_BK, state.sampling, state.length_B, config.vocab_size
        )
        count_B = jnp.where(is_filled, count_B, 0)
        newest_B = new_BT[jnp.arange(len(new_BT)), count_B - 1]
        state = state._replace(
            cache=cache,
            length_B=state.length_B + count_B,
            token_B=jnp.where(is_filled, newest_B, state.token_B),
        )
        return state, new_BT, count_B

    specs = specs_like(weights, model.weight_layout(config))
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(specs, model.STATE_SPEC, P(DATA)),
        out_specs=(model.STATE_SPEC, P(DATA), P(DATA)),
        check_vma=implementation in KERNEL_FREE,
    )(weights, state, draft_BK)
