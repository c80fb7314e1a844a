"""The logits of every token, where generation wants the last one's alone: for perplexity, training
and tests."""

from functools import partial
from types import ModuleType
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from common.quant import specs_like
from common.sharding import DATA, MODEL


def logits(
    model: ModuleType,
    weights: Any,
    cache: Any,
    tokens_BT: jax.Array,
    length_B: jax.Array,
    *,
    config: Any,
    mesh: Mesh,
    implementation: str | None = None,
) -> tuple[jax.Array, Any]:
    """A model file's `forward` on a mesh: logits [B, T, vocab_size] in float32, and the cache.

    Differentiable with implementation="reference".
    """
    in_specs = (specs_like(weights, model.weight_specs(config)), model.CACHE_SPEC, P(DATA), P(DATA))
    out_specs = (P(DATA, None, MODEL), model.CACHE_SPEC)
    run = partial(model.forward, config=config, implementation=implementation)
    check = implementation in model.KERNEL_FREE
    run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check)
    logits_BTV, cache = run(weights, cache, tokens_BT, length_B)
    return logits_BTV[..., : config.vocab_size], cache
