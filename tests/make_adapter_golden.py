"""Writes LoRA adapters of random numbers for fixtures, and what PEFT computes with them, to
tests/fixtures/adapters/<name>.

    python tests/make_adapter_golden.py [name ...]

Needs peft besides what make_golden.py needs. Each directory is as save_pretrained writes it, and
has a golden.npz as make_golden.py describes it: for the prompts of the base model, without a
continuation. The logits are those of the unmerged model; merging must not change them. If a base
model is stored in bf16, they are those of the model that PEFT merged in bf16.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from make_golden import LENGTHS

FIXTURES = Path(__file__).parent / "fixtures"
EVERY = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# The fixture that an adapter belongs to, and its settings. The ranks are distinct.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "names": (
        "llama3/scaled",
        dict(
            r=5,
            lora_alpha=7,
            target_modules=EVERY,
            use_rslora=True,
            rank_pattern={"down_proj": 2, r"layers\.0\.self_attn\.q_proj": 3},
            alpha_pattern={"model.layers.1.mlp.up_proj": 3, "v_proj": 11},
            modules_to_save=["lm_head", "post_attention_layernorm"],
        ),
    ),
    "pattern": (
        "llama3/scaled",
        dict(r=3, lora_alpha=4, target_modules=r".*(embed_tokens|1\.self_attn\.[kv]_proj|lm_head)"),
    ),
    "layers": (
        "qwen3/tied",
        dict(
            r=4,
            lora_alpha=6,
            target_modules=EVERY,
            layers_to_transform=[1],
            layers_pattern="layers",
        ),
    ),
    "experts": (
        "qwen3/moe",
        dict(
            r=3,
            lora_alpha=5,
            target_modules=["q_proj", "o_proj"],
            target_parameters=[*EXPERTS, "mlp.gate.weight"],
            rank_pattern={"experts.down_proj": 2},
            alpha_pattern={r".*\.gate_up_proj": 4},
        ),
    ),
    "stacks": (
        "gpt_oss/plain",
        dict(
            r=4,
            lora_alpha=6,
            target_modules=["q_proj", "v_proj"],
            target_parameters=[*EXPERTS, "router.weight"],
            rank_pattern={"experts.gate_up_proj": 2},
        ),
    ),
    "down": (
        "gpt_oss/plain",
        dict(r=3, lora_alpha=6, target_modules=[], target_parameters=["experts.down_proj"]),
    ),
    "turned": ("gpt2/hub", dict(r=3, lora_alpha=5, target_modules=["c_attn", "c_proj", "c_fc"])),
    "bf16": ("llama3/bf16_sharded", dict(r=4, lora_alpha=8, target_modules="all-linear")),
}


@torch.no_grad()
def write(name: str) -> None:
    base, settings = ADAPTERS[name]
    directory = FIXTURES / "adapters" / name
    shutil.rmtree(directory, ignore_errors=True)
    is_bf16 = "bf16" in base
    options: Any = dict(attn_implementation="eager", experts_implementation="eager")
    if "moe" not in base and "oss" not in base:
        del options["experts_implementation"]
    options["dtype"] = torch.bfloat16 if is_bf16 else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(FIXTURES / base, **options)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    for key, x in model.named_parameters():
        if "lora_" in key:  # multiples of 1/32: sums of products are exact, so all round alike
            x.copy_(torch.randint(-4, 5, x.shape, generator=generator) / 32)
        elif "modules_to_save" in key:
            x.add_(torch.randn(x.shape, generator=generator) / 32)
    model.save_pretrained(directory)
    (directory / "README.md").unlink()
    file = directory / "adapter_config.json"
    config = json.loads(file.read_text()) | dict(base_model_name_or_path=f"tests/fixtures/{base}")
    for key, value in config.items():  # PEFT writes sets in an order of their own
        if isinstance(value, list) and key != "layers_to_transform":
            config[key] = sorted(value)
    file.write_text(json.dumps(config, indent=2) + "\n")

    golden = dict(np.load(FIXTURES / base / "golden.npz"))
    golden = {key: golden[key] for n in LENGTHS for key in (f"tokens_{n}", f"greedy_{n}")}

    def logits(model: Any) -> dict[str, np.ndarray]:
        prompts = {n: torch.tensor(golden[f"tokens_{n}"])[None].long() for n in LENGTHS}
        return {f"logits_{n}": model(ids).logits[0].numpy() for n, ids in prompts.items()}

    # The saved adapter is what counts.
    fresh = transformers.AutoModelForCausalLM.from_pretrained(FIXTURES / base, **options)
    before = {} if is_bf16 else logits(fresh)
    model = peft.PeftModel.from_pretrained(fresh, directory).eval()
    unmerged = {} if is_bf16 else logits(model)
    merged = logits(model.merge_and_unload().float())
    for n, x in unmerged.items():
        error, change = abs(x - merged[n]).max(), abs(x - before[n]).max()
        print(
            f"{name} {n}: merging changes {error:.1e}, the adapter {change:.2f}, of {x.std():.2f}"
        )
        assert error < 4e-5 and change > 0.1
    np.savez_compressed(directory / "golden.npz", **golden, **(unmerged or merged))
    print(f"{name}: {sum(f.stat().st_size for f in directory.iterdir()) / 1e3:.0f} kB")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or ADAPTERS:
        write(chosen)
