"""Runs llama.cpp in `benchmarks.generate`, to show what a CPU can do with code written for it.

Its models are GGUF files. `write_gguf` makes them from a checkpoint or from random weights, through
transformers. Needs the packages llama-cpp-python (its source package builds for the CPU at hand),
gguf, torch and transformers.

    python -m benchmarks.llamacpp SPEC.json FILE.gguf
"""

import ctypes
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.worker import PROMPT, Task, cores, peak_memory, prompt_ids

ARCHITECTURES = dict(llama="llama", qwen3="qwen3", qwen3_moe="qwen3moe", gpt2="gpt2")
TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}  # llama.cpp's names of these types
READ_AT_ONCE = 512  # prompt tokens per call: llama.cpp's default
QUANTISED = ("Q8_0", "Q4_0", "Q4_K_M")  # what people use of its types


def perplexities(file: Path, windows: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yields the name and the perplexity of each type of QUANTISED, over windows [n, T] of which
    the first token is not scored. llama.cpp quantises `file`, a GGUF file in float32."""
    import llama_cpp

    for name in QUANTISED:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / f"{name}.gguf"
            options = llama_cpp.llama_model_quantize_default_params()
            options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
            paths = str(file).encode(), str(made).encode()
            if llama_cpp.llama_model_quantize(*paths, ctypes.byref(options)):
                raise ValueError(f"llama.cpp cannot quantise {file} to {name}")
            size = dict(n_ctx=windows.shape[1], n_batch=windows.shape[1], n_ubatch=windows.shape[1])
            llm = llama_cpp.Llama(str(made), **size, logits_all=True, verbose=False)
            total = 0.0
            for window in windows:
                llm.reset()
                llm.eval(window.tolist())
                scores = np.asarray(llm.scores[: len(window) - 1], np.float64)
                chosen = np.take_along_axis(scores, window[1:, None], 1)[:, 0]
                largest = scores.max(1)
                total += (largest + np.log(np.exp(scores - largest[:, None]).sum(1)) - chosen).sum()
            yield name, math.exp(total / (windows.shape[0] * (windows.shape[1] - 1)))


def write_gguf(spec: dict[str, Any], file: Path) -> None:
    """Writes a GGUF file without a tokenizer, which is not measured. Raises ValueError if the
    architecture is not in ARCHITECTURES."""
    import gguf
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = spec["shape"]["model_type"]
    if kind not in ARCHITECTURES:
        raise ValueError(f"llama.cpp is measured for {', '.join(ARCHITECTURES)}, not for {kind}")
    if spec["random"]:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec["shape"]))
    else:
        model = AutoModelForCausalLM.from_pretrained(spec["ckpt"])
    c, architecture = model.config, ARCHITECTURES[kind]
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    out = gguf.GGUFWriter(str(file), architecture)
    out.add_tokenizer_model("no_vocab")
    out.add_vocab_size(c.vocab_size)
    out.add_block_count(c.num_hidden_layers)
    out.add_context_length(c.max_position_embeddings)
    out.add_embedding_length(c.hidden_size)
    out.add_head_count(c.num_attention_heads)
    if kind == "gpt2":
        out.add_feed_forward_length(c.n_inner or 4 * c.hidden_size)
        out.add_layer_norm_eps(c.layer_norm_epsilon)
    else:
        out.add_feed_forward_length(c.intermediate_size)
        out.add_head_count_kv(c.num_key_value_heads)
        out.add_layer_norm_rms_eps(c.rms_norm_eps)
        out.add_rope_freq_base(c.rope_parameters["rope_theta"])
        out.add_rope_dimension_count(head)
        out.add_key_length(head)
        out.add_value_length(head)
    if kind == "qwen3_moe":
        out.add_expert_count(c.num_experts)
        out.add_expert_used_count(c.num_experts_per_tok)
        out.add_expert_feed_forward_length(c.moe_intermediate_size)
    names = gguf.get_tensor_name_map(
        {name: which for which, name in gguf.MODEL_ARCH_NAMES.items()}[architecture],
        c.num_hidden_layers,
    )
    stored = gguf.GGMLQuantizationType[TYPES[spec["quant"] or spec["dtype"]]]
    for name, x in published(model):
        as_is = x.ndim == 1 or name == "transformer.wpe.weight"
        used = gguf.GGMLQuantizationType.F32 if as_is else stored
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ValueError(f"llama.cpp has no name for {name}")
        out.add_tensor(theirs, gguf.quantize(x, used), raw_dtype=used)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def published(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields float32 tensors under their published names, with llama.cpp's order of rows and
    columns."""
    tied = model.config.tie_word_embeddings
    heads = dict(q_proj=model.config.num_attention_heads)
    heads |= dict(k_proj=getattr(model.config, "num_key_value_heads", None))
    for name, weight in model.state_dict().items():
        x, module = weight.float().numpy(), name.split(".")[-2]
        if name == "lm_head.weight" and tied:
            continue
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(x, 2, axis=1), strict=True):
                yield f"{name.replace('gate_up', part)}.weight", half
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", x
        elif model.config.model_type == "gpt2" and x.ndim == 2 and ".h." in name:
            yield name, x.T  # published as [in, out]
        elif model.config.model_type == "llama" and module in heads:
            # llama.cpp rotates pairs of neighbours; the published order pairs the halves of a head.
            split = x.reshape(heads[module], 2, -1, x.shape[1])
            yield name, split.swapaxes(1, 2).reshape(x.shape)
        else:
            yield name, x


