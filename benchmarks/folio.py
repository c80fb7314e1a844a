"""Runs this library in `benchmarks.generate`, set up as the command line sets it up."""

import contextlib
import functools
import importlib
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.worker import (
    MAX_SLOTS,
    PROMPT,
    Task,
    median_seconds,
    peak_memory,
    prompt_ids,
    rows_of_experts,
)
from common.command.environment import configure_jax
from common.kernels.ragged_dot import ragged_dot
from common.machines.bandwidth import experts_read, read_bandwidth, step_bytes
from common.products import linear
from common.quant import Mxfp4, Transposed, is_stored
from common.serving.load import Model, load
from common.serving.serve import serve
from common.serving.session import Request, Session, cache_dtype, capacity_for, start_session


def serving_tasks(model: Model, quant: str | None) -> dict[str, Task]:
    """Returns the tasks that the serving loop of a model does."""
    limit, sessions = model.config.max_position_embeddings, dict[tuple[int, int], Session]()

    def session_for(slots: int, tokens: int) -> Session:
        capacity = capacity_for(tokens, limit)
        if (slots, capacity) not in sessions:
            dtype = cache_dtype(model.dtype, model.on_cpu, quant)
            sessions[slots, capacity] = start_session(model, slots, capacity, dtype)
        return sessions[slots, capacity]

    def ids(seed: int, count: int) -> list[int]:
        return prompt_ids(seed, count, model.config.vocab_size)

    def prefill(tokens: int, seed: int, prompts: int = 2) -> dict[str, Any]:
        session = session_for(1, tokens + 1)
        for i in range(prompts):
            began = time.perf_counter()
            with contextlib.closing(serve(session, [Request(ids(seed + i, tokens), 1)])) as events:
                next(events)
                seconds = time.perf_counter() - began
        return {"seconds": seconds}

    def decode(batch: int, steps: int, seed: int) -> dict[str, Any]:
        session = session_for(batch, PROMPT + steps + 2)
        requests = [Request(ids(seed + i, PROMPT), steps + 2) for i in range(batch)]
        tokens: list[list[int]] = [[] for _ in requests]
        began = 0.0
        with contextlib.closing(serve(session, requests)) as events:
            for event in events:  # once all have a first token, requests take turns
                tokens[event.request].append(event.token)
                if event.request == batch - 1 and len(tokens[-1]) == 2:
                    began = time.perf_counter()
                if event.request == batch - 1 and len(tokens[-1]) == steps + 2:
                    break
            seconds = time.perf_counter() - began
        filled = (PROMPT + 1.5 + steps / 2) / session.capacity
        share = experts_read(model.config, batch)
        floor = step_bytes(model.weights, session.states[0].cache, filled, share)
        return {"seconds": seconds, "bytes": floor, "tokens": tokens[0]}

    return dict(prefill=prefill, decode=decode)


def tasks_of(spec: dict[str, Any]) -> tuple[dict[str, Task], dict[str, Any]]:
    configure_jax({}, processes=1)
    module, began = importlib.import_module(f"{spec['model']}.model"), time.perf_counter()
    options = dict(dtype=spec["dtype"], quant=spec["quant"])
    model = load(module, spec["ckpt"], random=spec["random"], **options)
    load_s = time.perf_counter() - began

    @functools.cache
    def without_weights() -> Task:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(spec["narrow"]))
            narrow = load(module, str(file), random=True, **options)
        return serving_tasks(narrow, spec["quant"])["decode"]

    def overhead(batch: int, steps: int, seed: int) -> dict[str, Any]:
        return without_weights()(batch, steps, seed)

    def products(rows: int, seed: int) -> dict[str, Any]:
        head = getattr(model.weights, "head", None)
        head = model.weights.embed if head is None else head
        chosen = getattr(model.config, "num_experts_per_tok", 0)
        program = jax.jit(partial(multiply_all, rows=rows, chosen=chosen))
        x = jax.random.normal(jax.random.key(seed), (rows * max(chosen, 1), 1), spec["dtype"])
        weights = model.weights.layers, head
        return median_seconds(lambda: jax.block_until_ready(program(weights, x)))

    def bandwidth() -> dict[str, float]:
        return {"bytes_per_s": read_bandwidth()}

    tasks = serving_tasks(model, spec["quant"]) | dict(memory=peak_memory)
    tasks |= dict(products=products, overhead=overhead, bandwidth=bandwidth)
    platform, context = model.mesh.devices.flat[0].platform, model.config.max_position_embeddings
    return tasks, dict(load_s=load_s, platform=platform, context=context)


def multiply_all(weights: tuple[Any, Any], x: jax.Array, *, rows: int, chosen: int) -> jax.Array:
    """Computes the products of a step of `rows` tokens, and nothing else: with the matrices of all
    layers (their names begin with w) and with the head (in a prompt, for its last token only). The
    tokens choose `chosen` experts each, evenly. x is [rows * chosen, 1], or [rows, 1] without
    experts, and is broadcast to each width.

    Each product takes a number from the one before, as in a model, so that no two run in parallel.
    """
    layers, head = weights
    y = jnp.zeros((1, 1), x.dtype)

    def wide(w: Any) -> jax.Array:
        values = jax.tree.leaves(w)[0]
        if isinstance(w, Transposed):
            values = values.swapaxes(-1, -2)
        width = values.shape[-1] * (2 if isinstance(w, Mxfp4) else 1)
        return x + jnp.full(width, 0 * y[0, 0], x.dtype)

    for path, w in jax.tree_util.tree_leaves_with_path(layers, is_leaf=is_stored):
        if getattr(path[-1], "name", "").startswith("w"):
            values = jax.tree.leaves(w)[0]
            if values.ndim == 2:
                y = linear(wide(w)[:rows], w)
            else:
                sizes = jnp.array(rows_of_experts(rows, len(values), chosen))
                y = ragged_dot(wide(w), w, sizes)
    return linear(wide(head)[: rows if rows <= MAX_SLOTS else 1], head)
