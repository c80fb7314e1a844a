"""Quantises the matrices of a tiny model, and packs them with the packages that define the formats:
AutoAWQ, AutoGPTQ and compressed-tensors.

The first two are imported without their __init__, which needs an older transformers.
"""

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packings import meaning
from safetensors.torch import load_file, save_file


def without_init(package: str) -> None:
    if package in sys.modules:
        return
    spec, module = importlib.util.find_spec(package), types.ModuleType(package)
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit(f"install {package} to write these fixtures")
    module.__path__ = list(spec.submodule_search_locations)
    sys.modules[package] = module


def scales_of(
    w: torch.Tensor, group: int, bits: int, symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a scale and an unsigned zero point for each group: [out, groups]."""
    parts, levels = w.reshape(len(w), -1, group), 2**bits - 1
    if symmetric:
        scale = (parts.abs().amax(-1) / (2 ** (bits - 1) - 0.5)).to(dtype)
        return scale, torch.full(scale.shape, 2.0 ** (bits - 1))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / levels).to(dtype)
    return scale, (-low / scale).round().clamp(1, levels)


def rounded(w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns w as numbers that the format has, so that a package rounds nothing."""
    group = w.shape[1] // scale.shape[1]
    step, zero = scale.float().repeat_interleave(group, 1), zero.repeat_interleave(group, 1)
    return ((w / step + zero).round().clamp(0, 2**bits - 1) - zero) * step


def awq(w: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    without_init("awq")
    from awq.modules.linear.gemm import WQLinear_GEMM

    scale, zero = scales_of(w, config["group_size"], 4, False, torch.float16)
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    linear.weight.data = rounded(w, scale, zero, 4)
    made = (scale.float().t().contiguous(), zero.t().contiguous())
    packed = WQLinear_GEMM.from_linear(linear, 4, config["group_size"], False, *made)
    return dict(qweight=packed.qweight, qzeros=packed.qzeros, scales=packed.scales)


def gptq(w: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    without_init("auto_gptq")
    from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear

    bits, group = config["bits"], config["group_size"]
    scale, zero = scales_of(w, group, bits, config["sym"], torch.float16)
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    linear.weight.data = rounded(w, scale, zero, bits)
    packed = QuantLinear(bits, group, w.shape[1], w.shape[0], False)
    packed.pack(linear, scale.float(), zero.clone(), None)
    index = torch.arange(w.shape[1], dtype=torch.int32) // group
    return dict(
        qweight=packed.qweight, qzeros=packed.qzeros, scales=packed.scales.half(), g_idx=index
    )


def compressed_tensors(w: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    (group,) = config["config_groups"].values()
    weights = group["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    state = {"weight": w}
    if config["format"] == "float-quantized":
        state["weight_scale"] = (w.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
        return FloatQuantizationCompressor.compress(state, scheme)
    bits, size = weights["num_bits"], weights["group_size"] or w.shape[1]
    scale, zero = scales_of(w, size, bits, weights["symmetric"], torch.bfloat16)
    state["weight_scale"] = scale
    if not weights["symmetric"]:
        state["weight_zero_point"] = (zero - 2 ** (bits - 1)).to(torch.int8)
    return PackedQuantizationCompressor.compress(state, scheme)


def fbgemm_fp8(w: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    scale = w.abs().amax(1, keepdim=True) / 448
    return dict(weight=(w / scale).to(torch.float8_e4m3fn), weight_scale=scale)


METHODS: dict[str, Callable[[torch.Tensor, Any], dict[str, torch.Tensor]]] = {
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": fbgemm_fp8,
}


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return (x if x.dtype in (torch.int32, torch.int64) else x.float()).numpy()


def matrices(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Returns the modules of a tensor with their matrices [out, in]. Llama 4 has all experts in one
    tensor [E, in, out], with gate and up next to each other. When quantised, each has its own."""
    if tensor.ndim == 2:
        return [(name.removesuffix(".weight"), tensor)]
    before, kind = name.rsplit(".", 1)
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return [
        (f"{before}.{e}.{part}", w)
        for e, expert in enumerate(tensor)
        for part, w in zip(kinds, expert.T.chunk(len(kinds)), strict=True)
    ]


def as_one(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The inverse of `matrices`."""
    if name.endswith(".weight"):
        return parts[0]
    n = 2 if name.endswith("gate_up_proj") else 1
    experts = [torch.cat(parts[i : i + n]).T for i in range(0, len(parts), n)]
    return torch.stack(experts).contiguous()


def pack(directory: Path, config: Any, is_packed: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a quantised checkpoint. In the file, replaces each matrix by the
    numbers that its packed form stands for."""
    stored, meant = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if not is_packed(name):
            stored[name] = meant[name] = tensor
            continue
        parts = {}
        for module, w in matrices(name, tensor):
            tensors = METHODS[config["quant_method"]](w.float().contiguous(), config)
            stored |= {f"{module}.{end}": x.contiguous() for end, x in tensors.items()}
            numbers = meaning({end: to_numpy(x) for end, x in tensors.items()}, config)
            parts[module] = torch.from_numpy(np.ascontiguousarray(numbers))
        meant[name] = as_one(name, list(parts.values()))
    save_file(meant, directory / "model.safetensors", metadata={"format": "pt"})
    return stored


def write_packed(directory: Path, tensors: dict[str, torch.Tensor], config: Any) -> None:
    """Writes a quantised checkpoint: two files and their index."""
    (directory / "model.safetensors").unlink()
    names, files = sorted(tensors), {}
    for i, some in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, directory / file)
        files |= dict.fromkeys(some, file)
    index = json.dumps(dict(metadata={}, weight_map=files), indent=1)
    (directory / "model.safetensors.index.json").write_text(index + "\n")
    file = directory / "config.json"
    hf = json.loads(file.read_text()) | dict(quantization_config=config)
    file.write_text(json.dumps(hf, indent=2) + "\n")
