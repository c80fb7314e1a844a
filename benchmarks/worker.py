"""The process in which `benchmarks.generate` runs one library. It loads a model, then does one task
at a time.

Each library has a module with `tasks_of`, which loads the model that a spec describes. It returns
facts about the model and these tasks: prefill(tokens, seed, prompts), which times the last prompt;
decode(batch, steps, seed); memory(); and perhaps products(rows, seed) and overhead(batch, steps,
seed). This module imports none of the libraries, so each process loads only its own.
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
MAX_SLOTS = 8  # at most so many slots decode at once; more rows belong to a prompt
Task = Callable[..., dict[str, Any]]


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prompt_ids(seed: int, count: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(seed).integers(vocab_size, size=count).tolist()


def rows_of_experts(rows: int, experts: int, chosen: int) -> list[int]:
    """Returns how many rows each expert gets if `rows` tokens choose `chosen` each, evenly."""
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
    """Returns this process's peak memory in bytes. ru_maxrss can start from the parent's peak, so
    VmHWM is preferred where the system reports it."""
    try:
        status = Path("/proc/self/status").read_text()
        return {"bytes": 1024.0 * int(status.split("VmHWM:")[1].split()[0])}
    except (OSError, IndexError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return {"bytes": float(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}


def work() -> None:
    """Reads JSON lines: first the spec of a model to load, then tasks. Answers each with a line."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print goes to stderr
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
