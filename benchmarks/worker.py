"""The process in which `benchmarks.generate` runs one library: it loads a model, and does one task
at a time.

Each library has a module with `tasks_of`, which loads what a spec describes and returns its tasks
prefill(tokens, seed, prompts), which times the last of them, decode(batch, steps, seed), memory()
and perhaps products(rows, seed), and facts about the model. Nothing that another library needs is
imported here.
"""

import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PROMPT = 128  # tokens in the cache when decoding begins
MAX_SLOTS = 8  # that decode at once; more rows are a prompt's
Task = Callable[..., dict[str, Any]]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prompt_ids(seed: int, count: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(seed).integers(vocab_size, size=count).tolist()


def rows_of_experts(rows: int, experts: int, chosen: int) -> list[int]:
    """How many rows each expert gets of `rows` tokens that chose `chosen` each, spread evenly."""
    return np.bincount(np.arange(rows * chosen) % experts, minlength=experts).tolist()


def median_seconds(run: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    run()
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return {"seconds": statistics.median(took)}


def peak_memory() -> dict[str, float]:
    """In bytes. ru_maxrss can begin with the parent's, so the system's own figure comes first."""
    try:
        status = Path("/proc/self/status").read_text()
        return {"bytes": 1024.0 * int(status.split("VmHWM:")[1].split()[0])}
    except (OSError, IndexError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return {"bytes": float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}


def work() -> None:
    """Reads what to load, then tasks, a JSON line each; answers each with one."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints
    known: dict[str, Task] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if known:
                reply = known[request.pop("task")](**request)
            else:
                library = importlib.import_module(f"benchmarks.{request['module']}")
                known, reply = library.tasks_of(request)
        except (ValueError, OSError) as error:
            reply = {"error": str(error)}
        out.write(json.dumps(reply) + "\n")
        out.flush()


if __name__ == "__main__":
    work()
