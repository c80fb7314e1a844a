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


class Packing(NamedTuple):
    """How a variant's matrices are quantised; see tests/packers.py."""

    config: dict[str, Any]  # quantization_config
    packs: Callable[[str], bool]  # whether the tensor with this name is quantised


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
    packing: Packing | None = None
    mtp: bool = False  # has an MTP layer, which drafts tokens


def sized(names: str, sizes: tuple[int, ...], deviation: float = 0.25) -> dict[str, Any]:
    """Returns settings of a config: the three sizes that each has, and those with these names."""
    names = f"hidden_size num_attention_heads num_key_value_heads {names}"
    settings = dict(zip(names.split(), sizes, strict=True))
    return settings | dict(initializer_range=deviation, max_position_embeddings=512)


def projections(name: str) -> bool:
    return name.endswith("_proj.weight")


def compressed(format: str, ignore: list[str], bits: int, group: int | None, **more: Any) -> Any:
    """`quantization_config` as compressed-tensors writes it."""
    weights = dict(num_bits=bits, type="int", strategy="group" if group else "channel")
    weights |= dict(group_size=group, symmetric=True, actorder=None, block_structure=None)
    weights |= dict(dynamic=False, observer="minmax", observer_kwargs={}) | more
    scheme = dict(input_activations=None, output_activations=None, targets=["Linear"])
    groups = dict(config_groups={"group_0": scheme | dict(weights=weights)})
    status = dict(quant_method="compressed-tensors", quantization_status="compressed")
    return groups | dict(format=format, ignore=ignore, kv_cache_scheme=None) | status


def gptq(bits: int, group: int, **more: Any) -> dict[str, Any]:
    made = dict(damp_percent=0.01, static_groups=False, true_sequential=True, lm_head=False)
    settings = dict(bits=bits, group_size=group, desc_act=False, sym=True, quant_method="gptq")
    return settings | made | more


def awq(group: int) -> dict[str, Any]:
    settings = dict(bits=4, group_size=group, modules_to_not_convert=None, zero_point=True)
    return settings | dict(quant_method="awq", version="gemm")


def plain_rope(theta: float) -> dict[str, Any]:
    return dict(rope_type="default", rope_theta=theta)


def yarn_rope(
    theta: float, factor: float, original: int, fast: float, slow: float, **more: Any
) -> dict[str, Any]:
    rope = dict(rope_type="yarn", rope_theta=theta, factor=factor, beta_fast=fast, beta_slow=slow)
    return rope | dict(original_max_position_embeddings=original) | more


def llama3_rope(
    theta: float, factor: float, low: float, high: float, original: int
) -> dict[str, Any]:
    rope = dict(rope_type="llama3", rope_theta=theta, factor=factor)
    rope |= dict(low_freq_factor=low, high_freq_factor=high)
    return rope | dict(original_max_position_embeddings=original)
