"""Runs transformers in `benchmarks.generate`."""

import functools
import time
from typing import Any

from benchmarks.worker import (
    MAX_SLOTS,
    PROMPT,
    Task,
    cores,
    median_seconds,
    peak_memory,
    prompt_ids,
    rows_of_experts,
)


def load(spec: dict[str, Any]) -> tuple[Any, float]:
    """Loads a model into transformers, on a GPU if there is one. Returns it, and how many seconds
    that took."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, began = getattr(torch, spec["dtype"]), time.perf_counter()
    if spec["random"]:
        config = AutoConfig.for_model(**spec["shape"])
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(spec["ckpt"], dtype=dtype).eval().to(device)
    return model, time.perf_counter() - began


def experts_of(model: Any) -> list[Any]:
    """The stacks of experts' matrices."""
    return [p for p in model.parameters() if p.ndim == 3]


def floor_of(model: Any, batch: int, positions: float) -> float:
    """The bytes that a step has to read, if each slot holds so many positions."""
    c, chosen = model.config, getattr(model.config, "num_experts_per_tok", 0)
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    weights = sum(p.nbytes for p in model.parameters()) - (0 if tied else embedding.nbytes)
    unread = sum(p.nbytes * (1 - chosen / len(p)) ** batch for p in experts_of(model))
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kv_heads = getattr(c, "num_key_value_heads", c.num_attention_heads)
    position = 2 * c.num_hidden_layers * kv_heads * head * embedding.dtype.itemsize
    return float(weights - unread + position * batch * positions)


def products_of(model: Any, rows: int) -> list[tuple[int, Any]]:
    """Returns, for each matrix, how many rows a step multiplies by it, and the matrix [in, out]."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head, chosen = model.get_output_embeddings(), getattr(model.config, "num_experts_per_tok", 0)
    found = [(rows, m.weight.T) for m in model.modules() if isinstance(m, nn.Linear) and m != head]
    found += [(rows, m.weight) for m in model.modules() if isinstance(m, Conv1D)]
    found.append((1 if rows > MAX_SLOTS else rows, head.weight.T))
    for stack in experts_of(model):
        sizes = rows_of_experts(rows, len(stack), chosen or 1)
        found += [(n, w.T) for n, w in zip(sizes, stack, strict=True) if n]
    return found


def tasks_of(spec: dict[str, Any]) -> tuple[dict[str, Task], dict[str, Any]]:
    """Loads a model into transformers in eager mode, as its documentation shows. Returns the tasks,
    and facts about the model."""
    import torch
    from transformers import DynamicCache, StaticCache
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(cores())
    model, load_s = load(spec)
    c, device = model.config, model.device
    static: dict[tuple[int, int], Any] = {}
    eager = model.forward
    compiled = functools.cache(lambda: torch.compile(eager, mode="reduce-overhead"))

    def start(batch: int, tokens: int, setting: str) -> Any:
        attn, cache, *more = setting.split()
        model.set_attn_implementation(attn)
        model.forward = compiled() if "compiled" in more else eager
        if more and "compiled" not in more:
            model.set_experts_implementation(more[0])
        if cache == "dynamic":
            return DynamicCache(config=c)
        key = (batch, tokens)
        if key not in static:
            static[key] = StaticCache(config=c, max_cache_len=tokens)
        static[key].reset()
        return static[key]

    def rows(batch: int, count: int, seed: int) -> Any:
        ids = [prompt_ids(seed + i, count, c.vocab_size) for i in range(batch)]
        return torch.tensor(ids, device=device)

    def step(ids: Any, cache: Any) -> Any:
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1:].argmax(-1)

    @torch.inference_mode()
    def prefill(tokens: int, seed: int, setting: str, prompts: int = 2) -> dict[str, Any]:
        for i in range(prompts):
            ids, cache = rows(1, tokens, seed + i), start(1, tokens + 1, setting)
            began = time.perf_counter()
            step(ids, cache).tolist()
        return {"seconds": time.perf_counter() - began}

    @torch.inference_mode()
    def decode(batch: int, steps: int, seed: int, setting: str) -> dict[str, Any]:
        cache = start(batch, PROMPT + steps + 2, setting)
        token = step(rows(batch, PROMPT, seed), cache)
        tokens, began = [token[0].item()], 0.0
        for _ in range(steps + 1):
            token = step(token, cache)
            tokens.append(token.tolist()[0][0])
            began = began or time.perf_counter()  # after the first step
        seconds = time.perf_counter() - began
        floor = floor_of(model, batch, PROMPT + 1.5 + steps / 2)
        return {"seconds": seconds, "bytes": floor, "tokens": tokens}

    @torch.inference_mode()
    def products(rows: int, seed: int) -> dict[str, Any]:
        matrices = products_of(model, rows)
        shapes = {(n, len(w)) for n, w in matrices}
        x = {shape: torch.randn(*shape, dtype=model.dtype, device=device) for shape in shapes}

        def multiply() -> None:
            for n, w in matrices:
                x[n, len(w)] @ w

        return median_seconds(multiply)

    tasks: dict[str, Task] = dict(prefill=prefill, decode=decode, memory=peak_memory)
    tasks |= dict(products=products)
    return tasks, {"load_s": load_s, "platform": device.type, "context": c.max_position_embeddings}