def run(context: Any, ids: Sequence[int], at: Sequence[int], slots: Sequence[int]) -> list[int]:
    """Appends tokens to slots. Returns the greedy token after the last one of each slot."""
    import llama_cpp as lib

    vocab = lib.llama_model_get_vocab(lib.llama_get_model(context))
    vocab_size, last = lib.llama_vocab_n_tokens(vocab), {slot: i for i, slot in enumerate(slots)}
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, (token, position, slot) in enumerate(zip(ids, at, slots, strict=True)):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, i == last[slot]
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, slot
    if lib.llama_decode(context, batch):
        raise ValueError("llama.cpp's llama_decode failed")
    rows = (lib.llama_get_logits_ith(context, i) for i in last.values())
    tokens = [int(np.ctypeslib.as_array(row, (vocab_size,)).argmax()) for row in rows]
    lib.llama_batch_free(batch)
    return tokens


def read(context: Any, ids: Sequence[int], slot: int) -> int:
    """Reads a prompt into a slot. Returns the greedy token after it."""
    for start in range(0, len(ids), READ_AT_ONCE):
        part = ids[start : start + READ_AT_ONCE]
        (token,) = run(context, part, range(start, start + len(part)), [slot] * len(part))
    return token


def tasks_of(spec: dict[str, Any]) -> tuple[dict[str, Task], dict[str, Any]]:
    """Loads the file spec["gguf"]. Returns the tasks, and facts about the model."""
    import llama_cpp as lib

    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    began = time.perf_counter()
    options = lib.llama_model_default_params()
    options.use_extra_bufts = not spec["quant"]  # its 8-bit products for AMX may crash in a VM
    model = lib.llama_model_load_from_file(spec["gguf"].encode(), options)
    if not model:
        raise ValueError(f"llama.cpp cannot load {spec['gguf']}")
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    contexts: dict[tuple[int, int], Any] = {}
    load_s = time.perf_counter() - began

    def context_for(batch: int, tokens: int) -> Any:
        if (batch, tokens) not in contexts:
            options = lib.llama_context_default_params()
            options.n_ctx, options.n_seq_max = batch * tokens, batch
            options.n_batch = options.n_ubatch = READ_AT_ONCE
            options.n_threads = options.n_threads_batch = cores()
            contexts[batch, tokens] = lib.llama_init_from_model(model, options)
        context = contexts[batch, tokens]
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        return context

    def prefill(tokens: int, seed: int, prompts: int = 2) -> dict[str, Any]:
        for i in range(prompts):
            ids, context = prompt_ids(seed + i, tokens, vocab_size), context_for(1, tokens + 1)
            began = time.perf_counter()
            read(context, ids, 0)
        return {"seconds": time.perf_counter() - began}

    def decode(batch: int, steps: int, seed: int) -> dict[str, Any]:
        context = context_for(batch, PROMPT + steps + 2)
        prompts = [prompt_ids(seed + i, PROMPT, vocab_size) for i in range(batch)]
        tokens = [read(context, ids, slot) for slot, ids in enumerate(prompts)]
        first, began = [tokens[0]], 0.0
        for i in range(steps + 1):
            tokens = run(context, tokens, [PROMPT + i] * batch, range(batch))
            first.append(tokens[0])
            began = began or time.perf_counter()  # after the first step
        return {"seconds": time.perf_counter() - began, "tokens": first}

    tasks: dict[str, Task] = dict(prefill=prefill, decode=decode, memory=peak_memory)
    limit = lib.llama_model_n_ctx_train(model)
    return tasks, {"load_s": load_s, "platform": "cpu", "context": limit}


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def quiet(level: int, text: bytes, data: int) -> None:
    if level == 4:  # an error
        sys.stderr.write(text.decode(errors="replace"))


if __name__ == "__main__":
    write_gguf(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
