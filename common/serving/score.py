"""Computes the logits of every token of a text, for log-probabilities, perplexity, training and
tests. Generation computes only the logits of the last token."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from common.kernels.dispatch import AUTO, KERNEL_FREE
from common.serving.load import Model, cache_dtype
from common.sharding import DATA, MODEL, P, model_shards
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
    """Runs `forward` of a model file, or another function of the same arguments, on a mesh. Returns
    float32 logits [B, T, vocab_size] and the cache. Differentiable with
    implementation="reference"."""
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


def log_probabilities(model: Model, ids: Sequence[int]) -> jax.Array:
    """The log-probabilities [T, vocab_size] of what may follow each of T tokens, in float32."""
    mesh, rows = model.mesh, model.mesh.shape[DATA]
    dtype, shards = cache_dtype(model.dtype, model.on_cpu), model_shards(mesh)
    make = partial(model.module.init_state, model.config, rows, len(ids), dtype, shards)
    spec = NamedSharding(mesh, model.module.STATE_SPEC.cache)
    cache = jax.jit(lambda: make().cache, out_shardings=spec)()
    tokens_BT = np.tile(np.asarray(ids, np.int32), (rows, 1))  # a slot for each data shard
    end_B = np.full(rows, len(ids), np.int32)
    static: Any = dict(config=model.config, mesh=mesh)
    scores, _ = logits(model.module, model.weights, cache, tokens_BT, end_B, **static)
    return jax.nn.log_softmax(jnp.asarray(scores[0]))
