"""The published configurations, as in their config.json: for dry runs and random weights."""

from typing import Any


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
    )


SHAPES: dict[str, dict[str, Any]] = {
    "distilgpt2": _config(6, 768, 12),
    "gpt2": _config(12, 768, 12),
    "gpt2-medium": _config(24, 1024, 16),
    "gpt2-large": _config(36, 1280, 20),
    "gpt2-xl": _config(48, 1600, 25),
}

# A TPU slice that holds each size, the mesh on it, and whether weights and cache are in int8.
SLICES: dict[str, tuple[str, str, str | None]] = {
    "distilgpt2": ("v5e:2x2", "tensor=1", None),
    "gpt2": ("v5e:2x2", "tensor=1", None),
    "gpt2-medium": ("v5e:2x2", "tensor=4", None),
    "gpt2-large": ("v5e:2x2", "tensor=4", None),
    "gpt2-xl": ("v5e:2x2", "tensor=4", "int8"),
}
