"""The logits of every token of a text, for log-probabilities, perplexity, training and tests.
Generation computes those of the last token alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from common.kernels.dispatch import AUTO, KERNEL_FREE
from common.sharding import DATA, MODEL, P
from common.weights import specs_like


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
    """`forward` of a model file, or another function of the same arguments, on a mesh: float32
    logits [B, T, vocab_size], and the cache. Differentiable with implementation="reference"."""
    specs, cache_spec = specs_like(weights, model.weight_layout(config)), model.STATE_SPEC.cache
    run = jax.shard_map(
        partial(forward or model.forward, config=config, implementation=implementation),
        mesh=mesh,
        in_specs=(specs, cache_spec, P(DATA), P(DATA)),
        out_specs=(P(DATA, None, MODEL), cache_spec),
        check_vma=implementation in KERNEL_FREE,
    )
    logits_BTV, cache = run(weights, cache, tokens_BT, end_B)
    return jax.tree.map(lambda x: x[..., : config.vocab_size], logits_BTV), cache
