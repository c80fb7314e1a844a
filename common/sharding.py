"""The mesh, and how heads and widths that do not divide are laid out on it.

Every model uses one mesh of three axes. Slots are split over `data`. Dense layers, heads and the
vocabulary are split over MODEL, the axes `expert` and `tensor` together. Experts are split over
`expert`, and the inner width of each over `tensor`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

DATA, EXPERT, TENSOR = "data", "expert", "tensor"
MODEL = (EXPERT, TENSOR)
P: Any = PartitionSpec  # as Any, because specs take the place of arrays in typed trees


def make_mesh(
    data: int = 1, expert: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh over the first data * expert * tensor devices. ValueError if there are fewer, or if
    one of several processes has none of them: it could not follow the others."""
    devices = jax.devices() if devices is None else devices
    need, axes = data * expert * tensor, f"data={data},expert={expert},tensor={tensor}"
    if not isinstance(need, int | np.integer) or min(data, expert, tensor) < 1:
        raise ValueError(f"mesh axes must be whole numbers of at least 1: {axes}")
    if need > len(devices):
        raise ValueError(f"mesh {axes} needs {need} devices, but only {len(devices)} are available")
    grid = np.array(devices[:need]).reshape(data, expert, tensor)
    mesh = Mesh(grid, (DATA, *MODEL), axis_types=(AxisType.Auto,) * 3)
    if len({device.process_index for device in grid.flat}) < jax.process_count():
        what = f"leaves a process without work: give a --mesh of all {len(devices)} devices"
        raise ValueError(f"the mesh {axes_of(mesh)} {what}")
    return mesh


def parse_mesh(text: str) -> dict[str, int]:
    """ "tensor=8" as {"tensor": 8}. ValueError names what is wrong."""
    axes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        known = name in (DATA, *MODEL) and name not in axes
        if not (known and size.isdecimal() and len(size) < 6 and int(size)):
            what = "expected data=N,expert=N,tensor=N, each at most once, and N from 1 to 99999"
            raise ValueError(f"--mesh {text[:80]!r}: {what}")
        axes[name] = int(size)
    return axes


def axes_of(mesh: Mesh) -> str:
    """A mesh as `parse_mesh` takes it: "expert=8,tensor=2"."""
    return ",".join(f"{axis}={n}" for axis, n in mesh.shape.items() if n > 1) or "tensor=1"


class Shards(NamedTuple):
    """The sizes of the two mesh axes that split a model."""

    expert: int = 1
    tensor: int = 1

    @property
    def model(self) -> int:
        """Into how many parts a dense layer is split."""
        return self.expert * self.tensor


UNSPLIT = Shards()


def model_shards(mesh: Mesh) -> Shards:
    return Shards(*(mesh.shape[axis] for axis in MODEL))


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class Heads(NamedTuple):
    """The published numbers of the heads, in the order of the devices; -1 is a head of zeros."""

    query: tuple[int, ...]
    kv: tuple[int, ...]


def split_heads(num_heads: int, num_kv_heads: int, shards: int) -> Heads:
    """Lays out grouped-query heads so that every shard holds whole groups of one size.

    If there are fewer key/value heads than shards, each is repeated on several shards, which share
    its query heads. If the heads still do not divide, heads of zeros are added. The output
    projection has columns of zeros for them, so they add nothing.
    """
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot share {num_kv_heads} key/value heads evenly"
        )
    if shards > num_heads:
        what = f"{shards} devices, but the model has only {num_heads} query heads"
        raise ValueError(f"the mesh splits attention over expert * tensor = {what}")
    group = num_heads // num_kv_heads
    copies = max(1, shards // num_kv_heads)
    per_copy = -(-group // copies)
    kv, query = list[int](), list[int]()
    for k in range(num_kv_heads):
        kv += [k] * copies
        query += [k * group + g if g < group else -1 for g in range(copies * per_copy)]
    zeros = [-1] * (-len(kv) % shards)
    return Heads((*query, *(zeros * per_copy)), (*kv, *zeros))


def split_fused(num_heads: int, shards: int, parts: int = 3) -> tuple[int, ...]:
    """The order of the heads of one matrix that is published as all queries, then all keys, then
    all values. Every device gets its queries, its keys, then its values. -1: a head of zeros."""
    # [devices, 1, heads] and [parts, 1]: together the heads of each part, on each device
    query = np.reshape(split_heads(num_heads, num_heads, shards).query, (shards, 1, -1))
    first = num_heads * np.arange(parts)[:, None]
    return tuple(np.where(query >= 0, query + first, -1).ravel().tolist())
