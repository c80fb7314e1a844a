"""Drives a model file as a server does. At every step, every number of the state that the step must
not read is NaN."""

import functools
import importlib
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from common.cache import LayerCache
from common.kernels.dispatch import Impl
from common.loading.checkpoint import load_weights
from common.loading.files import read_json
from common.loading.stored import DTYPES, open_tensors
from common.quant import Storage
from common.sampling import sampling_params
from common.serving.score import logits
from common.serving.session import publish
from common.sharding import DATA, P, Shards, make_mesh, model_shards, parse_mesh

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
# The environment for command lines: that of the tests, without their eight devices.
FLAGS = [x for x in os.environ["XLA_FLAGS"].split() if "host_platform_device_count" not in x]
ENVIRONMENT = {**os.environ, "XLA_FLAGS": " ".join(FLAGS)}
SLOTS = 8
CAPACITY = 77  # holds the longest golden prompt and continuation; no number of devices divides it
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
    """The results of transformers for one prompt."""

    tokens: np.ndarray  # [n]
    logits: np.ndarray  # [n, V]
    greedy: np.ndarray  # [NEW], the continuation


class Request(NamedTuple):
    prompt: np.ndarray
    slot: int
    new: int
    arrive: int = 0  # how many generate steps run before it arrives
    chunks: tuple[int, ...] | None = None  # tokens per prefill; by default, full buckets
    sampling: dict[str, Any] = {}  # noqa: RUF012


def model_of(family: str) -> ModuleType:
    return importlib.import_module(f"{family}.model")


def hf_config(family: str, variant: str) -> dict[str, Any]:
    """The parsed config.json of a fixture."""
    return read_json(FIXTURES / family / variant / "config.json")


def tensors_of(family: str, variant: str) -> dict[str, np.ndarray]:
    """The tensors in the files of a fixture."""
    return {
        name: np.fromfile(x.file, DTYPES[x.dtype], math.prod(x.shape), offset=x.offset).reshape(
            x.shape
        )
        for name, x in open_tensors(FIXTURES / family / variant).items()
    }


@functools.cache
def load(
    family: str,
    variant: str,
    axes: str = "",
    dtype: str = "float32",
    storage: Storage | None = None,
) -> Engine:
    """Loads a fixture onto a mesh such as "data=2,tensor=4"."""
    model, mesh = model_of(family), make_mesh(**parse_mesh(axes))
    config = model.config_from_hf(hf_config(family, variant))
    directory = FIXTURES / family / variant
    weights = load_weights(directory, model, config, mesh, dtype, storage=storage)
    return Engine(model, config, weights, mesh, family, variant)


@functools.cache
def goldens(family: str, variant: str) -> tuple[Golden, ...]:
    """Returns the golden prompts of a fixture, the shortest first."""
    with np.load(FIXTURES / family / variant / "golden.npz") as z:
        lengths = sorted(int(name.split("_")[1]) for name in z if name.startswith("tokens_"))
        return tuple(Golden(*(z[f"{field}_{n}"] for field in Golden._fields)) for n in lengths)


def watch(monkeypatch: Any, model: ModuleType, name: str, note: Any) -> None:
    """Passes what a function of a model file returns, and its arguments, to `note`."""
    function = getattr(model, name)

    def watched(*given: Any, **static: Any) -> Any:
        result = function(*given, **static)
        note(result, *given)
        return result

    monkeypatch.setattr(model, name, watched)


def place(engine: Engine, tree: Any, specs: Any) -> Any:
    shardings = jax.tree.map(lambda spec: NamedSharding(engine.mesh, spec), specs)
    return jax.device_put(tree, shardings)


def init_state(engine: Engine, slots: int, capacity: int, dtype: Any) -> Any:
    state = engine.model.init_state(engine.config, slots, capacity, dtype, engine.shards)
    return place(engine, state, engine.model.STATE_SPEC)


@functools.partial(jax.jit, static_argnames=("spec", "mesh"), donate_argnames="cache")
def plant_nan(cache: Any, length_B: jax.Array, spec: Any, mesh: Mesh) -> Any:
    """Writes NaN, or some integer, to every position of the cache from a slot's length on. The mesh
    may split the positions."""
    split = spec[2] if len(spec) > 2 else ()

    def run(cache: Any, length_B: jax.Array) -> Any:
        def plant(x: jax.Array) -> jax.Array:
            junk = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else -113
            first = jax.lax.axis_index(split) * x.shape[2]
            stale_BS = first + jnp.arange(x.shape[2]) >= length_B[:, None]
            stale = stale_BS.reshape(x.shape[0], 1, -1, *(1,) * (x.ndim - 3))
            return jnp.where(stale, jnp.asarray(junk, x.dtype), x)

        return jax.tree.map(plant, cache)

    return jax.shard_map(run, mesh=mesh, in_specs=(spec, P(DATA)), out_specs=spec)(cache, length_B)


