"""Measures a checkpoint's speed on this machine, against a floor and against other libraries.

    python -m benchmarks.generate --ckpt DIR --dtype float32 bfloat16 --against transformers

Each library runs in a process of its own. They take turns: while one runs a round, the others wait,
so all see the same machine. All read a prompt, then decode greedily, and fetch every token. Prefill
reads two prompts and times the second, because a process that waited must first get its memory
back. The result is the median of the rounds, with a library's best setting at each point. (Settings
four times slower than the best one in an uncounted round are left out.) Ours is the serving loop of
the command line. A decode step's floor is the least time that it can take: that of reading the
weights and the filled cache, at the bandwidth of a large one-row product in the same run.

--products also times the products of all matrices alone, one after the other, with as many rows. A
library's step cannot be faster than its own products.

--overhead also times decode steps of a model with the same layers and heads whose other widths are
64. Such a step reads almost no weights, so its time is the rest of a step. It measures this library
only, and not the family gpt2.
"""

import argparse
import contextlib
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import model_file
from benchmarks.worker import MAX_SLOTS, PROMPT, cores
from common.loading.shape import read_shape

OURS, THEIRS, LLAMACPP = "folio", "transformers", "llama.cpp"
MODULES = {OURS: "folio", THEIRS: "hf", LLAMACPP: "llamacpp"}
LACKS = {OURS: (), THEIRS: ("overhead",), LLAMACPP: ("overhead", "products")}  # tasks they lack
NEEDS = {
    THEIRS: ("torch", "transformers"),
    LLAMACPP: ("llama_cpp", "gguf", "torch", "transformers"),
}
PACKAGES = {"llama_cpp": "llama-cpp-python"}  # modules whose package has another name
SETTINGS = ["sdpa dynamic", "sdpa static", "eager dynamic", "eager static"]
OF_EXPERTS = ["grouped_mm", "batched_mm", "eager"]  # for mixtures; each with 2 of SETTINGS
NARROW = 64  # columns, of what --overhead decodes with
WIDTHS = (
    "hidden_size intermediate_size intermediate_size_mlp moe_intermediate_size vocab_size".split()
)
HOPELESS = 4  # a setting so many times slower than the best is measured in no counted round


class Worker(NamedTuple):
    process: Any
    errors: Any  # the file that has its stderr


