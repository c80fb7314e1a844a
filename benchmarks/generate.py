"""Speed of one checkpoint on this machine, as fractions of a floor, and beside transformers.

    python -m benchmarks.generate --ckpt DIR --dtype float32 bfloat16 --against transformers

Each library lives in a process of its own, and they take turns: while one runs a round the other
waits, so both see the same machine. Both decode greedily behind a prompt that they have read, and
fetch every token; of two prompts the second is timed, as a process that waited has to get its
memory back. What is compared is the median of the rounds, with the best of transformers' settings
at each point (those four times slower than the best in an uncounted round are left out). Ours is
the serving loop that the command line runs. The floor under a decode step is the time to read the
weights and the filled cache, at the bandwidth of a large one-row product in the same run.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.bandwidth import experts_read, read_bandwidth, step_bytes
from common.environment import configure_jax
from common.load import load, read_shape
from common.serve import Request, Session, cache_dtype, capacity_for, serve, start_session

PROMPT = 128  # tokens in the cache when decoding begins
OURS, THEIRS = "folio", "transformers"
SETTINGS = ["sdpa dynamic", "sdpa static", "eager dynamic", "eager static"]
OF_EXPERTS = ["grouped_mm", "batched_mm", "eager"]  # of a mixture, its first two SETTINGS with each
HOPELESS = 4  # times slower than the best in the uncounted round: not measured at that point
Task = Callable[..., dict[str, Any]]


# The workers. Both have the tasks prefill, decode and memory.


def prompt_ids(seed: int, count: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(seed).integers(vocab_size, size=count).tolist()


def peak_memory() -> dict[str, float]:
    """In bytes. ru_maxrss can begin with the parent's, so the system's own figure comes first."""
    try:
        status = Path("/proc/self/status").read_text()
        return {"bytes": 1024.0 * int(status.split("VmHWM:")[1].split()[0])}
    except (OSError, IndexError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return {"bytes": float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}


def our_tasks(spec: dict[str, Any]) -> tuple[dict[str, Task], dict[str, Any]]:
    """The library as its command line sets it up, and what to know about it."""
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


def their_tasks(spec: dict[str, Any]) -> tuple[dict[str, Task], dict[str, Any]]:
    """transformers in eager mode, as its documentation has it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
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
    stacks = [p for p in model.parameters() if p.ndim == 3]  # of experts
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
    def prefill(tokens: int, seed: int, setting: str) -> dict[str, Any]:
        for i in range(2):
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
        share = experts_read(c, batch)
        spared = sum(p.nbytes * (1 - share(p.shape[0])) for p in stacks)
        floor = weights - spared + position * batch * (PROMPT + 1.5 + steps / 2)
        return {"seconds": seconds, "bytes": floor, "tokens": tokens}

    tasks: dict[str, Task] = dict(prefill=prefill, decode=decode, memory=peak_memory)
    return tasks, {"load_s": load_s, "platform": device, "context": c.max_position_embeddings}


def work() -> None:
    """Reads what to load, then tasks, a JSON line each; answers each with one."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints
    tasks: dict[str, Task] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if tasks:
                reply = tasks[request.pop("task")](**request)
            else:
                tasks, reply = (our_tasks if request["library"] == OURS else their_tasks)(request)
        except (ValueError, OSError) as error:
            reply = {"error": str(error)}
        out.write(json.dumps(reply) + "\n")
        out.flush()


# The parent.


class Worker(NamedTuple):
    process: Any
    errors: Any  # a file: its stderr


def ask(worker: Worker, **request: Any) -> dict[str, Any]:
    """One task, done while every other worker waits; ValueError with the worker's complaint."""
    try:
        worker.process.stdin.write(json.dumps(request) + "\n")
        worker.process.stdin.flush()
        line = worker.process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        worker.errors.seek(0)
        last = worker.errors.read().strip().splitlines()[-1:] or ["no message"]
        raise ValueError(f"the worker ended with status {worker.process.wait()}: {last[0]}")
    reply = json.loads(line)
    if "error" in reply:
        raise ValueError(reply["error"])
    return reply


