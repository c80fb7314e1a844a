"""This library, as its command line sets it up, in `benchmarks.generate`."""

import contextlib
import importlib
import time
from typing import Any

from benchmarks.worker import PROMPT, Task, peak_memory, prompt_ids
from common.bandwidth import experts_read, read_bandwidth, step_bytes
from common.environment import configure_jax
from common.load import load
from common.serve import Request, Session, cache_dtype, capacity_for, serve, start_session


def tasks_of(spec: dict[str, Any]) -> tuple[dict[str, Task], dict[str, Any]]:
    configure_jax({}, compile_cache=True, group=None)
    module, began = importlib.import_module(f"{spec['model']}.model"), time.perf_counter()
    options = dict(dtype=spec["dtype"], quant=spec["quant"], random=spec["random"])
    model = load(module, spec["ckpt"], **options)
    load_s = time.perf_counter() - began
    limit, sessions = model.config.max_position_embeddings, dict[tuple[int, int], Session]()

    def session_for(slots: int, tokens: int) -> Session:
        capacity = capacity_for(tokens, limit)
        if (slots, capacity) not in sessions:
            dtype = cache_dtype(model, spec["quant"])
            sessions[slots, capacity] = start_session(model, slots, capacity, dtype)
        return sessions[slots, capacity]

    def ids(seed: int, count: int) -> list[int]:
        return prompt_ids(seed, count, model.config.vocab_size)

    def prefill(tokens: int, seed: int) -> dict[str, Any]:
        session = session_for(1, tokens + 1)
        for i in range(2):
            began = time.perf_counter()
            for _ in serve(session, [Request(ids(seed + i, tokens), 1)]):
                pass
        return {"seconds": time.perf_counter() - began}

    def decode(batch: int, steps: int, seed: int) -> dict[str, Any]:
        session = session_for(batch, PROMPT + steps + 2)
        requests = [Request(ids(seed + i, PROMPT), steps + 2) for i in range(batch)]
        tokens: list[list[int]] = [[] for _ in requests]
        began = 0.0
        with contextlib.closing(serve(session, requests)) as events:
            for event in events:  # in turn: one of each request, after all have their first
                tokens[event.request].append(event.token)
                if event.request == batch - 1 and len(tokens[-1]) == 2:
                    began = time.perf_counter()
                if event.request == batch - 1 and len(tokens[-1]) == steps + 2:
                    break
            seconds = time.perf_counter() - began
        filled = (PROMPT + 1.5 + steps / 2) / session.capacity
        share = experts_read(model.config, batch)
        floor = step_bytes(model.weights, session.state.cache, filled, share)
        return {"seconds": seconds, "bytes": floor, "tokens": tokens[0]}

    def bandwidth() -> dict[str, float]:
        return {"bytes_per_s": read_bandwidth()}

    tasks: dict[str, Task] = dict(prefill=prefill, decode=decode, memory=peak_memory)
    platform = model.mesh.devices.flat[0].platform
    return tasks | dict(bandwidth=bandwidth), dict(load_s=load_s, platform=platform, context=limit)
