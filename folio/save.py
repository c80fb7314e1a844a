"""Writes a model's weights as a published checkpoint: so that what was fine-tuned can be read by
this library and by Hugging Face transformers.

    from folio.save import save
    save(model._replace(weights=weights), "my-checkpoint")
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from common.loading.checkpoint import stored_layout
from common.loading.files import read_json
from common.loading.hub import is_of_checkpoint
from common.loading.matching import fill, row_of, rows_by_path
from common.loading.packed import declare
from common.loading.reading import is_swapped, positions
from common.loading.shape import read_model_config
from common.names import Axes, Order, Transform
from common.quant import Transposed, is_stored
from common.serving.load import Model
from common.sharding import model_shards
from common.weights import by_path, is_weight

PLAIN = ("float32", "float16", "bfloat16")  # the dtypes of weights that are not quantised
DTYPE_KEYS = ("torch_dtype", "dtype")  # of config.json, by which readers choose
LARGEST = 5 * 10**9  # bytes of a file; host memory holds one file at a time


def published(name: str, x: np.ndarray, shape: tuple[int, ...], transform: Transform) -> np.ndarray:
    """Undoes what loading does to a tensor: its blocks come back in order, once each; padding and
    copies are cut off. `shape` is that of the weight on one device. ValueError if anything would be
    lost with them: training on such a mesh changes each copy on its own, and padding, too."""
    loaded = x
    if isinstance(transform, Order):
        first = {b: i for i, b in reversed([*enumerate(transform.blocks)]) if b >= 0}
        starts = np.array([first[b] for b in sorted(first)]) * transform.size
        x = x.take((starts[:, None] + np.arange(transform.size)).ravel(), axis=transform.axis)
    x = x[tuple(map(slice, shape))]
    if not np.array_equal(laid_out(x, loaded.shape, transform), loaded):
        why = "its copies differ, or its padding is not zero, as after training on this mesh"
        raise ValueError(f"{name}: {why}; train on one that neither copies nor pads heads")
    if transform is Axes.SPLIT:
        x = x.reshape(*x.shape[:-1], -1, 16)  # MXFP4: 32 numbers of 4 bits share a scale
    return np.ascontiguousarray(x.swapaxes(-1, -2) if is_swapped(transform) else x)


def laid_out(x: np.ndarray, shape: tuple[int, ...], transform: Transform) -> np.ndarray:
    """A published tensor with the copies and the padding that loading gives it."""
    for axis, n in enumerate(shape):
        order = transform if isinstance(transform, Order) and transform.axis == axis else None
        source = positions(x.shape[axis], n, order)
        if not np.array_equal(source, np.arange(x.shape[axis])):
            zero = np.zeros_like(x.take([0], axis))
            x = np.concatenate([x, zero], axis).take(np.where(source < 0, -1, source), axis)
    return x


def tensors_of(model: Model, dtype: DTypeLike | None) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each published name and its tensor. ValueError if the weights were quantised here."""
    layout, table = declare(model.module, model.config, model_shards(model.mesh))
    whole = by_path(stored_layout(declare(model.module, model.config)[0]))
    rows = rows_by_path(table)

    expected = stored_layout(layout)

    def plain(declared: Any, w: Any) -> Any:
        turned = isinstance(w, Transposed) and not isinstance(declared, Transposed)
        return w.values.swapaxes(-1, -2) if turned else w

    leaf = lambda x: is_weight(x) or is_stored(x)
    forms, stored = (jax.tree.leaves(x, is_leaf=leaf) for x in (expected, model.weights))
    if len(forms) != len(stored):
        raise ValueError(f"the model has {len(stored)} weights, but its config wants {len(forms)}")
    arrays = [plain(*both) for both in zip(forms, stored, strict=True)]
    kinds = [type(x) if is_stored(x) else None for x in forms]
    if kinds != [type(x) if is_stored(x) else None for x in arrays]:
        raise ValueError("the weights were quantised while loading: load them without quant")
    for (path, w), x in zip(by_path(expected).items(), jax.tree.leaves(arrays), strict=True):
        name, transform = row_of(path, rows)
        host, shape = np.asarray(x), whole[path].shape
        if host.shape != w.shape:
            raise ValueError(f"{path} has shape {host.shape}, not {w.shape}")
        if w.dtype is None and str(host.dtype) not in PLAIN:
            raise ValueError(f"{path} has dtype {host.dtype}, not one of {', '.join(PLAIN)}")
        if dtype is not None and host.dtype in (np.float32, jax.numpy.bfloat16):
            with np.errstate(over="ignore"):
                host = host.astype(dtype)
        if jax.numpy.issubdtype(host.dtype, jax.numpy.inexact) and not np.isfinite(host).all():
            raise ValueError(f"{path} has numbers that are NaN or infinite in {host.dtype}")
        if "*" in name:
            for e, one in enumerate(host):
                yield (own := fill(name, [str(e)])), published(own, one, shape[1:], transform)
        else:
            yield name, published(name, host, shape, transform)