def ask(worker: Worker, **request: Any) -> dict[str, Any]:
    """Has a worker do one task, while the others wait, and returns its reply. Raises ValueError
    with the worker's error message."""
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
    """Starts a worker that loads the model, with a compilation cache under `home`. Yields the
    worker, and facts about the model."""
    with tempfile.TemporaryFile("w+") as errors:
        pipes: dict[str, Any] = dict(
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        environment = os.environ | ({"XDG_CACHE_HOME": home} if spec["library"] == OURS else {})
        argv = [sys.executable, "-m", "benchmarks.worker"]
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
    """Starts a new process. Returns the seconds to its first token, the part of them that loading
    took, and the peak memory after a round."""
    began = time.perf_counter()
    with started(spec, home) as (worker, facts):
        ask(worker, task="prefill", tokens=PROMPT, seed=0, prompts=1, **setting)
        seconds = time.perf_counter() - began
        ask(worker, task="decode", batch=1, steps=steps, seed=0, **setting)
        memory = ask(worker, task="memory")
    return {"first_token_s": seconds, "load_s": facts["load_s"], "peak_bytes": memory["bytes"]}


def medians(replies: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: statistics.median(reply[name] for reply in replies) for name in replies[0]}


class Point(NamedTuple):
    """One measurement of the table."""

    name: str
    task: dict[str, Any]
    tokens: int  # that one round computes


def measure(args: argparse.Namespace, specs: list[dict[str, Any]], home: str) -> dict[str, Any]:
    """Runs all rounds, in turns. Returns the replies by point and by library with setting, and the
    bandwidth."""
    points = [
        Point(f"decode, batch {b}", dict(task="decode", batch=b, steps=args.steps), b * args.steps)
        for b in args.batch
    ] + [Point(f"prefill {n}", dict(task="prefill", tokens=n), n) for n in args.prefill]
    if args.products:
        for rows in (*args.batch, *args.prefill):
            alone = dict(task="products", rows=rows)
            points.append(Point(f"products alone, {rows} rows", alone, rows))
    if args.overhead:
        for b in args.batch:
            narrow, name = dict(task="overhead", batch=b, steps=args.steps), f"widths of {NARROW}"
            points.append(Point(f"decode with {name}, batch {b}", narrow, b * args.steps))
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {p.name: {} for p in points}
    first: dict[tuple[str, str], dict[str, float]] = {}  # by point and library: seconds by setting
    bandwidth = []
    with contextlib.ExitStack() as stack:
        workers = [(s, stack.enter_context(started(s, home))) for s in specs]
        for _, (_, facts) in workers:
            if len(specs) > 1 and facts["platform"] != "cpu":
                raise ValueError("--against compares only on CPU: set JAX_PLATFORMS=cpu")
            if max(PROMPT + args.steps + 2, *(n + 1 for n in args.prefill)) > facts["context"]:
                raise ValueError(
                    f"--steps or --prefill exceeds the model's context of {facts['context']} tokens"
                )
        for r in range(-1, args.rounds):  # round -1 compiles, and is not counted
            if r >= 0:
                bandwidth.append(ask(workers[0][1][0], task="bandwidth")["bytes_per_s"])
            for point in points:
                for spec, (worker, _) in workers:
                    if point.task["task"] in LACKS[spec["library"]]:
                        continue
                    seconds = first.setdefault((point.name, spec["library"]), {})
                    alone = point.task["task"] == "products"
                    for setting in [""] if alone else spec["settings"]:
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
    """Returns (the first row's tokens before the first difference, all its tokens), summed over the
    rounds."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        pairs = [x == y for x, y in zip(a["tokens"], b["tokens"], strict=True)]
        same += [*pairs, False].index(False)
        total += len(pairs)
    return same, total


def settings_of(library: str, shape: dict[str, Any]) -> list[str]:
    """Returns the settings to run a library with; the best one counts. A library without settings
    has one with an empty name."""
    if library != THEIRS:
        return [""]
    if "num_experts_per_tok" in shape and not shape["model_type"].startswith("llama4"):
        sinks = shape["model_type"] == "gpt_oss"  # torch's SDPA has none
        attention = SETTINGS[2:] if sinks else SETTINGS[:2]
        return [f"{setting} {experts}" for setting in attention for experts in OF_EXPERTS]
    return SETTINGS


def narrowed(shape: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the same layers and heads, whose other widths are `NARROW`."""
    if "text_config" in shape:
        return shape | {"text_config": narrowed(shape["text_config"])}
    if "hidden_size" not in shape:
        raise ValueError("--overhead needs a config.json with a hidden_size")
    narrow = {name: NARROW if name in WIDTHS else value for name, value in shape.items()}
    if "kv_lora_rank" not in shape and not shape.get("head_dim"):
        narrow["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    return narrow


def make_gguf(spec: dict[str, Any], home: str) -> str:
    """Writes a GGUF file in a separate process, whose memory is not measured. Returns its path."""
    file, described = Path(home) / "model.gguf", Path(home) / "spec.json"
    described.write_text(json.dumps(spec))
    argv = [sys.executable, "-m", "benchmarks.llamacpp", str(described), str(file)]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"cannot make a GGUF file: {done.stderr.strip().splitlines()[-1]}")
    return str(file)


def compare(args: argparse.Namespace, spec: dict[str, Any], home: str) -> dict[str, Any]:
    """Runs all measurements for one dtype."""
    specs = []
    for library in (OURS, *args.against):
        settings = settings_of(library, spec["shape"])
        module = MODULES[library]
        specs.append(spec | {"library": library, "module": module, "settings": settings})
        if library == LLAMACPP:
            specs[-1]["gguf"] = make_gguf(spec, home)
    starts: dict[str, list[dict[str, Any]]] = {}
    for turn in ("cold", *["warm"] * args.rounds):  # "cold" finds an empty compilation cache
        for s in specs:
            progress(f"{spec['dtype']} {turn} start: {s['library']}")
            setting = {"setting": s["settings"][0]} if s["settings"][0] else {}
            once = start_up(s, home, args.steps, setting)
            starts.setdefault(f"{s['library']} {turn}", []).append(once)
    start = {name: medians(each) for name, each in starts.items()}
    result = measure(args, specs, home)
    points: dict[str, Any] = {}
    for point, by_setting in result["rounds"].items():
        sums = {k: summarise(v, result["bandwidth"], args.steps) for k, v in by_setting.items()}
        points[point] = {"settings": sums, "others": {}}
        for library in args.against:
            settings = [k for k in sums if k.startswith(library)]
            if not settings:
                continue
            best = max(settings, key=lambda k: sums[k]["median"])
            other = {"best": best, "ratio": sums[OURS]["median"] / sums[best]["median"]}
            if "tokens" in by_setting[OURS][0] and not spec["random"]:
                other["same"] = same_tokens(by_setting[OURS], by_setting[best])
            points[point]["others"][library] = other
    return {"dtype": spec["dtype"], "bandwidth": result["bandwidth"], "start": start} | {
        "points": points,
        "rounds": result["rounds"],
    }


START = (
    ("first token of a new process, compilation cache empty, s", "first_token_s", "cold", 1.0),
    ("first token of a new process, compilation cache warm, s", "first_token_s", "warm", 1.0),
    ("load, s", "load_s", "warm", 1.0),
    ("peak memory, GB", "peak_bytes", "warm", 1e9),
)


def table(result: dict[str, Any], against: Sequence[str]) -> Iterator[str]:
    """Yields the table as lines of markdown. × is our advantage: above 1, ours is faster or takes
    less memory."""

    def rate(s: dict[str, Any]) -> str:
        floor = f", {100 * s['of_floor']:.0f} % of the floor" if "of_floor" in s else ""
        return f"{s['median']:.1f} ({s['low']:.1f} to {s['high']:.1f}){floor}"

    def row(name: str, *cells: str) -> str:
        return f"| {' | '.join((name, *cells))} |"

    yield f"{result['dtype']}; read bandwidth {result['bandwidth'] / 1e9:.1f} GB/s\n"
    yield row("", f"**{OURS}**", *(cell for name in against for cell in (name, "×")))
    yield row("---", "---", *["---"] * (2 * len(against)))
    for point, p in result["points"].items():
        cells = [rate(p["settings"][OURS])]
        for library in against:
            other = p["others"].get(library)
            if other is None:
                cells += ["", ""]
                continue
            setting = other["best"].removeprefix(library).strip().replace(" ", ", ")
            cells.append(rate(p["settings"][other["best"]]) + (f", {setting}" if setting else ""))
            cells.append(f"{other['ratio']:.2f}")
        yield row(f"{point}, tokens/s", *cells)
    for name, field, turn, unit in START:
        ours, *others = (result["start"][f"{x} {turn}"][field] / unit for x in (OURS, *against))
        pairs = (cell for other in others for cell in (f"{other:.2f}", f"{other / ours:.2f}"))
        yield row(name, f"{ours:.2f}", *pairs)
    for point, p in result["points"].items():
        for library, other in p["others"].items():
            if "same" in other:
                same, total = other["same"]
                yield f"\n{point}: {library} and {OURS} agree on {same} of {total} tokens."


def machine(against: Sequence[str]) -> dict[str, Any]:
    try:
        info = Path("/proc/cpuinfo").read_text()
        cpu = info.split("model name")[1].split(":")[1].splitlines()[0].strip()
    except (OSError, IndexError):
        cpu = platform.processor() or platform.machine()
    others = dict.fromkeys(PACKAGES.get(x, x) for library in against for x in NEEDS[library])
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", *others)}
    return {"cpu": cpu, "cores": cores(), "python": platform.python_version(), **versions}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__)
    ap.formatter_class = argparse.RawDescriptionHelpFormatter
    source = ap.add_mutually_exclusive_group(required=True)
    source.add_argument("--ckpt", help="directory or hub id of a published checkpoint")
    source.add_argument(
        "--random-shape", metavar="SHAPE", help="random weights: a named shape or a config.json"
    )
    dtypes = ["float32", "bfloat16"]
    ap.add_argument("--dtype", nargs="+", choices=dtypes, default=["bfloat16"])
    ap.add_argument("--quant", choices=["int8"], help="quantise our weights and cache")
    against = dict(nargs="+", choices=[THEIRS, LLAMACPP], default=[])
    ap.add_argument("--against", **against, help="other libraries, measured in turns with ours")
    ap.add_argument("--batch", nargs="+", type=int, default=[1, 8], metavar="B")
    ap.add_argument("--steps", type=int, default=64, metavar="N", help="tokens to decode per round")
    ap.add_argument("--prefill", nargs="+", type=int, default=[512], metavar="T")
    ap.add_argument("--rounds", type=int, default=7, metavar="R")
    ap.add_argument("--model", default="llama3", help="the model's package")
    ap.add_argument("--products", action="store_true", help="also time a step's products alone")
    ap.add_argument("--overhead", action="store_true", help="also time narrow layers")
    ap.add_argument("--json", type=Path, metavar="FILE", help="write every round, and the summary")
    args = ap.parse_args(argv)
    for name in ("batch", "steps", "prefill", "rounds"):
        values = getattr(args, name)
        if min(values if isinstance(values, list) else [values]) < 1:
            ap.error(f"--{name} must be at least 1")
    if args.batch and max(args.batch) > MAX_SLOTS:
        ap.error(
            f"--batch must be at most {MAX_SLOTS}: by default, the command line takes no more slots"
        )
    return args


