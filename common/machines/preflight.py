"""Compares, before any long work, what several processes must have in common."""

import argparse
import hashlib
import json
import platform
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from jax.sharding import Mesh

from common.loading.hub import FILES, OTHER_LAYOUTS
from common.loading.shape import folder, read_shape
from common.sharding import axes_of

# Options that may differ: they say where things are, and which process this is.
OWN = {"ckpt", "prompts", "profile", "distributed", "coordinator", "process", "join_timeout"}
OWN |= {"api_key"}  # a secret, which process 0 alone needs

Report = dict[str, str | None]  # values by name; None if this process cannot say


def report(module: ModuleType, args: argparse.Namespace) -> Report:
    """Returns what this process has: versions, code, options, and the files of the checkpoint.

    ValueError or OSError if there is no such checkpoint.
    """
    found: Report = {"Python": platform.python_version()}
    for package in ("jax", "jaxlib", "libtpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    code = sorted(
        file
        for path in (Path(__file__).parent.parent, folder(module))
        for file in path.glob("**/*.py")
    )
    found["the library's code"] = digest(b"".join(file.read_bytes() for file in code))
    for name, value in vars(args).items():
        if name not in OWN:
            found["--" + name.replace("_", "-")] = str(value)
    readable = args.prompts is not None and args.prompts.is_file()
    found["the file of --prompts"] = digest(args.prompts.read_bytes()) if readable else None
    hf, directory = read_shape(module, args.ckpt, args.revision, args.random)
    if directory is None:
        return {**found, "config.json": digest(json.dumps(hf, sort_keys=True).encode())}
    files = (file for file in sorted(directory.iterdir()) if file.is_file())
    return found | {file.name: contents(file) for file in files if is_of_checkpoint(file)}


def is_of_checkpoint(file: Path) -> bool:
    known, other = (any(fnmatch(file.name, p) for p in group) for group in (FILES, OTHER_LAYOUTS))
    return known and not other


def contents(file: Path) -> str:
    """Returns the size of a file and, unless it holds weights, a digest."""
    size = f"{file.stat().st_size} bytes"
    return size if file.suffix == ".safetensors" else f"{size} ({digest(file.read_bytes())})"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def differences(reports: dict[int, dict[str, Any]]) -> list[str]:
    """Returns a line for each thing that differs between processes. If a process reports None for
    it, only the others are compared."""
    wrong = []
    for name in dict.fromkeys(name for report in reports.values() for name in report):
        found: dict[Any, list[int]] = {}
        for process in sorted(reports):
            value = reports[process].get(name, "missing")
            if value is not None:
                found.setdefault(value, []).append(process)
        if len(found) > 1:
            parts = (f"{value} in {numbered(where)}" for value, where in found.items())
            wrong.append(f"{name} differs: {'; '.join(parts)}")
    return wrong


def numbered(processes: list[int]) -> str:
    return f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}"


def check_all_used(mesh: Mesh) -> None:
    """ValueError if a process has no device in the mesh: it could not follow the others."""
    used = {device.process_index for device in mesh.devices.flat}
    if idle := sorted(set(range(jax.process_count())) - used):
        raise ValueError(
            f"the mesh {axes_of(mesh)} holds no device of {numbered(idle)}: give a --mesh of all "
            f"{jax.device_count()} devices, or start fewer processes"
        )
