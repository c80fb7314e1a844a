"""Keeps a cache of compiled programs between runs."""

import atexit
import contextlib
import json
import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import jax

from common.loading.files import first_line

RECORD = "entries.json"  # lies beside the cached programs


def keep_programs() -> None:
    """Turns on JAX's persistent compilation cache, if there is a place for it."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not home.is_absolute():  # the XDG standard says to ignore it then
            home = Path.home() / ".cache"
        folder = home / "folio" / "programs"
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
        bad = damaged(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        sys.stderr.write(f"[compiled programs are not kept: {first_line(error)}]\n")
        return
    drop(bad)
    drop_what_fails(folder)
    atexit.register(record_entries, folder)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def signatures(folder: Path) -> dict[str, list[int]]:
    """Returns the size and time of each entry, by name. Once written, an entry never changes."""
    entries = {path.name: path.lstat() for path in folder.glob("*-cache")}
    return {name: [status.st_size, status.st_mtime_ns] for name, status in entries.items()}


def record_entries(folder: Path) -> None:
    """Records all entries: JAX does not notice if one has come to hold another program."""
    part = folder / f"{RECORD}.{os.getpid()}"
    with contextlib.suppress(OSError):
        try:
            part.write_text(json.dumps(signatures(folder)))
            part.replace(folder / RECORD)
        finally:
            part.unlink(missing_ok=True)  # what a full disk took of it


def damaged(folder: Path) -> list[Path]:
    """Returns entries that are not readable files, or empty, or not as they were recorded."""
    recorded, now = None, signatures(folder)
    with contextlib.suppress(OSError, ValueError, RecursionError):
        recorded = json.loads((folder / RECORD).read_text())
    if not isinstance(recorded, dict):
        recorded = {}
    return [
        path
        for path in map(folder.joinpath, now)
        if not (path.is_file() and now[path.name][0] and os.access(path, os.R_OK))
        or recorded.get(path.name, now[path.name]) != now[path.name]
    ]


def drop(entries: list[Path]) -> None:
    """Removes entries of the cache, because JAX neither uses nor replaces bad ones."""
    for entry in entries:
        with contextlib.suppress(OSError):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if entries:
        names = ", ".join(sorted({entry.name.split("-")[0] for entry in entries}))
        sys.stderr.write(f"[dropped a damaged entry of {entries[0].parent}: {names}]\n")


def drop_what_fails(folder: Path) -> None:
    """Drops entries that JAX cannot read or write, instead of showing its warning. The warning has
    only the name of the program. If reading fails, all entries of that name are dropped, and JAX
    compiles the program; if writing fails, as on a full disk, those of this run."""
    show, before = warnings.showwarning, set(signatures(folder))
    told = False

    def dropping(message: Any, *rest: Any, **more: Any) -> None:
        nonlocal told
        found = re.match(
            r"Error (read|writ)ing persistent compilation cache .*'(\w+)': (.*)", str(message)
        )
        if found is None:
            return show(message, *rest, **more)
        entries = [*folder.glob(f"{found[2]}-*")]
        if found[1] == "read":
            return drop(entries)
        for entry in entries:
            if entry.name not in before:
                with contextlib.suppress(OSError):
                    entry.unlink()
        if not told:
            sys.stderr.write(f"[compiled programs are not kept: {found[3]}]\n")
            told = True

    warnings.showwarning = dropping
