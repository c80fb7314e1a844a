"""LoRA adapters as PEFT writes them (https://huggingface.co/docs/peft). What an adapter adds to a
matrix is computed for the rows that are read, when they are read."""

import re
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from common.config import show
from common.loading.files import read_json
from common.loading.hub import ADAPTER, locate
from common.loading.reading import read_tensor
from common.loading.stored import FLOATS, StoredTensor, Tensors, read_header
from common.names import Same, Table

WEIGHTS = "adapter_model.safetensors"
# What is implemented of a setting. With other initial weights, PEFT changes the base model too.
ACCEPTED: dict[str, Any] = dict(peft_type=["LORA"], bias=["none"])
ACCEPTED["init_lora_weights"] = [True, "gaussian", "eva", "orthogonal", "mica"]
# Settings that are read, that matter only in training, or that choose the modules that have an
# adapter. The file holds tensors of these modules alone.
KNOWN = """base_model_name_or_path revision r lora_alpha use_rslora rank_pattern alpha_pattern
fan_in_fan_out target_parameters target_modules exclude_modules layers_to_transform layers_pattern
modules_to_save auto_mapping corda_config ensure_weight_tying eva_config inference_mode loftq_config
lora_dropout lora_ga_config megatron_core peft_version qalora_group_size task_type""".split()
FACTORS = {("A", 2, True), ("B", 2, True)}  # matrices of floats
UNFIT = "fits no float tensor of the base model; if that is quantised, give a base model in bf16"
TIED = "changes an embedding that is also the head (tie_word_embeddings): not implemented"


def open_adapter(
    name: str | None, ckpt: str | None, revision: str | None
) -> tuple[Path | None, str | None, str | None]:
    """Returns the directory of an adapter, and the model that it goes with: `ckpt`, or else the one
    that it was trained on. ValueError names a setting that is not implemented."""
    if name is None:
        return None, ckpt, revision
    directory = locate(name, files=[ADAPTER, WEIGHTS])
    settings = read_json(directory / ADAPTER)
    for key, value in ({"peft_type": "none"} | settings).items():
        if value and value not in ACCEPTED.get(key, [value] if key in KNOWN else []):
            raise ValueError(f"{directory / ADAPTER}: {key}={show(value)} is not implemented")
        if key in ("use_rslora", "fan_in_fan_out") and not isinstance(value, bool | None):
            raise ValueError(f"{directory / ADAPTER}: {key}={show(value)} must be true or false")
    if ckpt is None:
        ckpt, revision = settings.get("base_model_name_or_path"), settings.get("revision")
        if not isinstance(ckpt, str):
            raise ValueError(f"{directory / ADAPTER} names no base model: give it as --ckpt")
        try:
            locate(ckpt, revision, ["config.json"])
        except (OSError, ValueError) as error:
            raise ValueError(f"the base model that {directory / ADAPTER} names: {error}") from None
    return directory, ckpt, revision


