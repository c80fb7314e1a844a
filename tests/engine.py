"""Drives a model file as a server does; every number of the state that nothing may look at is NaN
at every step."""

import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from common.checkpoint import load_weights, read_config
from common.quant import Form
from common.sampling import sampling_params
from common.score import logits
from common.sharding import DATA, Shards, make_mesh, model_shards

FIXTURES = Path(__file__).parent / "fixtures"
SLOTS = 8
CAPACITY = 77  # more than the longest golden prompt and its continuation, and nothing divides it
BUCKET = 16


class Engine(NamedTuple):
    model: ModuleType
    config: Any
    weights: Any
    mesh: Mesh
    family: str
    variant: str

    @property
    def shards(self) -> Shards:
        return model_shards(self.mesh)


class Golden(NamedTuple):
    """What transformers computes for one prompt."""

    tokens: np.ndarray  # [n]
    logits: np.ndarray  # [n, V]
    greedy: np.ndarray  # its continuation


class Request(NamedTuple):
    prompt: np.ndarray
    slot: int
    new: int
    arrive: int = 0  # generate steps before it comes
    chunks: tuple[int, ...] | None = (
        None  # tokens of the prompt per prefill; full buckets unless given
    )
    sampling: dict[str, Any] = {}  # noqa: RUF012


@functools.cache
def load(
    family: str, variant: str, axes: str = "", dtype: str = "float32", form: Form | None = None
) -> Engine:
    """A fixture on a mesh such as "data=2,tensor=4"."""
    model, directory = importlib.import_module(f"{family}.model"), FIXTURES / family / variant
    mesh = make_mesh(
        **{name: int(n) for name, n in (axis.split("=") for axis in axes.split(",") if axis)}
    )
    config, shards = model.config_from_hf(read_config(directory)), model_shards(mesh)
    table, specs = model.checkpoint_table(config, shards), model.weight_specs(config)
    shapes = model.weight_shapes(config), model.weight_shapes(config, shards)
    weights = load_weights(directory, table, *shapes, specs, mesh, jnp.dtype(dtype), form=form)
    return Engine(model, config, weights, mesh, family, variant)


@functools.cache
def goldens(family: str, variant: str) -> tuple[Golden, ...]:
    """In order of length."""
    with np.load(FIXTURES / family / variant / "golden.npz") as z:
        lengths = sorted(int(name.split("_")[1]) for name in z if name.startswith("tokens_"))
        return tuple(Golden(*(z[f"{field}_{n}"] for field in Golden._fields)) for n in lengths)


def place(engine: Engine, tree: Any, specs: Any) -> Any:
    shardings = jax.tree.map(
        lambda s: NamedSharding(engine.mesh, s), specs, is_leaf=lambda x: isinstance(x, P)
    )
    return jax.device_put(tree, shardings)


@functools.partial(jax.jit, static_argnames=("spec", "mesh"), donate_argnames="cache")
def plant_nan(cache: Any, length_B: jax.Array, spec: Any, mesh: Mesh) -> Any:
    """The cache with NaN, or some integer, wherever it is not filled."""

    def run(cache: Any, length_B: jax.Array) -> Any:
        def plant(x: jax.Array) -> jax.Array:
            junk = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else -113
            stale_BS = jnp.arange(x.shape[2]) >= length_B[:, None]
            return jnp.where(
                stale_BS.reshape(x.shape[0], 1, -1, *(1,) * (x.ndim - 3)),
                jnp.asarray(junk, x.dtype),
                x,
            )

        return jax.tree.map(plant, cache)

    return jax.shard_map(run, mesh=mesh, in_specs=(spec, P(DATA)), out_specs=spec)(cache, length_B)


def empty_cache(
    engine: Engine, rows: int, capacity: int = CAPACITY, dtype: Any = jnp.float32
) -> Any:
    model, config, _, mesh, *_ = engine
    cache = place(
        engine, model.init_cache(config, rows, capacity, dtype, engine.shards), model.CACHE_SPEC
    )
    return plant_nan(cache, jnp.zeros(rows, jnp.int32), model.CACHE_SPEC, mesh)


