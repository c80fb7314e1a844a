"""The arrays that a quantised checkpoint holds, and their names.

A model file declares plain matrices and names one stored tensor for each. `common.packing` reads
which of them are quantised. This file replaces the declarations and the names of these.

Loaded matrices keep the published numbers. If a mesh splits a matrix in the middle of a group, the
groups become smaller, and each part of a group has its scale.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.loading.matching import fill, rows_by_path, starred, targets_of
from common.loading.stored import Tensors, Words
from common.names import Axes, Holds, Order, Table, Target, Transform
from common.packing import Packing
from common.quant import Grouped, Packed, Rowwise
from common.sharding import EXPERT, TENSOR, UNSPLIT, Shards
from common.weights import Weight, by_path, is_weight

KINDS = ("matrix", "headwise", "stack")
CHECKED = ("group", "shape", "bias")  # of the parts: what must be as expected, and is not loaded
# Column j of eight is in the word at this place, counted in steps of four bits.
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


class PackedTensor(NamedTuple):
    """A tensor that a file holds for a matrix."""

    field: str  # of the form in which the matrix is stored, or one of CHECKED
    packed: int | None = None  # the axis along which several numbers share a word


class Format(NamedTuple):
    """The tensors of a quantised matrix, by the last word of their name."""

    parts: dict[str, PackedTensor]
    rows_first: bool  # whether tensors are [out, in], and not [in, out]
    places: tuple[int, ...] | None = None  # of the numbers in a word; None: in order


FLOAT = Format({"weight": PackedTensor("values"), "weight_scale": PackedTensor("scale")}, True)
FORMATS = {
    "awq": Format(
        {
            "qweight": PackedTensor("values", 1),
            "scales": PackedTensor("scale"),
            "qzeros": PackedTensor("zero", 1),
        },
        False,
        AWQ,
    ),
    "gptq": Format(
        {
            "qweight": PackedTensor("values", 0),
            "scales": PackedTensor("scale"),
            "qzeros": PackedTensor("zero", 1),
            "g_idx": PackedTensor("group"),
            "bias": PackedTensor("bias"),  # AutoGPTQ writes zeros where a model has none
        },
        False,
    ),
    "pack-quantized": Format(
        {
            "weight_packed": PackedTensor("values", 1),
            "weight_scale": PackedTensor("scale"),
            "weight_zero_point": PackedTensor("zero", 0),
            "weight_shape": PackedTensor("shape"),
        },
        True,
    ),
    "float-quantized": FLOAT,
    "fbgemm": FLOAT,
}


def declare(module: Any, config: Any, shards: Shards = UNSPLIT) -> tuple[Any, Table]:
    """What a model file declares of its weights, and its checkpoint table, for the checkpoint that
    `config` describes."""
    layout, table = module.weight_layout(config, shards), module.checkpoint_table(config, shards)
    packing: Packing | None = getattr(config, "packing", None)
    if packing is None:
        return layout, table
    whole, rows = by_path(module.weight_layout(config)), rows_by_path(table)
    declared, added = by_path(layout), Table()
    paths = {name: path for path, (name, _) in rows.items()}
    for path, weight in declared.items():
        pattern, numbers = starred(path)
        row, transform = rows[pattern]
        name = fill(row, [*numbers, *"*" * row.count("*")])
        if is_packed(packing, path, weight, name):
            width = whole[path].shape[-1]
            order = None if is_published_order(transform) else transform
            if isinstance(order, Axes):
                raise ValueError(f"config.json: {name} cannot be quantised in this family")
            scales, of_groups = group_order(packing, weight, width, order, shards)
            declared[path] = weight._replace(published=published(packing, scales))
            rows_here = rows_of(packing, path, name, whole[path].shape[-2:], order, of_groups)
            bias = paths.get(row.removesuffix("weight") + "bias")
            has_bias = bias is not None and fill(bias, numbers) in declared
            added |= {n: x for n, x in rows_here.items() if not (has_bias and n.endswith(".bias"))}
    tree = jax.tree.structure(layout, is_leaf=is_weight)
    return jax.tree.unflatten(tree, list(declared.values())), table | added


def published(packing: Packing, scales: int) -> Packed:
    """The form of a matrix that has `scales` scales per row. Integers are always `Grouped`, even
    with one scale per row: a product on CPU rounds the activations that multiply a `Rowwise`
    int8."""
    if FORMATS[packing.format] is FLOAT:
        return Packed(Rowwise, jnp.float8_e4m3fn, scales)
    values = jnp.int4 if packing.bits == 4 else jnp.int8
    wide = jnp.bfloat16 if packing.format == "pack-quantized" else jnp.float32
    return Packed(Grouped, values, scales, packing.zero, wide)


def is_packed(packing: Packing, path: str, weight: Weight, name: str) -> bool:
    """Whether a weight is quantised. `name` is its stored name, with `*` for an expert."""
    # Only compressed-tensors may also quantise the head.
    if weight.kind not in KINDS and not (path == "head" and packing.format.endswith("quantized")):
        return False
    experts = range(weight.shape[0]) if "*" in name else range(1)
    module = name.removesuffix(".weight")
    found = {holds(packing, fill(half, [str(e)])) for half in halves(module) for e in experts}
    if len(found) > 1:
        raise ValueError(f"config.json: quantization_config quantises only some of {module}")
    joined = len(halves(module)) > 1 and not FORMATS[packing.format].rows_first
    if found == {True} and (module == name or joined):
        raise ValueError(f"config.json: {name} is not implemented with quantization_config")
    return found == {True}


def halves(name: str) -> list[str]:
    """The names of the tensors that the loader joins to the one with this name."""
    return list(dict.fromkeys(name.replace(".gate_up_", x) for x in (".gate_", ".up_")))


@cache
def holds(packing: Packing, module: str) -> bool:
    return packing.holds(module)


def is_published_order(transform: Transform) -> bool:
    """Whether a transform changes nothing."""
    if not isinstance(transform, Order):
        return transform is None
    return not transform.swapped and transform.blocks == tuple(range(len(transform.blocks)))


def group_order(
    packing: Packing, weight: Weight, width: int, order: Order | None, shards: Shards
) -> tuple[int, Order | None]:
    """How many scales each row of a matrix has, and the Order that makes them from the published
    ones. `width` is the published length of a row."""
    sizes = {EXPERT: shards.expert, TENSOR: shards.tensor}
    parts = math.prod(sizes[axis] for axis in jax.tree.leaves(weight.spec[-1]))
    padded = weight.shape[-1]
    if packing.group is None:
        return parts, Order(0, 1, (0,) * parts) if parts > 1 else None
    if width % (group := packing.group):
        raise ValueError(f"config.json: rows of {width} are not whole groups of {group}")
    source, unit = np.arange(padded), math.gcd(group, padded // parts)
    source[width:] = -1
    if order is not None and order.axis == 1:
        blocks = np.array(order.blocks)[:, None]
        source = np.where(blocks < 0, -1, blocks * order.size + np.arange(order.size)).ravel()
        unit = math.gcd(unit, order.size)
    if unit < min(group, 8):
        raise ValueError(f"rows of {width} in groups of {group} cannot be split over {parts}")
    firsts = source[::unit]
    groups = tuple(int(i) for i in np.where(firsts < 0, -1, firsts // group))
    return len(groups), None if groups == tuple(range(width // group)) else Order(0, 1, groups)


def rows_of(
    packing: Packing,
    path: str,
    name: str,
    shape: tuple[int, ...],
    order: Order | None,
    of_groups: Order | None,
) -> Table:
    """The rows of the table for the tensors of one matrix. `order` is that of its plain form."""
    (n_out, n_in), format = shape, FORMATS[packing.format]
    module, group = name.removesuffix("weight"), packing.group or n_in
    parts = halves(module)

    def transform(field: str) -> Transform:
        """The transform of a field. A field is [in, out], except the values of Rowwise."""
        rows_first = field == "values" and format is FLOAT
        own = order
        if own is not None and not rows_first:
            own = own._replace(axis=1 - own.axis)
        if field != "values" and (of_groups is not None or (own is not None and own.axis == 0)):
            own = of_groups
        if rows_first == format.rows_first:
            return own
        return Axes.SWAPPED if own is None else own._replace(swapped=True)

    def target(field: str) -> Target:
        if field == "group":
            return Holds(group_of_each(n_in, group))
        if field == "shape":
            return Holds((n_out // len(parts), n_in))
        if field == "bias" or (field == "zero" and not packing.zero):
            return Holds((0,))
        return f"{path}.{field}", transform(field)

    return {
        each + end: target(part.field)
        for end, part in format.parts.items()
        for each in (parts if part.field in CHECKED else [module])
    }


@cache
def group_of_each(width: int, group: int) -> tuple[int, ...]:
    return tuple(i // group for i in range(width))


def unpacked(tensors: Tensors, table: Table, packing: Packing | None) -> Tensors:
    """The tensors as the table describes them. A tensor of 32-bit words gets the shape of the
    numbers that are packed in it. Separate gate and up tensors become one, if the table has a row
    for the fused tensor. ValueError if packed words are not I32, or if gate and up differ in shape
    or dtype."""
    if packing is None:
        return tensors
    format = FORMATS[packing.format]

    def wide() -> Iterator[tuple[str, Any]]:
        for name, tensor in tensors.items():
            part = format.parts.get(name.rpartition(".")[2], PackedTensor(""))
            if part.packed is None or len(tensor.shape) != 2:
                yield name, tensor
                continue
            if tensor.dtype != "I32":
                raise ValueError(f"{name} has dtype {tensor.dtype}, but packed numbers are I32")
            places = format.places or tuple(range(32 // packing.bits))
            plus = packing.plus if part.field == "zero" else 0
            words = Words(packing.bits, part.packed, places, plus)
            numbers = list(tensor.shape)
            numbers[part.packed] *= len(places)
            kind = "I4" if part.field == "values" and packing.bits == 4 else "I8"
            yield name, tensor._replace(shape=tuple(numbers), dtype=kind, words=words)

    found = dict(wide())
    for upper in [name for name in found if ".gate_proj." in name]:
        lower, whole = (upper.replace(".gate_", x) for x in (".up_", ".gate_up_"))
        field = format.parts.get(upper.rpartition(".")[2], PackedTensor("")).field
        if lower in found and field not in CHECKED and targets_of(whole, table) is not None:
            first, second = found.pop(upper), found.pop(lower)
            if second._replace(file=first.file, name=first.name, offset=first.offset) != first:
                raise ValueError(f"{lower} differs from {upper} in shape or dtype")
            shape = (2 * first.shape[0], *first.shape[1:])
            found[whole] = first._replace(shape=shape, below=second)
    return found