def adapted(tensors: Tensors, table: Table, adapter: Path) -> Tensors:
    """The tensors of a base model, with what an adapter adds to them or has in their place.
    ValueError names a tensor of the adapter that does not fit."""
    found, pairs, settings = dict(tensors), dict[str, Tensors](), read_json(adapter / ADAPTER)
    tied = {x for target in table.values() if isinstance(target, Same) for x in (target, *target)}

    def stored(name: str, tensor: StoredTensor) -> str:
        """The name of the base model's tensor that the adapter changes."""
        own = name if name in tensors else name.partition(".")[2]  # GPT-2's may have no prefix
        why = TIED if table.get(name) in tied else UNFIT
        if why is UNFIT and own in tensors and tensors[own].dtype in FLOATS:
            return own
        raise ValueError(f"{tensor.file}: {tensor.name} {why}")

    if not (header := read_header(adapter / WEIGHTS)):
        raise ValueError(f"{adapter / WEIGHTS} holds no tensor")
    for name, tensor in header.items():
        module, _, factor = name.removeprefix("base_model.model.").partition(".lora_")
        if factor:
            pairs.setdefault(module, {})[factor.removesuffix(".weight")[-1]] = tensor
        else:
            found[stored(module.replace(".base_layer", ""), tensor)] = tensor
    for module, pair in pairs.items():
        if {(x, len(t.shape), t.dtype in FLOATS) for x, t in pair.items()} != FACTORS:
            raise ValueError(f"{adapter / WEIGHTS}: {module} needs matrices lora_A, lora_B alone")
        a, b, (key, names) = pair["A"], pair["B"], changed(module, settings, tensors)
        rank = number(settings, "r", "rank_pattern", key)
        alpha = number(settings, "lora_alpha", "alpha_pattern", key)
        scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
        for e, i in np.ndindex(len(names), len(names[0])):
            base = found[name := stored(names[e][i], a)]
            stack, *shape = (1, 1, *base.shape)[-3:]
            experts, made = max(stack, len(names)), [b.shape[0] / len(names[0]), a.shape[1]]
            if_square = len(base.shape) == 3 or settings.get("fan_in_fan_out", False)
            turned = shape == made[::-1] and (shape != made or if_square)  # stored as [in, out]
            ranks = {a.shape[0], b.shape[1], rank * experts}
            if base.added or len(ranks) > 1 or not (turned or shape == made):
                what = f"rank {rank}, lora_B {[*b.shape]} and {name} {[*base.shape]}"
                raise ValueError(f"{a.file}: {a.name} {[*a.shape]} does not fit {what}")
            where = None if len(base.shape) == 3 else e, i * shape[0]
            added = partial(rows_of, (a, b, scale, experts, turned), *where)
            found[name] = base._replace(added=added, name=f"{base.name} with {a.file}")
    return found


def changed(module: str, settings: dict[str, Any], tensors: Tensors) -> tuple[str, list[list[str]]]:
    """What two factors change: its name for PEFT, and the tensors of each expert that hold it. PEFT
    adapts all experts of a layer at once: gate_up_proj and, around that, down_proj."""
    bare, listed = module.replace(".base_layer", ""), settings.get("target_parameters") or ()
    if not bare.endswith(".experts"):
        is_listed = any(f".{bare}.weight".endswith(f".{x}") for x in listed)
        return f"{bare}.weight" if is_listed else bare, [[f"{bare}.weight"]]
    is_down = module == bare and any(x.endswith("down_proj") for x in listed)
    parts = ["down"] if is_down else ["gate", "up"]
    key = f"{bare}.{'_'.join(parts)}_proj"
    experts = sum(x.startswith(bare) and x.endswith("down_proj.weight") for x in tensors)
    each = [[f"{bare}.{e}.{x}_proj.weight" for x in parts] for e in range(experts)]
    return key, each or [[key]]


def number(settings: dict[str, Any], key: str, patterns: str, name: str) -> Any:
    """A setting for one matrix: that of the first pattern that fits its name, or else of all."""
    given = dict(settings.get(patterns) or {}).items()
    try:
        fits = [x for p, x in given if re.match(rf"(.*\.)?({p})$", name)]
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{ADAPTER}: {patterns} has a bad pattern: {error}") from None
    if type(value := [*fits, settings.get(key)][0]) not in (int, float) or value <= 0:
        raise ValueError(f"{ADAPTER}: {key}={show(value)} of {name}")
    return value


def rows_of(factors: Any, expert: int | None, first: int, start: int, stop: int) -> np.ndarray:
    """Rows of scale * B @ A: of the matrix of one expert, whose row `first` is row 0 of the stored
    tensor; or of a stack, in which a row is a matrix (None)."""
    a, b, scale, experts, turned = factors
    a_ERI = read_float32(a).reshape(experts, -1, a.shape[1])  # R: rank, I: inputs, O: outputs
    b_EOR = read_float32(b).reshape(b.shape[0], -1, experts).transpose(2, 0, 1)
    left, right = (a_ERI.mT, b_EOR.mT) if turned else (b_EOR, a_ERI)
    rows = slice(first + start, first + stop)
    one, other = (rows, rows) if expert is None else ((expert, rows), expert)
    return (np.float32(scale) * left[one]) @ right[other]


@lru_cache(maxsize=2)  # the factors of one tensor, which is read in many chunks
def read_float32(tensor: StoredTensor) -> np.ndarray:
    out = np.empty(tensor.shape, np.float32)
    read_tensor(tensor, None, tensor.shape, tuple((0, n) for n in tensor.shape), out)
    return out
