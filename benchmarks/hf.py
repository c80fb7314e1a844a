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


def tasks_of(spec: dict[str, Any]) -> tuple[dict[str, Task], dict[str, Any]]:
    """Loads a model into transformers in eager mode, as its documentation shows."""
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
    from transformers.pytorch_utils import Conv1D
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(cores())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype, began = getattr(torch, spec["dtype"]), time.perf_counter()
    if spec["random"]:
        config = AutoConfig.for_model(**spec["shape"])
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(spec["ckpt"], dtype=dtype).eval().to(device)
    load_s = time.perf_counter() - began
    c = model.config
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    weights = sum(p.nbytes for p in model.parameters()) - (0 if tied else embedding.nbytes)
    stacks = [p for p in model.parameters() if p.ndim == 3]  # experts' matrices
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kv_heads = getattr(c, "num_key_value_heads", c.num_attention_heads)
    position = 2 * c.num_hidden_layers * kv_heads * head * dtype.itemsize
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
        chosen = getattr(c, "num_experts_per_tok", 0)
        unread = sum(p.nbytes * (1 - chosen / len(p)) ** batch for p in stacks)
        floor = weights - unread + position * batch * (PROMPT + 1.5 + steps / 2)
        return {"seconds": seconds, "bytes": floor, "tokens": tokens}

    @torch.inference_mode()
    def products(rows: int, seed: int) -> dict[str, Any]:
        head, chosen = model.get_output_embeddings(), getattr(c, "num_experts_per_tok", 0) or 1
        matrices = [(rows, m.weight, False) for m in model.modules() if isinstance(m, nn.Linear)]
        matrices += [(rows, m.weight, True) for m in model.modules() if isinstance(m, Conv1D)]
        matrices = [(1 if w is head.weight and n > MAX_SLOTS else n, w, t) for n, w, t in matrices]
        for stack in stacks:
            sizes = rows_of_experts(rows, len(stack), chosen)
            matrices += [(n, w, False) for n, w in zip(sizes, stack, strict=True) if n]
        x = {
            (n, width): torch.randn(n, width, dtype=dtype, device=device)
            for n, width in {(n, w.shape[0 if t else 1]) for n, w, t in matrices}
        }

        def multiply() -> None:
            for n, w, transposed in matrices:
                x[n, w.shape[0 if transposed else 1]] @ (w if transposed else w.T)

        return median_seconds(multiply)

    tasks: dict[str, Task] = dict(prefill=prefill, decode=decode, memory=peak_memory)
    tasks |= dict(products=products)
    return tasks, {"load_s": load_s, "platform": device, "context": c.max_position_embeddings}
