"""How a model file says which published tensor becomes which of its weights.

`checkpoint_table` of a model file returns a `Table`, which `common/loading` matches with files.
"""

import enum
from collections.abc import Collection
from typing import NamedTuple

from common.quant import FP8_BLOCK
from common.sharding import Shards


class Order(NamedTuple):
    """Reorders a tensor along `axis`, so that each device's heads are neighbours.

    The axis is cut into blocks of `size` numbers. Block i of the weight is published block
    blocks[i], or zeros where that is -1.
    """

    axis: int
    size: int
    blocks: tuple[int, ...]
    swapped: bool = False  # the last two axes are stored the other way round


class Axes(enum.Enum):
    """Other ways in which the axes of a weight are stored."""

    SWAPPED = "the last two the other way round"
    SPLIT = "the last one as two"


class Same(NamedTuple):
    """The stored tensor repeats the weight at `path`, byte for byte, and is dropped."""

    path: str


class Dropped(NamedTuple):
    """The stored tensor is not loaded, if the files also hold `beside`, which it belongs to."""

    beside: str


class Holds(NamedTuple):
    """The stored tensor must hold these whole numbers, or one number everywhere, and is dropped."""

    numbers: tuple[int, ...]


Transform = Order | Axes | None
# A path into the model file's `Weights`, alone or with how its axes are stored; None: dropped.
Target = str | tuple[str, Transform] | Same | Dropped | Holds | None
# By published name, in which `*` stands for a number and a last `**` for any ending. If several
# rows match a name, the most specific wins: the name itself, then `prefix.**`, then a row that
# spells out the first number (the layer's) and has a `*` for the others, then one with `*` for all.
Table = dict[str, Target]


def weight_of(target: Target) -> tuple[str, Transform] | None:
    """The path and the transform of the weight that a tensor becomes; None if it becomes none."""
    if isinstance(target, str):
        return target, None
    return None if isinstance(target, Same | Dropped | Holds) else target


def multimodal(table: Table, others: Collection[str]) -> Table:
    """The table of a checkpoint that also has `others`: parts, by name, that are not loaded."""
    text = {f"language_model.{name}": target for name, target in table.items()}
    return text | {f"{part}.**": None for part in others}


def fp8_table(table: Table, projections: Collection[str], shards: Shards) -> Table:
    """The table of a checkpoint that stores its projections as 8-bit floats.

    Each row whose name ends in one of `projections` becomes two: the values, and
    `<name>_scale_inv` for the scales of their blocks.
    """
    fp8 = dict(table)
    for name, target in table.items():
        row = weight_of(target)
        if row is not None and name.removesuffix(".weight").split(".")[-1] in projections:
            path, order = row
            in_blocks = None  # on one device the published order stays
            if isinstance(order, Order) and shards.model > 1:
                in_blocks = order._replace(size=order.size // FP8_BLOCK)
            fp8[name] = f"{path}.values", order
            fp8[f"{name}_scale_inv"] = f"{path}.scale", in_blocks
    return fp8
