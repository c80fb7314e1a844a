"""Compares what a model file computes on the golden prompts with the results of transformers, and
asserts properties that every model file has."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compare import assert_close
from engine import (
    CAPACITY,
    SLOTS,
    Engine,
    Request,
    empty_cache,
    forward,
    goldens,
    init_state,
    place,
    plant_nan,
    serve,
)

from common.kernels.dispatch import Impl
from common.sampling import sampling_params
from common.sharding import DATA, P, Shards
from common.weights import by_path, check_divides

ROWS = (0, 1, 3, 4, 6)  # the slots that hold the golden prompts; the others are empty


def prompts_of(engine: Engine) -> Any:
    return goldens(engine.family, engine.variant)


def prompt_logits(engine: Engine, dtype: Any = jnp.float32, implementation: str = Impl.AUTO):
    """Returns the logits [n, V] of each golden prompt. One call reads all prompts, each padded with
    other tokens to the longest."""
    prompts = prompts_of(engine)
    T = len(prompts[-1].tokens)
    tokens_BT, end_B = np.full((SLOTS, T), 5, np.int32), np.zeros(SLOTS, np.int32)
    for row, prompt in zip(ROWS, prompts, strict=True):
        tokens_BT[row, : len(prompt.tokens)], end_B[row] = prompt.tokens, T
    cache = empty_cache(engine, SLOTS, dtype=dtype)
    logits, _ = forward(engine, cache, tokens_BT, end_B, implementation)
    return [logits[row, : len(p.tokens)] for row, p in zip(ROWS, prompts, strict=True)]


def stepwise_logits(
    engine: Engine,
    dtype: Any = jnp.float32,
    implementation: str = Impl.AUTO,
    capacity: int = CAPACITY,
):
    """Returns the same logits, computed token by token. The slots start at different times; each is
    empty before it starts, and again when it is done."""
    prompts, begin = prompts_of(engine), (20, 7, 40, 13, 5)
    out: list[list[Any]] = [[] for _ in prompts]
    cache = empty_cache(engine, SLOTS, capacity, dtype)
    for step in range(max(b + len(p.tokens) for b, p in zip(begin, prompts, strict=True))):
        token_B, length_B, live = np.full(SLOTS, 9), np.zeros(SLOTS, np.int32), []
        for i, (row, prompt) in enumerate(zip(ROWS, prompts, strict=True)):
            if 0 <= (t := step - begin[i]) < len(prompt.tokens):
                token_B[row], length_B[row] = prompt.tokens[t], t + 1
                live.append((i, row))
        stale_B = jnp.maximum(length_B - 1, 0)
        cache = plant_nan(cache, stale_B, engine.model.STATE_SPEC.cache, engine.mesh)
        logits, cache = forward(engine, cache, token_B[:, None], length_B, implementation)
        for i, row in live:
            out[i].append(logits[row, 0])
    return [np.stack(x) for x in out]


def assert_golden(got: Any, engine: Engine, **bounds: float) -> None:
    for logits, prompt in zip(got, prompts_of(engine), strict=True):
        what = f"{engine.variant}, {len(prompt.tokens)} tokens"
        assert_close(logits, prompt.logits, **bounds, what=what)


def assert_greedy(engine: Engine) -> None:
    """Asserts the golden continuations through prefill in chunks, insert and generate. The prompts
    arrive one after the other, in slots of every data shard."""
    prompts, slots = prompts_of(engine), (6, 1, 4, 3, 0)
    requests = [
        Request(p.tokens, s, len(p.greedy), arrive=i)
        for i, (p, s) in enumerate(zip(prompts, slots, strict=True))
    ]
    assert serve(engine, requests) == [p.greedy.tolist() for p in prompts]


def assert_updates_in_place(engine: Engine, dtype: Any, capacity: int = 1030) -> None:
    """Asserts that `generate` aliases its cache, and copies less than one layer of it."""
    model, config = engine.model, engine.config
    state = jax.eval_shape(lambda: model.init_state(config, 4, capacity, dtype, engine.shards))
    step = model.generate.lower(engine.weights, state, config=config, mesh=engine.mesh)
    memory = step.compile().memory_analysis()
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
    per_device = cache // engine.mesh.size
    assert memory.alias_size_in_bytes >= per_device
    assert memory.temp_size_in_bytes < per_device / config.num_hidden_layers


def assert_divides(model: Any, config: Any, shards: Shards) -> None:
    """Asserts that no spec has more axes than its weight, that the devices divide every split axis,
    and that padding only enlarges a weight."""
    layout = model.weight_layout(config, shards)
    check_divides(layout, shards)
    published = by_path(model.weight_layout(config))
    for path, weight in by_path(layout).items():
        assert len(weight.spec) <= len(weight.shape), path
        assert all(a >= b for a, b in zip(weight.shape, published[path].shape, strict=True)), path


def assert_padding_never_sampled(engine: Engine) -> None:
    """Asserts that no slot samples padding, even at a temperature that makes all ids equally
    likely."""
    model, config = engine.model, engine.config
    assert model.weight_layout(config, engine.shards).embed.shape[0] > config.vocab_size
    slots, tokens = 256, prompts_of(engine)[0].tokens
    state = init_state(engine, slots, len(tokens), jnp.float32)
    hot = sampling_params(slots, [1e6] * slots, seed=list(range(slots)))
    state = state._replace(sampling=place(engine, hot, P(DATA)))
    tokens_BT, count_B = jnp.tile(tokens, (slots, 1)), jnp.full(slots, len(tokens))
    static = dict(config=config, mesh=engine.mesh)
    drawn = np.asarray(model.prefill(engine.weights, state, tokens_BT, count_B, **static).token_B)
    assert drawn.max() < config.vocab_size and len(np.unique(drawn)) > 60
