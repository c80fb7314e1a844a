"""Makes tests/fixtures/rope.npz: what transformers computes of positions in long contexts.

    pip install torch==2.13.0 transformers    # beside what the project needs
    python tests/make_rope_fixture.py

For a published size of each family it holds the name of the size, the frequencies, and cosines and
sines at POSITIONS.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

POSITIONS = [0, 4000, 8191, 8192, 40_000, 131_071, 139_999]
SIZES = {  # the size, transformers' module, and the prefix of its classes
    "llama3": ("llama3.1-8b", "llama", "Llama"),
    "qwen3": ("qwen3-8b", "qwen3", "Qwen3"),
    "gpt_oss": ("gpt-oss-20b", "gpt_oss", "GptOss"),
    "llama4": ("llama-4-scout", "llama4", "Llama4Text"),
    "deepseek_r1": ("deepseek-r1", "deepseek_v3", "DeepseekV3"),
    "kimi_k2": ("kimi-k2-instruct", "deepseek_v3", "DeepseekV3"),
    "qwen3_5": ("qwen3.5-9b", "qwen3_5", "Qwen3_5Text"),
}


def main() -> None:
    arrays: dict[str, Any] = dict(positions=np.array(POSITIONS, np.int32))
    for family, (size, name, prefix) in SIZES.items():
        hf = importlib.import_module(f"{family}.shapes").SHAPES[size]
        hf = {**hf.get("text_config", hf)}
        hf.pop("model_type", None)
        if "attn_temperature_tuning" in hf:  # published as 4, which transformers 5 refuses
            hf["attn_temperature_tuning"] = bool(hf["attn_temperature_tuning"])
        nested = name in ("llama4", "qwen3_5")
        config = CONFIG_MAPPING[f"{name}_text" if nested else name](**hf)
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        rotary = getattr(module, f"{prefix}RotaryEmbedding")(config)
        result = rotary(torch.zeros(1, len(POSITIONS), 8), torch.tensor([POSITIONS]))
        pair = result if isinstance(result, tuple) else (result.real, result.imag)
        arrays[f"{family}_size"] = np.array(size)
        arrays[f"{family}_frequency"] = rotary.inv_freq.numpy()
        for kind, x in zip(("cos", "sin"), pair, strict=True):  # some have each pair twice
            arrays[f"{family}_{kind}"] = x[0, :, : len(rotary.inv_freq)].numpy()
    np.savez_compressed(ROOT / "tests" / "fixtures" / "rope.npz", **arrays)


if __name__ == "__main__":
    main()
