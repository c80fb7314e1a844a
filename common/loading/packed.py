"""The arrays that a quantised checkpoint holds, and their names.

A model file declares plain matrices and names one stored tensor for each. `common.packing` reads
which of them are quantised. This file replaces the declarations and the names of these.

Loaded matrices keep the published numbers. If a mesh splits a matrix in the middle of a group, the
groups become smaller, and each part of a group has its scale.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from common.loading.matching import fill, row_of, rows_by_path, target_of
from common.loading.reading import positions
from common.loading.stored import Tensors, Words
from common.names import Axes, Holds, Order, Table, Transform, weight_of
from common.packing import Packing, is_quantised
from common.quant import Grouped, Packed, Rowwise
from common.sharding import UNSPLIT, Shards
from common.weights import Weight, by_path, is_weight

KINDS = ("matrix", "headwise", "stack")
# Column j of eight is in the word at this place, counted in steps of four bits.
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


class Format(NamedTuple):
    # The tensors of a quantised matrix, by the last word of a name: a field of the form in which it
    # is stored; or "group", "shape" or "bias", which are not loaded, but must be as expected.
    fields: dict[str, str]
    rows_first: bool  # whether tensors are [out, in], and not [in, out]
    packed: dict[str, int]  # the axis along which numbers of a field share a word
    places: tuple[int, ...] | None = None  # of the numbers in a word; None: in order


FLOAT = Format({"weight": "values", "weight_scale": "scale"}, True, {})
QUANTS = dict(qweight="values", scales="scale", qzeros="zero")
INTEGERS = dict(
    weight_packed="values", weight_scale="scale", weight_zero_point="zero", weight_shape="shape"
)
FORMATS = {
    "awq": Format(QUANTS, False, dict(values=1, zero=1), AWQ),
    # AutoGPTQ writes biases of zeros where a model has none.
    "gptq": Format(QUANTS | {"g_idx": "group", "bias": "bias"}, False, dict(values=0, zero=1)),
    "pack-quantized": Format(INTEGERS, True, dict(values=1, zero=0)),
    "float-quantized": FLOAT,
    "fbgemm": FLOAT,
}


def declare(module: Any, config: Any, shards: Shards = UNSPLIT) -> tuple[Any, Table]:
    """The weights that a model file declares, and its table, for the checkpoint of `config`."""
    layout, table = module.weight_layout(config, shards), module.checkpoint_table(config, shards)
    packing: Packing | None = getattr(config, "packing", None)
    if packing is None:
        return layout, table
    whole, rows = by_path(module.weight_layout(config)), rows_by_path(table)
    declared, added, format = by_path(layout), Table(), FORMATS[packing.format]
    for path, weight in declared.items():
        name, order = row_of(path, rows)
        if not is_packed(packing, path, weight, name):
            continue
        if isinstance(order, Axes) or (order is not None and order.swapped):
            raise ValueError(f"config.json: {name} cannot be quantised in this family")
        if order is not None and order.blocks == tuple(range(len(order.blocks))):
            order = None  # it changes nothing
        (n_out, n_in), stem = whole[path].shape[-2:], name.removesuffix("weight")
        scales, of_groups = group_order(packing, weight, n_in, order, shards)
        declared[path] = weight._replace(published=published(packing, scales))
        checked = dict(shape=(n_out // len(halves(stem)), n_in), bias=(0,))
        checked["group"] = group_of_each(n_in, packing.group or n_in)
        if not packing.zero:
            checked["zero"] = (0,)
        for end, field in format.fields.items():
            if field in checked:
                added |= {half + end: Holds(checked[field]) for half in halves(stem)}
            else:
                added[stem + end] = f"{path}.{field}", field_order(field, format, order, of_groups)
        target, numbers = target_of(f"{stem}bias", table)
        bias, _ = weight_of(target) or ("", None)
        if fill(bias, numbers) in declared:  # the model's own
            added.pop(f"{stem}bias", None)
    tree = jax.tree.structure(layout, is_leaf=is_weight)
    return jax.tree.unflatten(tree, list(declared.values())), table | added


def published(packing: Packing, scales: int) -> Packed:
    """The form of a matrix with `scales` scales per row. Integers are `Grouped`, even with one such
    scale, because a product on CPU rounds the activations that multiply a `Rowwise` int8."""
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
    found = {is_quantised(packing, fill(x, [str(e)])) for x in halves(module) for e in experts}
    if len(found) > 1:
        raise ValueError(f"config.json: quantization_config quantises only some of {module}")
    is_joined = len(halves(module)) > 1 and not FORMATS[packing.format].rows_first
    if found == {True} and (module == name or is_joined):
        raise ValueError(f"config.json: {name} is not implemented with quantization_config")
    return found == {True}


def halves(name: str) -> list[str]:
    """The names of the tensors that the loader joins to the one with this name."""
    return list(dict.fromkeys(name.replace(".gate_up_", x) for x in (".gate_", ".up_")))


def group_order(
    packing: Packing, weight: Weight, width: int, order: Order | None, shards: Shards
) -> tuple[int, Order | None]:
    """How many scales each row of a matrix has, and the Order that makes them from the published
    ones. `width` is the published length of a row."""
    parts = math.prod(getattr(shards, axis) for axis in jax.tree.leaves(weight.spec[-1]))
    padded, own = weight.shape[-1], None if order is None or order.axis == 0 else order
    if packing.group is None:
        return parts, Order(0, 1, (0,) * parts) if parts > 1 else None
    if width % (group := packing.group):
        raise ValueError(f"config.json: rows of {width} are not whole groups of {group}")
    unit = math.gcd(group, padded // parts, own.size if own is not None else 0)
    if unit < min(group, 8):
        raise ValueError(f"rows of {width} in groups of {group} cannot be split over {parts}")
    groups = tuple((positions(width, padded, own)[::unit] // group).tolist())  # -1 where zeros are
    return len(groups), None if groups == tuple(range(width // group)) else Order(0, 1, groups)


def field_order(
    field: str, format: Format, order: Order | None, of_groups: Order | None
) -> Transform:
    """The transform of a field, which is [in, out], except the values of Rowwise. `order` is that
    of the plain matrix [out, in]."""
    rows_first = field == "values" and format is FLOAT
    own = order
    if field != "values" and (order is None or order.axis == 1):
        own = of_groups
    elif order is not None and not rows_first:
        own = order._replace(axis=1 - order.axis)
    if rows_first == format.rows_first:
        return own
    return Axes.SWAPPED if own is None else own._replace(swapped=True)


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
    format, found = FORMATS[packing.format], dict(tensors)
    places = format.places or tuple(range(32 // packing.bits))
    field_of = {name: format.fields.get(name.rpartition(".")[2], "") for name in tensors}
    for name, tensor in tensors.items():
        axis = format.packed.get(field_of[name])
        if axis is None or len(tensor.shape) != 2:
            continue
        if tensor.dtype != "I32":
            raise ValueError(f"{name} has dtype {tensor.dtype}, but packed numbers are I32")
        plus = packing.plus if field_of[name] == "zero" else 0
        words = Words(packing.bits, axis, places, plus, tensor.shape[1])
        shape = tuple(n * len(places) if i == axis else n for i, n in enumerate(tensor.shape))
        found[name] = tensor._replace(shape=shape, dtype="I8", words=words)
    for upper in [name for name in found if ".gate_proj." in name]:
        lower, whole = (upper.replace(".gate_", x) for x in (".up_", ".gate_up_"))
        if lower in found and target_of(whole, table)[0] != "":
            first, second = found.pop(upper), found.pop(lower)
            if second._replace(file=first.file, name=first.name, offset=first.offset) != first:
                raise ValueError(f"{lower} differs from {upper} in shape or dtype")
            shape = (2 * first.shape[0], *first.shape[1:])
            found[whole] = first._replace(shape=shape, parts=(first, second))
    return found
