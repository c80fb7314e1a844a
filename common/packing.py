"""Reads `quantization_config` of checkpoints whose matrices others have quantised.

A model file declares plain matrices, and keeps the `Packing` that this file returns in its Config.
From both, `common.loading.packed` derives the arrays that a checkpoint holds, and their names.
"""

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple

from common.config import check_settings, checked, is_published_in, missing, names_in, refusal, show

WHERE = "quantization_config."


class Packing(NamedTuple):
    """Which matrices are quantised, and how."""

    format: str  # the layout of the files: a key of FORMATS
    bits: int = 8
    group: int | None = None  # how many neighbours in a row share a scale; None: the whole row
    zero: bool = False  # whether groups have zero points
    plus: int = 0  # added to stored zero points; 1 for GPTQ v1, which stores them minus 1
    targets: tuple[str, ...] = (".*",)  # regular expressions of names of modules
    ignored: tuple[str, ...] = ()


@cache
def is_quantised(packing: Packing, module: str) -> bool:
    """Whether the matrix of the module with this published name is quantised."""
    is_target = any(re.match(x, module) for x in packing.targets)
    return is_target and not any(re.match(x, module) for x in packing.ignored)


def read_packing(hf: Mapping[str, Any], others: Collection[str] = ()) -> Packing | None:
    """What the config.json `hf` says of quantised matrices. None if it says nothing, or names one
    of the `others`, which the model file reads itself.

    ValueError for any other method, and for a setting that is unknown or not implemented.
    """
    values = checked(hf.get("quantization_config"), Mapping | None, WHERE[:-1])
    if values is None or (method := values.get("quant_method")) in others:
        return None
    if not isinstance(method, str) or method not in METHODS:
        raise refusal(f"{WHERE}quant_method", method, (*others, *METHODS))
    return METHODS[method](hf, values)


def awq(hf: Mapping[str, Any], values: Mapping[str, Any]) -> Packing:
    """AutoAWQ, arXiv 2306.00978: 4 bits with zero points."""
    needed = dict(bits=4, version=("gemm", "GEMM"), zero_point=True)
    # transformers also saves the settings of its own kernels.
    kernels = ("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")
    is_published_in("awq", hf, needed, ignored=("modules_to_not_convert", "group_size", *kernels))
    return Packing("awq", 4, group_size(values), zero=True, ignored=not_converted(values))


def gptq(hf: Mapping[str, Any], values: Mapping[str, Any]) -> Packing:
    """GPTQ, arXiv 2210.17323: 4 or 8 bits. Refuses desc_act, which scatters groups."""
    needed = dict(bits=(4, 8), sym=(True, False), desc_act=False)
    accepted: dict[str, Any] = dict(checkpoint_format=("gptq", "gptq_v2"), is_marlin_format=False)
    accepted |= dict(lm_head=False, pack_dtype="int32", modules_in_block_to_quantize=None)
    accepted |= dict(act_group_aware=False, hyb_act=False, mse=(0, False))  # GPTQModel's
    # How the file was made, and settings of kernels.
    made = """
        backend batch_size block_name_to_quantize cache_block_outputs cache_examples_on_gpu
        damp_auto_increment damp_percent dataset disable_exllama exllama_config group_size
        max_input_length meta model_file_base_name model_name_or_path model_seqlen
        module_name_preceding_first_block pad_token_id static_groups tokenizer true_sequential
        use_cuda_fp16 use_exllama
    """
    is_published_in("gptq", hf, needed, accepted, ignored=["dynamic", *made.split()])
    plus = 1 if values.get("checkpoint_format", "gptq") == "gptq" else 0
    group, zero = group_size(values), not values["sym"]
    return Packing("gptq", values["bits"], group, zero, plus, ignored=left_out(values))


