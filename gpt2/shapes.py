"""The published configurations, as in their config.json: for dry runs and random weights."""

from typing import Any

from common.machines.chips import Slice


def _config(layers: int, width: int, heads: int) -> dict[str, Any]:
    return dict(
        model_type="gpt2",
        vocab_size=50257,
        n_positions=1024,
        n_ctx=1024,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        bos_token_id=50256,
        eos_token_id=50256,
        torch_dtype="float32",  # of the files; their config.json does not say it
    )


SHAPES: dict[str, dict[str, Any]] = {
    "distilgpt2": _config(6, 768, 12),
    "gpt2": _config(12, 768, 12),
    "gpt2-medium": _config(24, 1024, 16),
    "gpt2-large": _config(36, 1280, 20),
    "gpt2-xl": _config(48, 1600, 25),
}

SLICES = {
    "distilgpt2": Slice("v5e:2x2", "tensor=1"),
    "gpt2": Slice("v5e:2x2", "tensor=1"),
    "gpt2-medium": Slice("v5e:2x2", "tensor=4"),
    "gpt2-large": Slice("v5e:2x2", "tensor=4"),
    "gpt2-xl": Slice("v5e:2x2", "tensor=4", quant="int8", kv_quant="int8"),
}
