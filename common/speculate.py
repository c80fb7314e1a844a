"""Speculative decoding: tokens that something cheap has drafted are verified by one step of the
model, which keeps those that it would have produced itself.

Leviathan et al., arXiv 2211.17192. Here a token depends on its slot's logits, its parameters and
its position alone (`sample`), so a draft is kept if it is the very token that the model draws: the
text is the same with drafts and without, greedy or not, whatever the source of the drafts.
"""

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
    """What the model produces after each of T = K + 1 tokens, the newest one of a slot and its K
    drafts; inside `shard_map`.

    Args:
      logits_BTV: float32, of the device's part of the vocabulary.
      length_B: tokens of the slot before these T.

    Returns the tokens [B, T], and how many of them hold [B]: those up to the first that is not the
    draft in its place, which itself is one that the model has produced.
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
    """`model.generate` for slots of which the K tokens after the newest are drafted.

    Returns the state, in which the newest token is the last that holds, and what `verify` returns:
    the new tokens [B, K + 1], and how many of them hold [B], 0 in an empty slot. `state` is
    donated. Tokens that would lie past the capacity are not cached, so what follows them is wrong:
    the caller must not take tokens beyond it.
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
