"""The config.json that a name stands for: a directory, a repository of the hub, a lone file, a
published size, or the embedded model."""

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

from common.loading.files import read_json
from common.loading.hub import FILES, locate
from common.loading.stored import open_tensors


def folder(module: ModuleType) -> Path:
    """The folder of a model file."""
    return Path(str(module.__file__)).parent


def published_sizes(module: ModuleType) -> dict[str, dict[str, Any]]:
    """The configs of the family's published sizes by name: `SHAPES` of its shapes.py."""
    return importlib.import_module(f"{module.__package__}.shapes").SHAPES


def read_shape(
    module: ModuleType,
    ckpt: str | None,
    revision: str | None = None,
    random: bool = False,
    config_only: bool = False,
) -> tuple[dict[str, Any], Path | None]:
    """The parsed config.json and the directory that it lies in; None for a config alone. Of a
    repository of the hub everything is downloaded, unless `config_only`."""
    if ckpt is None:
        ckpt = str(folder(module) / "embedded")
        if not Path(ckpt).is_dir():
            raise ValueError(f"{module.__package__} ships no model: give a checkpoint (--ckpt)")
    elif random:
        sizes = published_sizes(module)
        if revision is not None and (ckpt in sizes or Path(ckpt).is_file()):
            raise ValueError(f"{ckpt} is no repository of the hub and has no revision {revision!r}")
        if ckpt in sizes:
            return sizes[ckpt], None
        if Path(ckpt).is_file():
            return read_json(Path(ckpt)), None
        if "/" not in ckpt and not Path(ckpt).is_dir():
            names = ", ".join(sizes)
            raise ValueError(f"{ckpt!r} is neither a config.json, a directory, nor one of {names}")
    directory = locate(ckpt, revision, ["config.json"] if config_only else FILES)
    return read_json(directory / "config.json"), directory


def stored_dtype(directory: Path | None, random: bool) -> str:
    """float32 if the largest tensor is: for a config.json that does not say, as the oldest do."""
    if directory is None or random:
        return "bfloat16"
    tensors = open_tensors(directory).values()
    largest = max(tensors, key=lambda tensor: math.prod(tensor.shape), default=None)
    return "float32" if largest is not None and largest.dtype == "F32" else "bfloat16"
