"""The tiny random models of transformers that the fixtures are made of: a file a family.

Each file has VARIANTS, by name. No number of devices divides the heads, the widths or the
vocabularies; in some variant there are fewer key/value heads than devices; and the dimensions of
one variant are distinct: equal sizes hide swapped axes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers


class Variant(NamedTuple):
    seed: int
    config: transformers.PretrainedConfig
    dtype: torch.dtype = torch.float32
    hub: bool = False  # config.json as it is published, not as transformers 5 writes it
    shard: str = "1GB"
    rewrite: Callable[[Path], None] | None = None  # into another layout that is published
    finish: Callable[[Path], None] | None = None  # what transformers cannot read, once it is done
    fp8_scales: torch.dtype | None = None  # the projections are stored in fp8, with such scales
    mxfp4: bool = False  # experts in 4 bits
    mtp: bool = False  # with a layer that drafts tokens


def yarn_rope(theta: float, factor: float, original: int, **more: Any) -> dict[str, Any]:
    return dict(
        rope_type="yarn",
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        **more,
    )
