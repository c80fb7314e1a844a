"""Several processes that run one command, on JAX's distributed service. The service connects them,
keeps texts that all can read, and watches them: when one dies or ends alone, it ends the others."""

import argparse
import hashlib
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax

# The only private modules that are imported: no public name leads to the store or the cluster.
from jax._src import clusters, distributed

from common.loading.adapter import open_adapter
from common.loading.files import first_line
from common.loading.hub import is_of_checkpoint
from common.loading.shape import folder, read_shape

DEAD_S, ALONE_S = 30, 20  # so long after one has died, or ended alone, the service ends all
REMEMBERED = 10_000  # messages of `share` that are kept
# Options that may differ between processes. The API key is a secret of process 0.
OWN = {"ckpt", "adapter", "prompts", "profile", "distributed", "coordinator", "process", "api_key"}
Facts = dict[str, str]  # what must be the same in all processes, by name
service: Any = distributed.global_state


class Rank(NamedTuple):
    coordinator: str  # HOST:PORT of process 0
    processes: int
    process: int


def find_rank(args: argparse.Namespace) -> Rank | None:
    """Which of several processes this is, by options or what JAX detects. None if it is alone."""
    told = bool(args.coordinator or args.process or args.distributed)
    # In a Slurm step of one task, JAX would count the tasks of the whole allocation.
    if args.distributed is False or (not told and os.environ.get("SLURM_STEP_NUM_TASKS") == "1"):
        return None
    given = args.coordinator, *(args.process or (None, None)), None, None, 300
    rank, why = list[Any]([None]), "JAX finds no cluster"
    try:
        *rank, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(*given)
    except Exception as error:  # of whatever library asks the cluster
        told, why = True, first_line(error)
    if None in rank and told:
        how = "give --coordinator HOST:PORT --process I/N to each, or --no-distributed"
        raise ValueError(f"nothing says which of several processes this is ({why}): {how}")
    return None if None in rank or rank[1] == 1 else Rank(*rank)


def join(rank: Rank) -> None:
    """Connects to the service. From now on, process 0 alone writes to its standard output, and what
    libraries write there goes to stderr: the one that connects CPUs greets."""
    own = os.open(os.devnull, os.O_WRONLY) if rank.process else os.dup(1)
    sys.stdout = os.fdopen(own, "w", encoding="utf-8")
    sys.stderr = sys.stdout if rank.process else sys.stderr
    os.dup2(2, 1)
    sys.stderr.write(f"[waiting for {rank.processes} processes at {rank.coordinator}]\n")
    jax.config.update("jax_enable_preemption_service", False)  # which would ignore SIGTERM
    os.environ.setdefault("JAX_COORDINATOR_BIND_ADDRESS", rank.coordinator)  # not all networks
    try:
        limits: Any = dict(heartbeat_timeout_seconds=DEAD_S, shutdown_timeout_seconds=ALONE_S)
        jax.distributed.initialize(*rank, **limits)
    except RuntimeError as error:
        raise ValueError(f"processes at {rank.coordinator}: {first_line(error)}") from None


def agree(prepare: Callable[[], tuple[Any, Facts]]) -> Any:
    """Calls `prepare` in every process, and returns its first result, JSON, of process 0. If it
    fails in one of them, or its facts differ, all of them raise ValueError with the same line."""
    result, facts, mistake = None, Facts(), None
    try:
        result, facts = prepare()
    except (ValueError, OSError) as error:
        mistake = "; ".join(str(error).splitlines())
    report = json.dumps([result, facts, mistake])
    service.client.key_value_set(f"folio report {service.process_id}", report)
    reports = [json.loads(read(f"report {i}")) for i in range(service.num_processes)]
    mistakes = where(mistake for *_, mistake in reports)
    wrong = [f"{line} (in {those})" for line, those in mistakes.items() if line]
    if wrong := wrong or differences([facts for _, facts, _ in reports]):
        raise ValueError("; ".join(wrong))
    return reports[0][0]


def differences(reports: list[Facts]) -> list[str]:
    names = dict.fromkeys(name for facts in reports for name in facts)
    found = {name: where(facts.get(name, "missing") for facts in reports) for name in names}
    told = lambda who: ", ".join(map(" in ".join, who.items()))
    return [f"{name} differs: {told(who)}" for name, who in found.items() if len(who) > 1]


def where(values: Iterable[Any]) -> dict[Any, str]:
    """Which processes have each of the values: "processes 0, 2"."""
    found: dict[Any, list[str]] = {}
    for process, value in enumerate(values):
        found.setdefault(value, []).append(str(process))
    return {x: f"process{'es' * (len(i) > 1)} {', '.join(i)}" for x, i in found.items()}


def facts_of(module: ModuleType, args: argparse.Namespace) -> Facts:
    """Versions, the library's code, options, and the checkpoint's files: the sizes of those with
    weights, and digests of the others. ValueError or OSError if there is no such checkpoint."""
    digest = lambda content: hashlib.sha256(content).hexdigest()[:8]
    packages = (x for name in ("jax", "jaxlib", "libtpu") for x in distributions(name=name))
    facts = {"Python": platform.python_version()} | {x.name: x.version for x in packages}
    code = (f for place in (Path(__file__).parents[1], folder(module)) for f in place.rglob("*.py"))
    facts["the library's code"] = digest(b"".join(file.read_bytes() for file in sorted(code)))
    facts |= {f"--{k.replace('_', '-')}": str(x) for k, x in vars(args).items() if k not in OWN}
    adapter, ckpt, revision = open_adapter(args.adapter, args.ckpt, args.revision)
    hf, directory = read_shape(module, ckpt, revision, args.random)
    facts["config.json"] = digest(json.dumps(hf, sort_keys=True).encode())
    for place, whose in ((directory, ""), (adapter, "the adapter's ")):
        for file in filter(is_of_checkpoint, place.iterdir() if place else ()):
            is_large, size = file.suffix == ".safetensors", f"{file.stat().st_size} bytes"
            facts[whose + file.name] = size if is_large else digest(file.read_bytes())
    return facts


def read(key: str) -> str:
    """Waits for a text; looks every second whether Python has a signal to handle."""
    while True:
        try:
            return str(service.client.blocking_key_value_get(f"folio {key}", 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


messages = itertools.count()  # that process 0 has shared


def share(message: str) -> str:
    """Returns the message of process 0 in every process. It does not go through the devices, so to
    wait for one costs nothing. All processes must call this equally often."""
    number = next(messages)
    if service.process_id:
        return read(f"{number}")
    service.client.key_value_set(f"folio {number}", message)
    service.client.key_value_delete(f"folio {number - REMEMBERED}")  # no process is so far behind
    return message
