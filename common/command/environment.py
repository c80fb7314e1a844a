"""Prepares what a command finds around it: the standard streams, and JAX's settings."""

import gc
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import jax

from common.command.programs import keep_programs
from common.loading.files import first_line
from common.machines.hosts import Group

MOST_CPU_DEVICES = 1024  # in one process; 65,536 would take it a minute


def open_streams() -> None:
    """Opens the null device for each standard stream that the shell has closed. Otherwise a file
    that is opened later would take its place, and get what is printed."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(fd)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise ValueError("standard output is closed, so there is no place for the text")


def has_accelerator() -> bool:
    """Whether this machine may have a device besides its CPU. Looks only if libtpu is installed (it
    comes with the tests), because libtpu would search for a TPU."""
    if importlib.util.find_spec("libtpu") is None:
        return True
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    google = any(file.read_text().strip() == "0x1ae0" for file in vendors)
    return google or any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))


def check_xla_flags() -> None:
    """ValueError if XLA does not accept XLA_FLAGS. XLA would end this process at once, so another
    process asks it."""
    if os.environ.get("XLA_FLAGS"):
        ask = "from jaxlib import xla_client; xla_client.CompileOptions()"
        env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "0"}
        asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=env)
        if asked.returncode:
            what = asked.stderr.strip().partition("\n")[0].partition("] ")[2]
            raise ValueError(what if "XLA_FLAGS" in what else f"XLA_FLAGS: {what}")


def configure_jax(axes: dict[str, int], compile_cache: bool, group: Group | None) -> None:
    """Makes the settings that must come before the first device is used. ValueError if JAX finds no
    device."""
    if not os.environ.get("JAX_PLATFORMS") and not has_accelerator():
        # A libtpu that finds no TPU complains at length, and crashes the profiler.
        jax.config.update("jax_platforms", "cpu")
    # Undoes what was set for another program: 64-bit numbers, no compilation, no device.
    jax.config.update("jax_enable_x64", False)
    jax.config.update("jax_disable_jit", False)
    need = math.ceil(math.prod(axes.values()) / (group.rank.processes if group else 1))
    none = os.environ.get("JAX_NUM_CPU_DEVICES", "").strip() == "0"
    if none or (need > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", "")):
        # Virtual devices, to try a mesh on a laptop. Other platforms ignore this setting.
        jax.config.update("jax_num_cpu_devices", need if need <= MOST_CPU_DEVICES else 1)
    if compile_cache:
        keep_programs()
    gc.set_threshold(50_000)  # tracing makes many objects, but almost no garbage
    if group:
        group.start()
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # if platforms are named but no device is found
        asked = os.environ.get("JAX_PLATFORMS")
        hint = f" (JAX_PLATFORMS is {asked!r})" if asked else ""
        what = first_line(error).replace("AssertionError", "no device was found")
        raise ValueError(f"JAX does not start: {what}{hint}") from None
