"""Finds the config.json that a name stands for: that of a directory or a hub repository, a lone
file, a published size, or the embedded model."""

import importlib
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from common.config import wrong
from common.loading.files import is_there, read_json, read_json_if_there
from common.loading.hub import ADAPTER, FILES, locate
from common.loading.stored import FLOATS, open_tensors


def folder(module: ModuleType) -> Path:
    return Path(str(module.__file__)).parent


def published_sizes(module: ModuleType) -> dict[str, dict[str, Any]]:
    """Returns the configs of the family's published sizes by name: `SHAPES` in its shapes.py."""
    there = (folder(module) / "shapes.py").exists()
    return importlib.import_module(f"{module.__package__}.shapes").SHAPES if there else {}


def families_of(hf: dict[str, Any], root: Path) -> list[str]:
    """Returns the folders in `root` whose model.py computes a config.json, or its text_config."""
    kinds = [x.get("model_type") for x in (hf, hf.get("text_config")) if isinstance(x, dict)]
    either = "|".join(re.escape(str(x)) for x in kinds)
    accepts = re.compile(rf'model_types=\([^)]*"({either})"')
    files = sorted(root.glob("*/model.py"))
    return [x.parent.name for x in files if accepts.search(x.read_text("utf-8", "replace"))]


def read_model_config(module: ModuleType, hf: dict[str, Any]) -> Any:
    """Returns the model file's Config for a parsed config.json. If another family computes such
    checkpoints, the error says which command runs them."""
    try:
        return module.config_from_hf(hf)
    except ValueError as error:
        own = folder(module)
        families = families_of(hf, own.parent)
        if not families or own.name in families:
            raise error
        what = f"is another family's; run it with python -m {families[0]}.main"
        raise wrong(f"model_type={hf.get('model_type')!r} {what}") from None


def read_shape(
    module: ModuleType,
    ckpt: str | None,
    revision: str | None = None,
    random: bool = False,
    config_only: bool = False,
) -> tuple[dict[str, Any], Path | None]:
    """Returns the parsed config.json and its directory; the directory is None for a config alone.
    Downloads a hub repository's `FILES`, or only its config.json if `config_only`."""
    if ckpt is None:
        ckpt = str(folder(module) / "embedded")
        if not Path(ckpt).is_dir():
            raise ValueError(f"{module.__package__} ships no model: give a checkpoint (--ckpt)")
    elif random:
        sizes, file = published_sizes(module), Path(ckpt)
        if ckpt in sizes or (file.suffix == ".json" and file.is_file()):
            if revision is not None:
                raise ValueError(f"{ckpt} is not a hub repository and has no revision {revision!r}")
            return sizes.get(ckpt) or read_json(file), None
        if "/" not in ckpt and not file.exists():
            raise ValueError(f"{ckpt!r} is no file, no directory, and none of {', '.join(sizes)}")
    elif not Path(ckpt).exists() and ckpt in published_sizes(module):
        raise ValueError(f"{ckpt} is a size, without weights: add --random, or give a checkpoint")
    directory = locate(ckpt, revision, ["config.json", ADAPTER] if config_only else FILES)
    if is_there(directory / ADAPTER) and not is_there(directory / "config.json"):
        raise ValueError(f"{ckpt} is an adapter: give it as --adapter, its base model as --ckpt")
    refuse_other_layouts(directory)
    within = [*directory.glob("*/config.json"), *directory.glob("snapshots/*/config.json")]
    if within and not is_there(directory / "config.json"):
        raise ValueError(f"{ckpt} is no checkpoint, but {min(within).parent} is one")
    return read_json(directory / "config.json"), directory


def refuse_other_layouts(directory: Path) -> None:
    """ValueError names files that are not made for transformers, by what only they have."""
    hf = read_json_if_there(directory / "config.json")
    own = [x for name in ("original", "consolidated*", "dtypes.json") for x in directory.glob(name)]
    what = f"{own[0].name} is for its authors' own code" if own and "model_type" not in hf else ""
    if hf.get("quantization") is not None:
        what = "MLX quantised these weights (quantization in config.json)"
    if is_there(directory / "hf_quant_config.json"):
        what = "NVIDIA's ModelOpt quantised these weights (hf_quant_config.json)"
    if what:
        instead = "give the model's plain files for transformers"
        raise ValueError(f"{directory}: {what}, which is not read; {instead}")


def stored_dtype(hf: dict[str, Any]) -> Any:
    return hf.get("dtype") or hf.get("torch_dtype")


def model_dtype(
    hf: dict[str, Any], directory: Path | None, asked: DTypeLike | None, on_cpu: bool = False
) -> jnp.dtype:
    """Returns `asked`, or else float32 for a float32 checkpoint and bfloat16 for any other; on CPU,
    float32 for a float16 checkpoint, too. ValueError if `asked` is neither of the two.

    The oldest config.json files name no dtype. Then the largest tensor decides, if `directory` is
    given; otherwise the dtype is bfloat16."""
    stored = stored_dtype(hf)
    if stored not in (None, *(names := [*map(str, FLOATS.values())])) and asked is None:
        raise wrong(f"dtype {stored!r} is none of {', '.join(names)}: give --dtype")
    if stored is None and directory is not None and asked is None:
        tensors = open_tensors(directory).values()
        largest = max(tensors, key=lambda tensor: math.prod(tensor.shape), default=None)
        stored = "float32" if largest is not None and largest.dtype == "F32" else "bfloat16"
    wide = stored == "float32" or (stored == "float16" and on_cpu)
    dtype = jnp.dtype(asked or ("float32" if wide else "bfloat16"))
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype {dtype} is neither float32 nor bfloat16")
    return dtype