@functools.partial(
    jax.jit, static_argnames=("model", "config", "mesh", "implementation"), donate_argnames="cache"
)
def _logits(weights, cache, tokens_BT, length_B, model, config, mesh, implementation):
    return logits(
        model,
        weights,
        cache,
        tokens_BT,
        length_B,
        config=config,
        mesh=mesh,
        implementation=implementation,
    )


def forward(
    engine: Engine, cache: Any, tokens_BT: Any, length_B: Any, implementation: str | None = None
) -> Any:
    """Logits [B, T, V] as numpy, and the cache."""
    model, config, weights, mesh, *_ = engine
    tokens_BT, length_B = (jnp.asarray(x, jnp.int32) for x in (tokens_BT, length_B))
    logits, cache = _logits(
        weights, cache, tokens_BT, length_B, model, config, mesh, implementation
    )
    return np.asarray(logits), cache


def prefill(
    engine: Engine, request: Request, slots: int, capacity: int, bucket: int, dtype: Any
) -> Any:
    """The prompt as a state to insert: one row for each data shard, of which only the slot's own is
    filled."""
    model, config, weights, mesh, *_ = engine
    rows = mesh.shape[DATA]
    row, n = request.slot * rows // slots, len(request.prompt)
    chunks = request.chunks or (*[bucket] * (n // bucket), *([n % bucket] if n % bucket else []))
    assert sum(chunks) == n and 0 < min(chunks) <= max(chunks) <= bucket, chunks
    cache = empty_cache(engine, rows, capacity, dtype)
    sampling = place(engine, sampling_params(rows, **request.sampling), P(DATA))
    start = 0
    for i, count in enumerate(chunks):
        tokens_BT = np.full((rows, bucket), (7 * i + 3) % config.vocab_size, np.int32)
        tokens_BT[row, :count] = request.prompt[start : start + count]
        at_row = np.arange(rows) == row
        start_B, count_B = (
            place(engine, (x * at_row).astype(np.int32), P(DATA)) for x in (start, count)
        )
        tokens_BT = place(engine, tokens_BT, P(DATA))
        cache, token_B = model.prefill(
            weights, cache, tokens_BT, start_B, count_B, sampling, config=config, mesh=mesh
        )
        start += count
        cache = plant_nan(cache, start_B + count_B, model.CACHE_SPEC, mesh)
    return model.DecodeState(cache, start_B + count_B, token_B, sampling), int(token_B[row]), at_row


def serve(
    engine: Engine,
    requests: list[Request],
    *,
    slots: int = SLOTS,
    capacity: int = CAPACITY,
    bucket: int = BUCKET,
    dtype: Any = jnp.float32,
) -> list[list[int]]:
    """The new tokens of each request. Slots that a request has left, or that none has reached, are
    empty."""
    model, config, weights, mesh, *_ = engine
    state = place(
        engine, model.init_state(config, slots, capacity, dtype, engine.shards), model.STATE_SPEC
    )
    out: list[list[int]] = [[] for _ in requests]
    step = 0
    while any(len(tokens) < r.new for r, tokens in zip(requests, out, strict=True)):
        for r, tokens in zip(requests, out, strict=True):
            if r.arrive == step:
                prompt, first, at_row = prefill(engine, r, slots, capacity, bucket, dtype)
                slot_B = place(engine, np.where(at_row, r.slot, -1).astype(np.int32), P(DATA))
                state = model.insert(state, prompt, slot_B, mesh=mesh)
                tokens.append(first)
        live = [r.slot for r, tokens in zip(requests, out, strict=True) if 0 < len(tokens) < r.new]
        assert len(set(live)) == len(live), "two requests in one slot"
        lengths = np.where(np.isin(np.arange(slots), live), state.length_B, 0)
        length_B = place(engine, lengths.astype(np.int32), P(DATA))
        cache = plant_nan(state.cache, length_B, model.CACHE_SPEC, mesh)
        state, token_B = model.generate(
            weights, state._replace(cache=cache, length_B=length_B), config=config, mesh=mesh
        )
        for r, tokens in zip(requests, out, strict=True):
            if 0 < len(tokens) < r.new:
                tokens.append(int(token_B[r.slot]))
        step += 1
    return out
