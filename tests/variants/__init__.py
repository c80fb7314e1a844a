"""The tiny random transformers models from which the fixtures are made, one file per family.

Each file defines VARIANTS by name. No number of devices divides the heads, the widths or the
vocabularies. Some variants have fewer key/value heads than there are devices. The dimensions of
each variant are distinct, because equal sizes hide swapped axes.
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
    hub: bool = False  # config.json as published, not as transformers 5 writes it
    shard: str = "1GB"
    rewrite: Callable[[Path], None] | None = None  # converts the files to another published layout
    finish: Callable[[Path], None] | None = None  # last change, once transformers is done
    fp8_scales: torch.dtype | None = None  # if given, projections are fp8 with scales of this dtype
    mxfp4: bool = False  # the experts are stored in 4 bits
    mtp: bool = False  # has an MTP layer, which drafts tokens


def yarn_rope(theta: float, factor: float, original: int, **more: Any) -> dict[str, Any]:
    return dict(
        rope_type="yarn",
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        **more,
    )