def run(args: argparse.Namespace) -> None:
    for library in args.against:
        missing = [m for m in NEEDS[library] if importlib.util.find_spec(m) is None]
        packages = [PACKAGES.get(m, m) for m in missing]
        if missing:
            wanted = f"{' and '.join(packages)}: pip install {' '.join(packages)}"
            raise ValueError(f"--against {library} needs {wanted}")
    if args.json:
        args.json.open("a").close()  # found out now, not after the measurements
    spec: dict[str, Any] = {"ckpt": args.ckpt or args.random_shape, "model": args.model}
    spec |= {"random": args.ckpt is None, "quant": args.quant}
    module = model_file(args.model)
    spec["shape"] = read_shape(module, spec["ckpt"], random=spec["random"])[0]
    spec["narrow"] = narrowed(spec["shape"]) if args.overhead else None
    facts = machine(args.against)
    print(f"{spec['ckpt']}: " + ", ".join(f"{k} {v}" for k, v in facts.items()))
    print(
        f"decode {args.steps} tokens after a prompt of {PROMPT}; "
        f"medians of {args.rounds} rounds (range)"
    )
    results = []
    for dtype in args.dtype:
        with tempfile.TemporaryDirectory() as home:
            results.append(compare(args, spec | {"dtype": dtype}, home))
        print("\n" + "\n".join(table(results[-1], args.against)), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in str(error).splitlines()))
        sys.exit(2)


if __name__ == "__main__":
    main()
