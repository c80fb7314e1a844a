"""What a command finds around it: the standard streams, JAX's settings, the cache of compiled
programs, and the memory of the devices."""

import atexit
import contextlib
import gc
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from common.files import first_line
from common.hosts import Group
from common.load import Model
from common.mesh_choice import weight_bytes
from common.sharding import DATA, model_shards
from common.weights import by_path

RECORD = "entries.json"  # beside the programs that are kept
MOST_CPU_DEVICES = 1024  # of one process; 65,536 would take it a minute


def open_streams() -> None:
    """Something behind each of the three standard streams, as a shell may have closed them:
    a file that is opened later would take their place, and get what is printed."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(fd)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise ValueError("standard output is closed, and there is no other place for the text")


def has_accelerator() -> bool:
    """Whether this machine may have a device besides its CPU; only asked where libtpu, which comes
    with the tests, would go looking for a TPU."""
    if importlib.util.find_spec("libtpu") is None:
        return True
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    google = any(file.read_text().strip() == "0x1ae0" for file in vendors)
    return google or any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))


def configure_jax(axes: dict[str, int], compile_cache: bool, group: Group | None) -> None:
    """Settings that come before the first device is touched; ValueError if JAX finds none."""
    if not os.environ.get("JAX_PLATFORMS") and not has_accelerator():
        # A libtpu that finds no TPU complains at length, and crashes the profiler.
        jax.config.update("jax_platforms", "cpu")
    # What is set for another program: 64-bit numbers, no compilation, no device.
    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_disable_jit", False)
    need = math.ceil(math.prod(axes.values()) / (group.place.processes if group else 1))
    none = os.environ.get("JAX_NUM_CPU_DEVICES", "").strip() == "0"
    if none or (need > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", "")):
        # A mesh can be tried on a laptop; other platforms ignore this.
        jax.config.update("jax_num_cpu_devices", need if need <= MOST_CPU_DEVICES else 1)
    if compile_cache:
        keep_programs()
    gc.set_threshold(50_000)  # tracing makes many objects, and next to no garbage to look for
    if group:
        group.start()
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # as platforms are named and nothing is found
        asked = os.environ.get("JAX_PLATFORMS")
        hint = f" (JAX_PLATFORMS is {asked!r})" if asked else ""
        what = first_line(error).replace("AssertionError", "no device was found")
        raise ValueError(f"JAX does not start: {what}{hint}") from None


# ---- the cache of compiled programs


def keep_programs() -> None:
    """Keeps compiled programs between runs, where there is a place for them."""
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "folio" / "programs"
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
        bad = damaged(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        sys.stderr.write(f"[programs are not kept: {first_line(error)}]\n")
        return
    drop(bad)
    drop_what_cannot_be_read(folder)
    atexit.register(record_entries, folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def signatures(folder: Path) -> dict[str, list[int]]:
    """Size and time of each entry, by name; an entry once written never changes."""
    entries = {path.name: path.lstat() for path in folder.glob("*-cache")}
    return {name: [status.st_size, status.st_mtime_ns] for name, status in entries.items()}


def record_entries(folder: Path) -> None:
    """Notes what the entries look like: JAX does not notice one that holds another program."""
    with contextlib.suppress(OSError):
        part = folder / f"{RECORD}.{os.getpid()}"
        part.write_text(json.dumps(signatures(folder)))
        part.replace(folder / RECORD)


def damaged(folder: Path) -> list[Path]:
    """Entries that are no files, or empty, or not as they were when they were noted."""
    recorded, now = {}, signatures(folder)
    with contextlib.suppress(OSError, ValueError):
        recorded = dict(json.loads((folder / RECORD).read_text()))
    return [
        path
        for path in map(folder.joinpath, now)
        if not (path.is_file() and now[path.name][0] and os.access(path, os.R_OK))
        or recorded.get(path.name, now[path.name]) != now[path.name]
    ]


def drop(entries: list[Path]) -> None:
    """Removes entries of the cache, as JAX neither uses nor replaces bad ones."""
    for entry in entries:
        with contextlib.suppress(OSError):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if entries:
        names = ", ".join(sorted({entry.name.split("-")[0] for entry in entries}))
        sys.stderr.write(f"[dropped a damaged entry of {entries[0].parent}: {names}]\n")


def drop_what_cannot_be_read(folder: Path) -> None:
    """JAX warns of an entry that it cannot read, by the name of the program alone, and compiles.
    In place of the warning, all entries of that name are dropped."""
    show = warnings.showwarning

    def dropping(message: Any, *rest: Any, **more: Any) -> None:
        found = re.match(
            r"Error (read|writ)ing persistent compilation cache .*'(\w+)'", str(message)
        )
        if found is None:
            show(message, *rest, **more)
        else:
            drop([*folder.glob(f"{found[2]}-*")])

    warnings.showwarning = dropping


# ---- memory


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def memory_of(device: jax.Device) -> int | None:
    """Bytes of a device's memory; None where that is not known."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def check_memory(model: Model, slots: int, capacity: int, dtype: DTypeLike) -> None:
    """ValueError if the weights and the cache are more than the devices hold."""
    mesh, shards = model.mesh, model_shards(model.mesh)
    device = mesh.devices.flat[0]
    if (have := memory_of(device)) is None:
        return
    layout, axes = model.module.weight_layout(model.config, shards), dict(mesh.shape)
    weights = sum(
        weight_bytes(weight, model.dtype, model.storage, axes)
        for weight in by_path(layout).values()
    )
    rows = mesh.shape[DATA]
    state = jax.eval_shape(
        lambda: model.module.init_state(
            model.config, slots=rows, capacity=capacity, dtype=dtype, shards=shards
        )
    )

    def local(spec: Any, arrays: Any) -> int:
        place = NamedSharding(mesh, spec)
        return sum(
            math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(arrays)
        )

    each = sum(jax.tree.leaves(jax.tree.map(local, model.module.STATE_SPEC, state)))
    cache = each * slots // rows
    sharing = jax.local_device_count() if device.platform == "cpu" else 1
    sharing = min(sharing, mesh.size)
    if (weights + cache) * sharing > have:
        raise ValueError(
            f"the weights take {gigabytes(weights * sharing)} and {slots} slots of {capacity} "
            f"positions {gigabytes(cache * sharing)}, but a device has {gigabytes(have)}: take "
            "fewer --slots, a smaller --max-len, --quant, or a larger --mesh"
        )