def save(model: Model, directory: str | Path, dtype: DTypeLike | None = None) -> None:
    """Writes the weights under their published names and shapes into a new directory, in files of
    at most 5 GB, with the config and the tokenizer of the checkpoint that was loaded. What is not
    loaded, such as a vision tower, is not written.

    Args:
      dtype: of plain weights; None: as they are in memory. config.json names that of most.

    ValueError if weights were quantised while loading, have other shapes or dtypes or are not
    finite, if copies that the mesh needs differ, if the config is not that of the checkpoint, which
    is copied, if there is no checkpoint, or if there are several processes.
    """
    target = Path(directory)
    if dtype is not None and str(np.dtype(dtype)) not in PLAIN:
        raise ValueError(f"save writes one of {', '.join(PLAIN)}, not {dtype}")
    if jax.process_count() > 1:
        raise ValueError("save works in one process, which must reach all devices")
    if model.directory is None:
        raise ValueError("random weights have no config.json: save needs a loaded checkpoint")
    hf = read_json(model.directory / "config.json")
    if read_model_config(model.module, hf) != model.config:
        raise ValueError("the config was changed: save would write that of the checkpoint")
    if model.weights is None:
        raise ValueError("the model has no weights: call load, or read_weights")
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty: save writes into a new directory")
    try:
        write_into(target, model, hf, dtype)
    except BaseException:  # half a checkpoint is none
        shutil.rmtree(target, ignore_errors=True)
        raise


def write_into(target: Path, model: Model, hf: dict[str, Any], dtype: DTypeLike | None) -> None:
    """Writes all files of `save`. `hf` is the checkpoint's config.json."""
    assert model.directory is not None
    files, held, size = dict[str, str](), dict[str, np.ndarray](), 0
    stored = Counter[str]()  # bytes of each plain dtype

    def write() -> None:
        file = f"model-{len({*files.values()}) + 1:05}.safetensors"
        save_file(held, target / file, metadata=dict(format="pt"))
        files.update(dict.fromkeys(held, file))
        held.clear()

    for name, tensor in tensors_of(model, dtype):
        if held and size + tensor.nbytes > LARGEST:
            write()
            size = 0
        held[name], size = tensor, size + tensor.nbytes
        stored[str(tensor.dtype)] += tensor.nbytes if str(tensor.dtype) in PLAIN else 0
    write()
    total = dict(total_size=sum((target / file).stat().st_size for file in {*files.values()}))
    index = dict(metadata=total, weight_map=files)
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    for file in model.directory.iterdir():
        if is_of_checkpoint(file) and "safetensors" not in file.name:
            shutil.copy(file, target / file.name)
    for part in (hf, hf.get("text_config", {})):
        part |= {key: stored.most_common(1)[0][0] for key in DTYPE_KEYS if key in part}
    (target / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
