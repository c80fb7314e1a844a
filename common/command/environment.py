"""What a command sets around it: JAX's devices and cache of compiled programs, and signals."""

import contextlib
import gc
import importlib.util
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from common.loading.files import first_line

MOST_CPU_DEVICES = 1024  # in one process; 65,536 would take it a minute


def has_accelerator() -> bool:
    """Whether this machine may have a device besides its CPU. Looks only if libtpu is installed (it
    comes with the tests): it complains at length if it finds no TPU, and crashes the profiler."""
    if importlib.util.find_spec("libtpu") is None:
        return True
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    google = any(file.read_text().strip() == "0x1ae0" for file in vendors)
    return google or any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))


@contextlib.contextmanager
def handled(handler: Any) -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM have this handler."""
    before = [(n, signal.signal(n, handler)) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, old in before:
            signal.signal(number, old)


def configure_jax(axes: dict[str, int], processes: int) -> None:
    """Makes the settings that come before the first device. ValueError if JAX finds no device."""
    for name in ("jax_disable_jit", "jax_enable_x64"):
        if getattr(jax.config, name):
            raise ValueError(f"{name.upper()} is set, with which nothing here runs: unset it")
    if not os.environ.get("JAX_PLATFORMS") and not has_accelerator():
        jax.config.update("jax_platforms", "cpu")
    need = math.ceil(math.prod(axes.values()) / processes)
    if need > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Virtual devices, to try a mesh on a laptop. Other platforms ignore this setting.
        jax.config.update("jax_num_cpu_devices", need if need <= MOST_CPU_DEVICES else 1)
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        jax.config.update("jax_compilation_cache_dir", os.path.join(home, "folio", "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    gc.set_threshold(50_000)  # tracing makes many objects, but almost no garbage
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # if platforms are named but no device is found
        asked = os.environ.get("JAX_PLATFORMS")
        what = first_line(error).replace("AssertionError", "no device was found")
        raise ValueError(f"JAX does not start: {what} (JAX_PLATFORMS is {asked!r})") from None