@contextlib.contextmanager
def started(spec: dict[str, Any], home: str) -> Iterator[tuple[Worker, dict[str, Any]]]:
    """A worker that has loaded the model, with its programs kept under `home`."""
    with tempfile.TemporaryFile("w+") as errors:
        pipes: dict[str, Any] = dict(
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        environment = os.environ | ({"XDG_CACHE_HOME": home} if spec["library"] == OURS else {})
        argv = [sys.executable, "-m", "benchmarks.generate", "--worker"]
        process = subprocess.Popen(argv, env=environment, **pipes)
        worker = Worker(process, errors)
        try:
            yield worker, ask(worker, **spec)
        finally:
            process.kill()
            process.communicate()


def start_up(
    spec: dict[str, Any], home: str, steps: int, setting: dict[str, str]
) -> dict[str, Any]:
    """A new process: seconds to its first token, of them loading, and its memory after a round."""
    began = time.perf_counter()
    with started(spec, home) as (worker, facts):
        ask(worker, task="prefill", tokens=PROMPT, seed=0, **setting)
        seconds = time.perf_counter() - began
        ask(worker, task="decode", batch=1, steps=steps, seed=0, **setting)
        memory = ask(worker, task="memory")
    return {"first_token_s": seconds, "load_s": facts["load_s"], "peak_bytes": memory["bytes"]}


class Point(NamedTuple):
    """One thing to measure."""

    name: str
    task: dict[str, Any]
    tokens: int  # that one round makes


def measure(args: argparse.Namespace, specs: list[dict[str, Any]], home: str) -> dict[str, Any]:
    """All rounds, in turns: the replies by point and by library with setting, and the bandwidth."""
    points = [
        Point(f"decode, batch {b}", dict(task="decode", batch=b, steps=args.steps), b * args.steps)
        for b in args.batch
    ] + [Point(f"prefill {n}", dict(task="prefill", tokens=n), n) for n in args.prefill]
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {p.name: {} for p in points}
    first: dict[tuple[str, str], dict[str, float]] = {}  # seconds by point and library
    bandwidth = []
    with contextlib.ExitStack() as stack:
        workers = [(s, stack.enter_context(started(s, home))) for s in specs]
        for _, (_, facts) in workers:
            if len(specs) > 1 and facts["platform"] != "cpu":
                raise ValueError("--against compares on the CPU: set JAX_PLATFORMS=cpu")
            if max(PROMPT + args.steps + 2, *(n + 1 for n in args.prefill)) > facts["context"]:
                raise ValueError(f"the model's context is only {facts['context']} tokens")
        for r in range(-1, args.rounds):  # the first is not counted: it compiles
            if r >= 0:
                bandwidth.append(ask(workers[0][1][0], task="bandwidth")["bytes_per_s"])
            for point in points:
                for spec, (worker, _) in workers:
                    seconds = first.setdefault((point.name, spec["library"]), {})
                    for setting in spec["settings"]:
                        if r >= 0 and seconds[setting] > HOPELESS * min(seconds.values()):
                            continue
                        task = point.task | ({"setting": setting} if setting else {})
                        reply = ask(worker, seed=max(r, 0), **task)
                        if r < 0:
                            seconds[setting] = reply["seconds"]
                            continue
                        name = f"{spec['library']} {setting}".strip()
                        reply["tokens_per_s"] = point.tokens / reply["seconds"]
                        rounds[point.name].setdefault(name, []).append(reply)
                progress(f"{spec['dtype']} round {max(r, 0)} of {args.rounds}: {point.name}")
    return {"rounds": rounds, "bandwidth": max(bandwidth)}


def progress(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def summarise(replies: list[dict[str, Any]], bandwidth: float, steps: int) -> dict[str, Any]:
    rates = [r["tokens_per_s"] for r in replies]
    result = dict(median=statistics.median(rates), low=min(rates), high=max(rates))
    if "bytes" in replies[0]:
        step_s = statistics.median(r["seconds"] for r in replies) / steps
        result["of_floor"] = replies[0]["bytes"] / bandwidth / step_s
    return result


def same_tokens(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[int, int]:
    """(Tokens of the first row before the first that differs, tokens) over all rounds."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        pairs = [x == y for x, y in zip(a["tokens"], b["tokens"], strict=True)]
        same += [*pairs, False].index(False)
        total += len(pairs)
    return same, total


def compare(args: argparse.Namespace, spec: dict[str, Any], home: str) -> dict[str, Any]:
    """Everything about one dtype."""
    specs = [spec | {"library": OURS, "settings": [""]}]
    if args.against:
        settings = SETTINGS
        mixture = "num_experts_per_tok" in spec["shape"]
        if mixture and not spec["shape"]["model_type"].startswith("llama4"):  # it has one way
            settings = [
                f"{setting} {experts}" for setting in SETTINGS[:2] for experts in OF_EXPERTS
            ]
        specs.append(spec | {"library": THEIRS, "settings": settings})
    start: dict[str, Any] = {}
    for turn in ("cold", "warm"):  # on new directories, so the first finds no compiled program
        for s in specs:
            progress(f"{spec['dtype']} {turn} start: {s['library']}")
            setting = {"setting": s["settings"][0]} if s["library"] == THEIRS else {}
            start[f"{s['library']} {turn}"] = start_up(s, home, args.steps, setting)
    result = measure(args, specs, home)
    points: dict[str, Any] = {}
    for point, by_setting in result["rounds"].items():
        sums = {k: summarise(v, result["bandwidth"], args.steps) for k, v in by_setting.items()}
        points[point] = {"settings": sums}
        if args.against:
            best = max((k for k in sums if k != OURS), key=lambda k: sums[k]["median"])
            points[point] |= {"best": best, "ratio": sums[OURS]["median"] / sums[best]["median"]}
            if "tokens" in by_setting[OURS][0] and not spec["random"]:
                points[point]["same"] = same_tokens(by_setting[OURS], by_setting[best])
    return {"dtype": spec["dtype"], "bandwidth": result["bandwidth"], "start": start} | {
        "points": points,
        "rounds": result["rounds"],
    }


def table(result: dict[str, Any], against: bool) -> Iterator[str]:
    """Lines of markdown."""

    def rate(s: dict[str, Any]) -> str:
        floor = f", {100 * s['of_floor']:.0f} % of floor" if "of_floor" in s else ""
        return f"{s['median']:.1f} ({s['low']:.1f} to {s['high']:.1f}){floor}"

    def row(name: str, *cells: str) -> str:
        return f"| {name} | " + " | ".join(cells[: 4 if against else 1]) + " |"

    yield f"{result['dtype']}, reads {result['bandwidth'] / 1e9:.1f} GB/s\n"
    yield row("", f"**{OURS}**", THEIRS, "its best setting", "ratio")
    yield row("---", "---", "---", "---", "---")
    for point, p in result["points"].items():
        name = f"{point}, tokens/s"
        if not against:
            yield row(name, rate(p["settings"][OURS]))
            continue
        best, ratio = p["best"], f"{p['ratio']:.2f} x"
        setting = best.removeprefix(THEIRS).strip().replace(" ", ", ")
        yield row(name, rate(p["settings"][OURS]), rate(p["settings"][best]), setting, ratio)
    for name, field, turn, unit in (
        ("first token of a new process, s", "first_token_s", "cold", 1.0),
        ("the same with compiled programs kept, s", "first_token_s", "warm", 1.0),
        ("load, s", "load_s", "warm", 1.0),
        ("peak memory, GB", "peak_bytes", "warm", 1e9),
    ):
        costs = [s[field] / unit for key, s in result["start"].items() if key.endswith(turn)]
        cells = [f"{cost:.2f}" for cost in costs]
        if against:
            cells += [SETTINGS[0].replace(" ", ", "), f"{costs[1] / costs[0]:.2f} x"]
        yield row(name, *cells)
    for point, p in result["points"].items():
        if "same" in p:
            yield f"\n{point}: the two agree on {p['same'][0]} of {p['same'][1]} tokens."


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(against: bool) -> dict[str, Any]:
    try:
        info = Path("/proc/cpuinfo").read_text()
        cpu = info.split("model name")[1].split(":")[1].splitlines()[0].strip()
    except (OSError, IndexError):
        cpu = platform.processor() or platform.machine()
    names = ["jax", "jaxlib"] + ["torch", "transformers"] * against
    versions = {name: importlib.metadata.version(name) for name in names}
    return {"cpu": cpu, "cores": cores(), "python": platform.python_version(), **versions}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__)
    ap.formatter_class = argparse.RawDescriptionHelpFormatter
    source = ap.add_mutually_exclusive_group(required=True)
    source.add_argument("--ckpt", help="directory or hub id of a published checkpoint")
    source.add_argument(
        "--random-shape", metavar="SHAPE", help="random weights: a named shape or a config.json"
    )
    source.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    dtypes = ["float32", "bfloat16"]
    ap.add_argument("--dtype", nargs="+", choices=dtypes, default=["bfloat16"])
    ap.add_argument("--quant", choices=["int8"], help="of our weights and cache")
    ap.add_argument("--against", choices=[THEIRS], help="what to measure beside it, in turns")
    ap.add_argument("--batch", nargs="+", type=int, default=[1, 8], metavar="B")
    ap.add_argument("--steps", type=int, default=64, metavar="N", help="tokens decoded a round")
    ap.add_argument("--prefill", nargs="+", type=int, default=[512], metavar="T")
    ap.add_argument("--rounds", type=int, default=7, metavar="R")
    ap.add_argument("--model", default="llama3", help="package of the model")
    ap.add_argument("--json", type=Path, metavar="FILE", help="every round, and the summary")
    args = ap.parse_args(argv)
    for name in ("batch", "steps", "prefill", "rounds"):
        values = getattr(args, name)
        if min(values if isinstance(values, list) else [values]) < 1:
            ap.error(f"--{name} must be at least 1")
    if args.batch and max(args.batch) > 8:
        ap.error("--batch must be at most 8, the slots that the command line takes by itself")
    return args


def run(args: argparse.Namespace) -> None:
    missing = [m for m in ("torch", "transformers") if importlib.util.find_spec(m) is None]
    if args.against and missing:
        raise ValueError(
            f"--against {THEIRS} needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    spec: dict[str, Any] = {"ckpt": args.ckpt or args.random_shape, "model": args.model}
    spec |= {"random": args.ckpt is None, "quant": args.quant}
    module = importlib.import_module(f"{args.model}.model")
    spec["shape"] = read_shape(module, spec["ckpt"], random=spec["random"])[0]
    facts = machine(bool(args.against))
    print(f"{spec['ckpt']}: " + ", ".join(f"{k} {v}" for k, v in facts.items()))
    print(f"decode of {args.steps} tokens behind {PROMPT}; medians of {args.rounds} rounds (range)")
    results = []
    for dtype in args.dtype:
        with tempfile.TemporaryDirectory() as home:
            results.append(compare(args, spec | {"dtype": dtype}, home))
        print("\n" + "\n".join(table(results[-1], bool(args.against))), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.worker:
        return work()
    try:
        run(args)
    except (ValueError, OSError) as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in str(error).splitlines()))
        sys.exit(2)


if __name__ == "__main__":
    main()
