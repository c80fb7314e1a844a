"""Writes tiny random Hugging Face models, and the results of transformers with them, to
tests/fixtures/<family>/<variant>.

    python tests/make_golden.py [family[/variant] ...]

Needs torch, transformers and accelerate; the tests do not need them. For quantised files it also
needs compressed-tensors, and without their dependencies autoawq and auto-gptq: see packers.py.

tests/variants defines the models. Each one becomes a directory as save_pretrained writes it; some
are then rewritten to the spelling of the published repositories. The directory also has golden.npz.
For each prompt of n tokens it holds:

    tokens_n [n], logits_n [n, V] in float32 from eager attention, and greedy_n [NEW], the greedy
    continuation.
"""

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from packers import pack, write_packed
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel
from variants import Variant

TESTS = Path(__file__).parent
LENGTHS = (1, 2, 17, 40, 64)
NEW = 12
DISTINCT = 6  # fewest distinct tokens in a continuation: one that repeats itself tests little
ATTEMPTS = 2000  # prompts tried for each length
PROJECTIONS = (  # published in fp8
    *("_proj.weight", "_proj_with_mqa.weight"),
    *("in_proj_qkv.weight", "in_proj_z.weight"),
)
BESIDE_ROPE_SCALING = ("rope_theta", "partial_rotary_factor")  # older files keep these outside it
MARGIN = 0.005  # least gap between the two best logits of a greedy step: far above float noise


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Adds noise to norm weights and biases. In a fresh model they are ones and zeros, which would
    hide code that drops one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # most scores are then below zero
                buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.3 - 1)


