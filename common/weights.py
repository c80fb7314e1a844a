"""What a model file declares of its weights, and the trees that follow from it.

`weight_layout` of a model file returns a `Weights` of declarations. Each says the shape and the
partition of one weight, and which products use it, so that a chosen storage can be applied. The
loader, `shard_map`, the dry run and random weights all use this one tree.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from common.quant import BLOCKS, SPECS, Packed, Shape, Storage, Transposed, published_shapes
from common.sharding import P, Shards


class Weight(NamedTuple):
    shape: Shape  # of a matrix [out, in], in whatever form it is stored
    spec: PartitionSpec
    kind: Literal["array", "matrix", "table", "headwise", "stack"]
    published: type | Packed | None = None  # how a checkpoint holds it: Fp8, Mxfp4, ...
    dtype: DTypeLike | None = None  # None: the dtype of the model
    initial: float | None = None  # fills a new weight; None: random numbers


# These return Any because a declaration takes the place of a weight in the tree.


def norm(width: int, spec: PartitionSpec | None = None, initial: float = 1.0) -> Any:
    """The weights of a norm, replicated unless `spec` says otherwise; `initial` is neutral."""
    return Weight((width,), P() if spec is None else spec, "array", initial=initial)


def bias(shape: Shape, spec: PartitionSpec | None = None, dtype: DTypeLike | None = None) -> Any:
    """A bias, or another array that starts as zeros in a new model."""
    return Weight(shape, P() if spec is None else spec, "array", dtype=dtype, initial=0.0)


def array(shape: Shape, spec: PartitionSpec | None = None, dtype: DTypeLike | None = None) -> Any:
    """An array that is never quantised, such as a router."""
    return Weight(shape, P() if spec is None else spec, "array", dtype=dtype)


def matrix(shape: Shape, spec: PartitionSpec, published: type | None = None) -> Any:
    """A matrix [out, in] for `linear`."""
    return Weight(shape, spec, "matrix", published)


def vocab_rows(shape: Shape, spec: PartitionSpec) -> Any:
    """A matrix [V, D] with a row for each token of the vocabulary: the embedding, or the head."""
    return Weight(shape, spec, "table")


def headwise_matrix(shape: Shape, spec: PartitionSpec, published: type | None = None) -> Any:
    """The matrices of all heads, one after the other, [N * out, in]: for `headwise` or `linear`."""
    return Weight(shape, spec, "headwise", published)


def stack(shape: Shape, spec: PartitionSpec, published: type | None = None) -> Any:
    """The matrices [E, out, in] of all experts, for `ragged_dot`."""
    return Weight(shape, spec, "stack", published)


def is_weight(x: Any) -> bool:
    return isinstance(x, Weight)


def storage_for(weight: Weight, storage: Storage | None) -> Storage | None:
    """The storage in which a weight is kept if the user chose `storage`; None: as it is published.
    That is so, too, if `storage` does not replace the published form: 4 bits, for example."""
    while storage is not None and weight.kind not in storage.kinds:
        storage = storage.rest
    if storage is None or published_form(weight) not in (None, Transposed, *storage.requantizes):
        return None
    return storage


def published_form(weight: Weight) -> type | None:
    """The form in which a checkpoint holds a weight; None: a plain array."""
    published = weight.published
    return published.form if isinstance(published, Packed) else published


def published_arrays(weight: Weight) -> Any:
    """The arrays in which a checkpoint holds a weight, each declared as a plain array: the weight
    itself, or the fields of its published form."""
    form, published = published_form(weight), weight.published
    if form is None or published is None:
        return weight
    shapes = published_shapes(published, weight.shape)
    arrays = zip(shapes, SPECS[form](weight.spec), strict=True)
    return form(*(x and Weight(x[0], spec, "array", dtype=x[1]) for x, spec in arrays))


def by_path(tree: Any) -> dict[str, Weight]:
    """The declarations in a tree by their path, such as "layers.0.wq"."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_weight)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def specs_like(weights: Any, layout: Any) -> Any:
    """The specs of `weights` in any form, by their declarations; ValueError for other weights."""

    def specs(weight: Weight, stored: Any) -> Any:
        return SPECS[type(stored)](weight.spec) if type(stored) in SPECS else weight.spec

    try:
        return jax.tree.map(specs, layout, weights, is_leaf=is_weight)
    except ValueError:
        raise ValueError("the weights are not those of the config; see read_weights") from None


def check_divides(layout: Any, shards: Shards) -> None:
    """ValueError if a mesh cannot split a weight equally; in fp8 or 4 bits, into whole blocks."""
    for path, weight in by_path(layout).items():
        blocks = (*[1] * (len(weight.shape) - 2), *BLOCKS.get(published_form(weight), (1, 1)))
        for size, axes, block in zip(weight.shape, weight.spec, blocks, strict=False):
            n = math.prod(getattr(shards, axis) for axis in jax.tree.leaves(axes))
            if n > 1 and size % (n * block):
                whole = f" in whole blocks of {block}" if block > 1 else ""
                what = f"{size} does not divide over {n} devices{whole}"
                raise ValueError(f"{path} of shape {list(weight.shape)} cannot be split: {what}")
