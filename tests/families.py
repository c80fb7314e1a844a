"""The families under test, in the order in which docs/reading.md presents them. This is the only
list of them: to add a family of your own, add one line."""

from typing import NamedTuple


class Family(NamedTuple):
    """What the tests assert of one family. The bounds on low precision limit the root mean square
    of the errors divided by that of the logits, over all positions of all prompts."""

    precise: tuple[str, str]  # variants that test precision; the first on tensor=2
    served: tuple[str, str, str]  # for sessions: a variant, a mesh, and the dtype of the cache
    bf16: float
    int8_weights: float
    int8_cache: float
    int8_both: float  # everything else in bf16
    atol: float = 1e-4  # for float32 logits, whose standard deviation is 1.2 to 3.2
    psums: tuple[str, ...] = ()  # shapes that each layer adds up besides its two, as "f32[{B},1]"
    shown: bool = False  # README.md and docs/ show it


# Random models amplify rounding: for llama3, transformers' own bf16 is 0.036 and 0.041 away from
# its float32. In a mixture of experts, rounding also sends tokens to other experts. Llama 4's
# "scout" chooses one expert in every layer, so one other choice changes all that follows, and its
# error measures nothing.
FAMILIES = {
    "gpt2": Family(
        ("prefixed", "hub"),
        ("prefixed", "", "float32"),
        0.013,
        0.018,
        0.006,
        0.021,
        atol=3e-5,
        shown=True,
    ),
    "llama3": Family(
        ("scaled", "tied"),
        ("scaled", "data=2,tensor=2", "int8"),
        0.045,
        0.07,
        0.028,
        0.086,
        shown=True,
    ),
    "qwen3": Family(
        ("yarn", "moe"), ("moe", "data=2", "float32"), 0.045, 0.044, 0.02, 0.048, shown=True
    ),
    "gpt_oss": Family(
        ("plain", "mxfp4"), ("plain", "tensor=2", "float32"), 0.06, 0.083, 0.033, 0.1, shown=True
    ),
    "llama4": Family(
        ("text", "maverick"), ("text", "", "float32"), 0.03, 0.05, 0.024, 0.055, shown=True
    ),
    "deepseek_r1": Family(
        ("yarn", "v2"), ("yarn", "data=2,tensor=2", "float32"), 0.11, 0.115, 0.08, 0.14, shown=True
    ),
    "kimi_k2": Family(
        ("yarn", "plain"), ("plain", "tensor=2", "int8"), 0.085, 0.09, 0.072, 0.115, shown=True
    ),
    "qwen3_5": Family(
        ("dense", "moe"), ("dense", "data=2", "float32"), 0.08, 0.24, 0.01, 0.25, shown=True
    ),
}
SHOWN = [family for family, facts in FAMILIES.items() if facts.shown]
