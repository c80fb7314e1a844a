"""The families that are tested, in the order of their ideas. This is the only list of them; a
family of your own joins by one line."""

from typing import NamedTuple


class Family(NamedTuple):
    """What is stated of one family. A bound on low precision is on the root mean square of the
    errors over that of the logits, over all positions of all prompts."""

    precise: tuple[str, str]  # the variants in which precision is tested; the first on tensor=2
    bf16: float
    int8_weights: float
    int8_cache: float
    int8_both: float  # in bf16
    atol: float = 1e-4  # of float32 logits, whose standard deviation is 1.2 to 3.2
    shown: bool = False  # has a place on the pages, README.md and docs/


# Random models amplify rounding, and in a mixture rounding sends a token to other experts:
# transformers' own bf16 is 0.036 and 0.041 away from its float32 for llama3. Llama 4's "scout"
# chooses one expert in every layer, so one choice changes all that follows: it is no measure.
FAMILIES = {
    "gpt2": Family(("prefixed", "hub"), 0.013, 0.028, 0.006, 0.030, atol=3e-5, shown=True),
    "llama3": Family(("scaled", "tied"), 0.045, 0.105, 0.028, 0.115, shown=True),
    "qwen3": Family(("yarn", "moe"), 0.045, 0.09, 0.02, 0.095, shown=True),
    "gpt_oss": Family(("plain", "mxfp4"), 0.06, 0.11, 0.033, 0.12, shown=True),
    "llama4": Family(("text", "maverick"), 0.03, 0.062, 0.024, 0.072, shown=True),
    "deepseek_r1": Family(("yarn", "v2"), 0.11, 0.135, 0.08, 0.14, shown=True),
    "kimi_k2": Family(("yarn", "plain"), 0.085, 0.115, 0.072, 0.135, shown=True),
}
SHOWN = [family for family, facts in FAMILIES.items() if facts.shown]