def spell_as_on_the_hub(directory: Path) -> None:
    """Gives settings that transformers 5 renamed their older names. If only one family has such a
    setting, `rewrite` of its variants renames it."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    if "rope_theta" in rope:
        scaling = {} if rope["rope_type"] == "default" else rope
        beside = [key for key in rope if not scaling or key in BESIDE_ROPE_SCALING]
        config |= {key: rope.pop(key) for key in beside if key != "rope_type"}
        config["rope_scaling"] = scaling or None
    else:  # one setting per type of layer, which has no older spelling
        config["rope_parameters"] = rope
    config["torch_dtype"] = config.pop("dtype")
    if config.get("head_dim", 0) * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
    file.write_text(json.dumps(config, indent=2) + "\n")


def fp8_blocks(
    weight: torch.Tensor, scales: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a matrix as fp8 values, the scales of its blocks of 128 by 128, and their product."""
    N, K = weight.shape
    values, scale = torch.empty(N, K), torch.empty(-(-N // 128), -(-K // 128))
    exact = torch.empty(N, K)
    for i in range(0, N, 128):
        for j in range(0, K, 128):
            block = weight[i : i + 128, j : j + 128].float()
            step = (block.abs().max() / 448).to(scales).float()
            rounded = (block / step).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            values[i : i + 128, j : j + 128] = rounded
            exact[i : i + 128, j : j + 128] = rounded * step
            scale[i // 128, j // 128] = step
    return values.to(torch.float8_e4m3fn), scale.to(scales), exact


def quantize_fp8(directory: Path, scales: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns the tensors of a published fp8 checkpoint. In the file, replaces each matrix by the
    dequantised numbers, because transformers cannot read partial blocks."""
    stored, meant = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored[name] = meant[name] = tensor
        if name.endswith(PROJECTIONS) and "eh_proj" not in name:
            stored[name], stored[f"{name}_scale_inv"], meant[name] = fp8_blocks(tensor, scales)
    save_file(meant, directory / "model.safetensors", metadata={"format": "pt"})
    return stored


def write_fp8(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    file = directory / "config.json"
    config = json.loads(file.read_text())
    kept = (n.removesuffix(".weight") for n in tensors if not n.endswith((*PROJECTIONS, "_inv")))
    plain = sorted(["lm_head", *(n for n in kept if n.startswith("model.l"))])
    settings = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8")
    settings |= dict(weight_block_size=[128, 128], modules_to_not_convert=plain)
    config["quantization_config"] = settings
    file.write_text(json.dumps(config, indent=2) + "\n")


def store_in_mxfp4(directory: Path, seed: int) -> None:
    """Replaces the experts in the file by others, of random codes and random scales."""
    file, generator = directory / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        E, into, out = tensors.pop(name).shape
        for part, low, high, *rest in (("blocks", 0, 256, 16), ("scales", 120, 124)):
            shape = (E, out, into // 32, *rest)
            codes = torch.randint(low, high, shape, generator=generator)
            tensors[f"{name}_{part}"] = codes.to(torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    plain = "model.layers.*.self_attn model.layers.*.mlp.router model.embed_tokens lm_head".split()
    config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=plain)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# The last norm of an MTP layer: its name in transformers, and the published one.
MTP_NAMES = {"post_norm.weight": "shared_head.norm.weight"}


def mtp_parts(name: str, experts: int) -> list[list[str]]:
    """Returns the published names of the parts of one transformers parameter: a list per expert."""
    name = MTP_NAMES.get(name, name.removeprefix("mtp_block."))
    if not name.startswith("mlp.experts."):
        return [[name]]
    kinds = ("gate", "up") if "gate_up" in name else ("down",)
    return [[f"mlp.experts.{i}.{kind}_proj.weight" for kind in kinds] for i in range(experts)]


def add_mtp(directory: Path, model: Any, seed: int) -> None:
    """Adds a random MTP layer, which drafts tokens, to the files, under its published names."""
    layer, tensors = MtpModel(model, 1).layers[0].float(), {}
    deviation, generator = model.config.initializer_range, torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, deviation, generator=generator)
        else:
            parameter.fill_(1)
    randomize(layer, seed)
    at = f"model.layers.{model.config.num_hidden_layers}."
    for name, x in layer.state_dict().items():
        parts = mtp_parts(name, model.config.n_routed_experts)
        for names, w in zip(parts, x if len(parts) > 1 else [x], strict=True):
            for part, w_part in zip(names, w.chunk(len(names)), strict=True):
                dtype = torch.float32 if "correction_bias" in part else model.dtype
                tensors[f"{at}{part}"] = w_part.to(dtype).contiguous()
    stored = load_file(file := directory / "model.safetensors")
    tensors[f"{at}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    tensors[f"{at}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored | tensors, file, metadata={"format": "pt"})


def read_mtp(directory: Path, model: Any) -> Any:
    """Returns the MTP layer of the files as a transformers model, in float32."""
    mtp, tensors = MtpModel(model, 1), load_file(directory / "model.safetensors")
    at, layer = f"model.layers.{model.config.num_hidden_layers}.", mtp.layers[0].float()

    def tensor(name: str) -> torch.Tensor:
        parts = mtp_parts(name, model.config.n_routed_experts)
        each = [torch.cat([tensors[f"{at}{part}"].float() for part in names]) for names in parts]
        return torch.stack(each) if len(each) > 1 else each[0]

    layer.load_state_dict({name: tensor(name) for name in layer.state_dict()})
    return mtp.eval()


def drafted(model: Any, mtp: Any, tokens: np.ndarray) -> np.ndarray:
    """Returns the draft logits [n - 1, V] at each token but the last. They also depend on the token
    after it."""
    ids = torch.tensor(tokens)[None]
    hidden = model(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
    at = torch.arange(1, len(tokens))[None]
    x = mtp.forward_layer(0, hidden, at, None, input_ids=ids[:, 1:])
    return mtp._project_to_logits(x)[0].numpy()


def greedy(model: Any, tokens: np.ndarray) -> np.ndarray | None:
    """Returns the greedy continuation, computed by full forward passes without a cache. Returns
    None if rounding could decide a near tie, or if too few tokens are distinct."""
    sequence = torch.tensor(tokens)[None]
    for _ in range(NEW):
        best = model(sequence).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < MARGIN:
            return None
        sequence = torch.cat([sequence, best.indices[None, :1]], 1)
    continuation = sequence[0, -NEW:].numpy().astype(np.int32)
    return continuation if len(set(continuation.tolist())) >= DISTINCT else None


@torch.no_grad()
def write(directory: Path, variant: Variant) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    torch.manual_seed(variant.seed)
    text = variant.config.get_text_config()
    auto: Any = transformers.AutoModelForCausalLM
    if text is not variant.config:
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(variant.config)
    randomize(model, variant.seed)
    biases = {n: x.clone() for n, x in model.named_buffers() if n.endswith("correction_bias")}
    model.to(variant.dtype).save_pretrained(directory, max_shard_size=variant.shard)
    if biases and variant.dtype != torch.float32:  # published in float32, always
        tensors = load_file(file := directory / "model.safetensors")
        for name, bias in biases.items():  # in a multimodal file it has another beginning
            end = name.partition("layers")[2]
            tensors[next(stored for stored in tensors if stored.endswith(end))] = bias
        save_file(tensors, file, metadata={"format": "pt"})
    (directory / "generation_config.json").unlink()
    if variant.hub:
        spell_as_on_the_hub(directory)
    if variant.rewrite:
        variant.rewrite(directory)
    if variant.mtp:
        add_mtp(directory, model, variant.seed)
    fp8 = quantize_fp8(directory, variant.fp8_scales) if variant.fp8_scales else None
    packing = variant.packing
    packed = None if packing is None else pack(directory, packing.config, packing.packs)
    if variant.mxfp4:
        store_in_mxfp4(directory, variant.seed)

    # The goldens come from the files as they are now, in float32 whatever their dtype.
    options = dict(dtype=torch.float32, attn_implementation="eager")
    if hasattr(text, "num_experts_per_tok"):
        options["experts_implementation"] = "eager"
    model = auto.from_pretrained(directory, **options)
    mtp = read_mtp(directory, model) if variant.mtp else None
    rng = np.random.default_rng(variant.seed)
    golden = {}
    for n in LENGTHS:
        for _ in range(ATTEMPTS):
            tokens = rng.integers(text.vocab_size, size=n)
            if (continuation := greedy(model, tokens)) is not None:
                break
        else:
            raise SystemExit(f"{directory}: no prompt of {n} tokens gives a usable continuation")
        golden[f"tokens_{n}"] = tokens.astype(np.int32)
        golden[f"logits_{n}"] = model(torch.tensor(tokens)[None]).logits[0].numpy()
        golden[f"greedy_{n}"] = continuation
        if mtp is not None and n > 1:
            golden[f"drafts_{n}"] = drafted(model, mtp, tokens)
    if fp8 is not None:
        write_fp8(directory, fp8)
    if packed is not None and packing is not None:
        write_packed(directory, packed, packing.config)
    if variant.finish:
        variant.finish(directory)
    np.savez_compressed(directory / "golden.npz", **golden)
    logits = golden[f"logits_{LENGTHS[-1]}"]
    size = sum(f.stat().st_size for f in directory.iterdir())
    print(f"{directory.name}: {size / 1e3:.0f} kB, logits of standard deviation {logits.std():.2f}")


if __name__ == "__main__":
    there_are = sorted(f.stem for f in TESTS.glob("variants/[a-z]*.py"))
    for argument in sys.argv[1:] or there_are:
        family, _, chosen = argument.partition("/")
        if family not in there_are:
            raise SystemExit(f"tests/variants has no {family}.py, only {', '.join(there_are)}")
        for name, variant in importlib.import_module(f"variants.{family}").VARIANTS.items():
            if chosen in ("", name):
                write(TESTS / "fixtures" / family / name, variant)