def left_out(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The regular expressions of `dynamic`, whose modules are not quantised. They begin with "-:".
    ValueError for others, which change settings."""
    rules = {} if values.get("dynamic") is None else values["dynamic"]
    if not isinstance(rules, Mapping) or not all(rule.startswith("-:") for rule in rules):
        what = 'only rules that begin with "-:"'
        raise ValueError(f"config.json: {WHERE}dynamic={show(rules)} is not implemented, {what}")
    return tuple(expression(f"re:{rule[2:]}") for rule in rules)


def compressed_tensors(hf: Mapping[str, Any], values: Mapping[str, Any]) -> Packing:
    """The package compressed-tensors: integers in groups or rows, or 8-bit floats in rows."""
    needed = dict(format=("pack-quantized", "float-quantized"), quantization_status="compressed")
    others = ("sparsity_config", "moe_sparsity_config", "transform_config")
    accepted: dict[str, Any] = dict.fromkeys(others, (None, {})) | dict(kv_cache_scheme=None)
    made = ("config_groups", "ignore", "version", "global_compression_ratio")
    is_published_in("compressed-tensors", hf, needed, accepted, ignored=made)
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ValueError(f"config.json: {WHERE}config_groups={show(groups)} must be one group")
    ((name, group),) = groups.items()
    where = f"{WHERE}config_groups.{show(name)[1:-1]}."
    accepted = dict(format=(None, values["format"]), output_activations=None)
    read = ("input_activations", "targets", "weights")
    check_settings(group, where, accepted=accepted, ignored=read)
    if (activations := group.get("input_activations")) is not None:
        # Static scales of activations are stored in the file. Dynamic quantisation is accepted, and
        # not done: it only saves time, at the cost of accuracy.
        at = f"{where}input_activations."
        check_settings(activations, at, needed=dict(dynamic=True), ignored=activations)
    packing = weight_scheme(values["format"], group.get("weights"), f"{where}weights.")
    # All matrices are in modules of the class Linear.
    targets = (".*" if x == "Linear" else expression(x) for x in names_in(group, "targets", where))
    ignored = map(expression, names_in(values, "ignore", WHERE))
    return packing._replace(targets=tuple(targets), ignored=tuple(ignored))


def weight_scheme(format: str, weights: Any, where: str) -> Packing:
    """What a group of `config_groups` says of its weights."""
    strategy = checked(weights, Mapping, where[:-1]).get("strategy")
    # With actorder "weight", rows were quantised in another order, but stay where they were.
    orders = (None, False, "weight", "static")
    accepted: dict[str, Any] = dict(dynamic=False, actorder=orders, block_structure=None)
    # The files themselves say in which dtypes scales and zero points are stored.
    floats = (None, "torch.bfloat16", "torch.float16", "torch.float32")
    accepted |= dict(scale_dtype=floats, zp_dtype=(None, "torch.int8"))
    kind = "float" if format == "float-quantized" else "int"
    needed: dict[str, Any] = dict(type=kind, num_bits=8, strategy="channel", symmetric=True)
    if kind == "float" or strategy == "channel":
        accepted["group_size"] = (None, -1)
    else:
        needed |= dict(num_bits=(4, 8), strategy=("group", "channel"), symmetric=(True, False))
    ignored = ("group_size", "observer", "observer_kwargs")
    check_settings(weights, where, needed, accepted, ignored)
    group = group_size(weights, where) if strategy == "group" else None
    return Packing(format, weights["num_bits"], group, not weights["symmetric"])


def fbgemm_fp8(hf: Mapping[str, Any], values: Mapping[str, Any]) -> Packing:
    """FBGEMM: 8-bit floats with a scale for each row."""
    is_published_in("fbgemm_fp8", hf, ignored=("modules_to_not_convert", "activation_scale_ub"))
    return Packing("fbgemm", ignored=not_converted(values))


METHODS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Packing]] = {
    "awq": awq, "gptq": gptq, "compressed-tensors": compressed_tensors, "fbgemm_fp8": fbgemm_fp8
}  # fmt: skip


def group_size(values: Mapping[str, Any], where: str = WHERE) -> int | None:
    """`group_size`; None if it is -1, the whole row."""
    if "group_size" not in values:
        raise missing(f"{where}group_size")
    size = values["group_size"]
    if type(size) is int and size == -1:
        return None
    return checked(size, Annotated[int, range(8, 2**31, 8)], f"{where}group_size")


def not_converted(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Regular expressions of modules_to_not_convert and their parts. Names may lack a beginning."""
    names = names_in(values, "modules_to_not_convert", WHERE)
    return tuple(rf"(.*\.)?{re.escape(name)}(\..*)?$" for name in names)


def expression(name: str) -> str:
    """The regular expression of a name in the spelling of compressed-tensors."""
    text = name.removeprefix("re:")
    try:
        re.compile(text)
    except re.error:
        raise ValueError(f"config.json: {show(name)} is not a regular expression") from None
    return text if text != name else rf"(language_model\.)?{re.escape(name)}$"