def spoil(engine: Engine, state: Any, length_B: Any = None) -> Any:
    """Returns the state with NaN wherever a step must not read."""
    length_B = state.length_B if length_B is None else length_B
    cache = plant_nan(state.cache, length_B, engine.model.STATE_SPEC.cache, engine.mesh)
    return state._replace(cache=cache)


def empty_cache(
    engine: Engine, rows: int, capacity: int = CAPACITY, dtype: Any = jnp.float32
) -> tuple[LayerCache, ...]:
    return spoil(engine, init_state(engine, rows, capacity, dtype)).cache


@functools.partial(
    jax.jit, static_argnames=("model", "config", "mesh", "implementation"), donate_argnames="cache"
)
def _logits(weights, cache, tokens_BT, end_B, model, config, mesh, implementation):
    static = dict(config=config, mesh=mesh, implementation=implementation)
    return logits(model, weights, cache, tokens_BT, end_B, **static)


def forward(
    engine: Engine, cache: Any, tokens_BT: Any, end_B: Any, implementation: str = Impl.AUTO
) -> Any:
    """Returns logits [B, T, V] as numpy, and the cache."""
    model, config, weights, mesh, *_ = engine
    tokens_BT, end_B = (jnp.asarray(x, jnp.int32) for x in (tokens_BT, end_B))
    logits, cache = _logits(weights, cache, tokens_BT, end_B, model, config, mesh, implementation)
    return np.asarray(publish(logits, mesh)), cache


def prefill(
    engine: Engine, request: Request, slots: int, capacity: int, bucket: int, dtype: Any
) -> Any:
    """Prefills the prompt. Returns a state to insert, the first new token, and the slot numbers
    that `insert` takes. The state has one slot per data shard; only that of the request's shard is
    filled."""
    model, config, weights, mesh, *_ = engine
    rows = mesh.shape[DATA]
    row, n = request.slot * rows // slots, len(request.prompt)
    chunks = request.chunks or (*[bucket] * (n // bucket), *([n % bucket] if n % bucket else []))
    assert sum(chunks) == n and 0 < min(chunks) <= max(chunks) <= bucket, chunks
    sampling = place(engine, sampling_params(rows, **request.sampling), P(DATA))
    state = spoil(engine, init_state(engine, rows, capacity, dtype))._replace(sampling=sampling)
    start = 0
    for i, count in enumerate(chunks):
        tokens_BT = np.full((rows, bucket), (7 * i + 3) % config.vocab_size, np.int32)
        tokens_BT[row, :count] = request.prompt[start : start + count]
        count_B = np.where(np.arange(rows) == row, count, 0).astype(np.int32)
        args = (place(engine, x, P(DATA)) for x in (tokens_BT, count_B))
        state = spoil(engine, model.prefill(weights, state, *args, config=config, mesh=mesh))
        start += count
    slot_B = np.where(np.arange(rows) == row, request.slot % (slots // rows), -1)
    return state, int(state.token_B[row]), slot_B.astype(np.int32)


def serve(
    engine: Engine,
    requests: list[Request],
    *,
    slots: int = SLOTS,
    capacity: int = CAPACITY,
    bucket: int = BUCKET,
    dtype: Any = jnp.float32,
) -> list[list[int]]:
    """Serves the requests, and returns the new tokens of each. A slot is empty until its request
    arrives, and again when the request is done."""
    model, config, weights, mesh, *_ = engine
    state = init_state(engine, slots, capacity, dtype)
    out: list[list[int]] = [[] for _ in requests]
    step = 0
    while any(len(tokens) < r.new for r, tokens in zip(requests, out, strict=True)):
        for r, tokens in zip(requests, out, strict=True):
            if r.arrive == step:
                prompt, first, slot_B = prefill(engine, r, slots, capacity, bucket, dtype)
                state = model.insert(state, prompt, slot_B, mesh=mesh)
                tokens.append(first)
        live = [r.slot for r, tokens in zip(requests, out, strict=True) if 0 < len(tokens) < r.new]
        assert len(set(live)) == len(live), "two requests in one slot"
        lengths = np.where(np.isin(np.arange(slots), live), state.length_B, 0)
        length_B = place(engine, lengths.astype(np.int32), P(DATA))
        state = spoil(engine, state._replace(length_B=length_B))
        state = model.generate(weights, state, config=config, mesh=mesh)
        token_B, length_B = np.asarray(state.token_B), np.asarray(state.length_B)
        want = np.where(np.isin(np.arange(slots), live), lengths + 1, 0)
        np.testing.assert_array_equal(length_B, want, "an empty slot grew, or a filled one did not")
        for r, tokens in zip(requests, out, strict=True):
            if 0 < len(tokens) < r.new:
                tokens.append(int(token_B[r.slot]))
        step += 1
    return out
