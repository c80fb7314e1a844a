"""A decode step that verifies drafts, for any model. They come from the text itself (`lookup`), or
from a smaller model, which has a cache of its own in every slot."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import mean, median
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from common import speculate
from common.sampling import Scores
from common.serving.load import Model

Array = jax.Array


@partial(
    jax.jit,
    static_argnames=("modules", "configs", "mesh", "implementation", "K", "likeliest"),
    donate_argnames=("states", "text_BS"),
)
def generate(
    weights: Sequence[Any],
    states: Sequence[Any],
    text_BS: Array | None,
    wanted: Array | None,
    *,
    modules: tuple[ModuleType, ...],
    configs: tuple[Any, ...],
    mesh: Mesh,
    implementation: str,
    K: int,
    likeliest: int,
) -> tuple[list[Any], Array | None, Array, Scores | None]:
    """`speculate.generate` with K drafts for each slot. If there are two models, the second drafts.

    Args:
      text_BS: int32, the tokens of each slot, of which the newest is at its length; None if K is 0.
      wanted: whether scores are computed; None if no request may ask for them.

    Returns the states, the tokens of each slot, the new ones [B, K + 1], and their scores.
    """
    (main, *rest), where = states, dict[str, Any](mesh=mesh, implementation=implementation)
    length_B = main.length_B
    draft_BK = jnp.zeros((len(length_B), 0), jnp.int32)
    if K and rest:
        smaller = rest[0]._replace(sampling=main.sampling)
        known: Any = modules[1], weights[1], smaller, text_BS, length_B, K
        draft_BK, cache = draft(*known, config=configs[1], **where)
        rest[0] = rest[0]._replace(cache=cache)
    elif K and text_BS is not None:
        draft_BK = speculate.lookup(text_BS, length_B, K)
    known = modules[0], weights[0], main, draft_BK, wanted
    main, new_BT, scored = speculate.generate(
        *known, config=configs[0], likeliest=likeliest, **where
    )
    if text_BS is not None:
        at_BT = length_B[:, None] + 1 + jnp.arange(new_BT.shape[1])
        text_BS = text_BS.at[jnp.arange(len(text_BS))[:, None], at_BT].set(new_BT, mode="drop")
    return [main, *rest], text_BS, new_BT, scored


def draft(
    module: ModuleType,
    weights: Any,
    state: Any,
    text_BS: Any,
    length_B: Array,
    K: int,
    **where: Any,
) -> tuple[Array, Any]:
    """Decodes K tokens [B, K] after the newest of each slot, and returns the cache, too. The token
    before the newest is appended once more: the cache lacks it if all drafts of the last step were
    right."""
    before_B, drafts = jnp.maximum(length_B - 1, 0), []
    tokens_BT = jnp.take_along_axis(text_BS, before_B[:, None] + jnp.arange(2), axis=1)
    state = state._replace(length_B=before_B)
    for _ in range(K):
        count_B = jnp.where(length_B > 0, tokens_BT.shape[1], 0)
        state = module.prefill(weights, state, tokens_BT, count_B, **where)
        tokens_BT = state.token_B[:, None]
        drafts.append(tokens_BT)
    return jnp.concatenate(drafts, axis=1), state.cache


PROBE, PERIOD = 4, 256  # the slower way is tried for PROBE of PERIOD steps


def newest_steps() -> dict[bool, deque[tuple[float, float]]]:
    return {drafted: deque(maxlen=4 * PROBE) for drafted in (False, True)}


@dataclass
class Gain:
    """What the newest steps with drafts and without them gave: tokens for each slot, seconds."""

    steps: int = 0
    past: dict[bool, deque[tuple[float, float]]] = field(default_factory=newest_steps)


def pays(gain: Gain) -> bool:
    """Whether the next step should verify drafts: the way that gave more tokens per second, or now
    and then the other way, to see whether that has changed."""

    def speed(drafted: bool) -> float:
        past = gain.past[drafted]
        if len(past) < PROBE:
            return inf
        return mean(tokens for tokens, _ in past) / median(seconds for _, seconds in past)

    return (speed(True) >= speed(False)) != (gain.steps % PERIOD < PROBE)


def check_fits(model: Model, draft: Model) -> None:
    """ValueError if a model cannot draft for another one."""
    if model.mesh != draft.mesh:
        raise ValueError("the draft model must be on the mesh of the model")
    main, other = (m.tokenizer and m.tokenizer.backend.get_vocab() for m in (model, draft))
    same = main == other if main and other else model.config.vocab_size == draft.config.vocab_size
    if not same:
        raise ValueError("the draft model has another vocabulary than the model")
