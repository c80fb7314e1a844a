"""Finds out which of several processes this is, from options, environment variables or the cluster
that started them."""

import argparse
import contextlib
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from common.loading.files import first_line

MOST_PROCESSES, MOST_SECONDS = 100_000, 1_000_000


class Rank(NamedTuple):
    """The number of this process, how many there are, and HOST:PORT of process 0."""

    coordinator: str
    process: int
    processes: int
    devices: Sequence[int] | None = None  # local ones that this process uses; None: all


def find_rank(args: argparse.Namespace) -> Rank | None:
    """Finds the rank by options, variables or the cluster; None if this process runs alone."""
    if args.distributed is False:
        return None
    if not 0 <= args.join_timeout <= MOST_SECONDS:
        raise ValueError(
            f"--join-timeout must be from 0 to {MOST_SECONDS}, got {args.join_timeout}"
        )
    env = os.environ
    coordinator = args.coordinator or env.get("JAX_COORDINATOR_ADDRESS")
    index = args.process
    if index is None and "JAX_PROCESS_ID" in env and "JAX_NUM_PROCESSES" in env:
        index = f"{env['JAX_PROCESS_ID']}/{env['JAX_NUM_PROCESSES']}"
    told = bool(args.distributed or coordinator or index is not None)
    rank: Rank | None
    if coordinator and index is not None:
        rank = Rank(coordinator, *parse_process(index))
    elif told or has_cluster_variables():
        rank = ask_jax(coordinator, args.join_timeout)
    else:
        rank = pod_of_tpu_vm(args.join_timeout)
    if rank is None or rank.processes == 1:
        return None
    host, _, port = rank.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"the address of process 0, {rank.coordinator!r}, is not HOST:PORT")
    return rank


def parse_process(text: str) -> tuple[int, int]:
    process, _, count = text.partition("/")
    if not (process.isdecimal() and count.isdecimal() and int(process) < int(count)):
        raise ValueError(f"--process {text!r}: expected I/N, from 0/N to N-1/N")
    if int(count) > MOST_PROCESSES:
        raise ValueError(f"--process {text!r}: there can be {MOST_PROCESSES} processes at most")
    return int(process), int(count)


def has_cluster_variables() -> bool:
    """Whether environment variables say that this is one of several processes. Those of a Slurm
    allocation without a step do not count, nor those of a Kubernetes job whose image is not made
    for `jax.distributed`."""
    env = os.environ
    tasks = [env.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")]
    workers = env.get("TPU_PROCESS_ADDRESSES") or env.get("TPU_WORKER_HOSTNAMES") or ""
    pod = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= set(env)
    return any(x != "1" for x in tasks) or "," in workers or (pod and bool(find_spec("kubernetes")))


def ask_jax(coordinator: str | None, timeout: float) -> Rank:
    """Returns the rank that `jax.distributed` detects. ValueError if it cannot."""
    # A private class: the public `initialize` shows what it found only after all have joined.
    from jax._src.clusters import ClusterEnv

    hint = "give --coordinator HOST:PORT --process I/N on each, or --no-distributed"
    detect = ClusterEnv.auto_detect_unset_distributed_params
    try:
        found = detect(coordinator, None, None, None, None, int(timeout))
    except Exception as error:
        what = f"the cluster does not say which process this is ({first_line(error)})"
        raise ValueError(f"{what}: {hint}") from None
    address, count, process, devices = found
    if address is None or count is None or process is None:
        raise ValueError(f"nothing here says which of how many processes this is: {hint}")
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        devices = None  # `initialize` reads the variable itself
    return Rank(address, process, count, devices)


def pod_of_tpu_vm(timeout: float) -> Rank | None:
    """Returns the rank in a pod of TPU machines, which only their metadata server knows."""
    from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm

    if running_in_cloud_tpu_vm:
        with contextlib.suppress(ValueError):  # a single machine without such a server
            return ask_jax(None, timeout)
    return None
