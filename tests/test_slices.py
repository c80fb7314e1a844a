"""Every published size of gpt2, qwen3 and gpt_oss compiles for a TPU slice that it fits: a decoding
step, and a prompt.

Two layers of each at their true widths; what all of them hold is counted from their shapes. The
READMEs' tables come from all layers (`python -m common.dryrun`).
"""

import importlib

import jax
import jax.numpy as jnp
import pytest

from common.dryrun import abstract_state, abstract_weights, device_bytes, devices_of, dry_run
from common.quant import INT8
from common.sharding import make_mesh

HBM = 16 << 30  # bytes of one v5e
SLOTS, CAPACITY, PROMPT, LAYERS = 8, 2048, 512, 2
SLICES = {  # topology, mesh, how weights and cache are stored
    "gpt2/distilgpt2": ("v5e:2x2", "tensor=1", None),
    "gpt2/gpt2": ("v5e:2x2", "tensor=1", None),
    "gpt2/gpt2-medium": ("v5e:2x2", "tensor=4", None),
    "gpt2/gpt2-large": ("v5e:2x2", "tensor=4", None),
    "gpt2/gpt2-xl": ("v5e:2x2", "tensor=4", INT8),
    "qwen3/qwen3-0.6b": ("v5e:2x2", "tensor=1", None),
    "qwen3/qwen3-1.7b": ("v5e:2x2", "tensor=1", None),
    "qwen3/qwen3-4b": ("v5e:2x2", "tensor=4", None),
    "qwen3/qwen3-8b": ("v5e:2x2", "tensor=4", None),
    "qwen3/qwen3-14b": ("v5e:2x4", "tensor=8", None),
    "qwen3/qwen3-32b": ("v5e:2x4", "tensor=8", INT8),
    "qwen3/qwen3-30b-a3b": ("v5e:2x4", "expert=8", None),
    "qwen3/qwen3-235b-a22b": ("v5e:4x8", "expert=32", None),
    "qwen3/qwen3-coder-480b-a35b": ("v5e:8x8", "expert=32,tensor=2", INT8),
    "gpt_oss/gpt-oss-20b": ("v5e:2x2", "expert=4", None),
    "gpt_oss/gpt-oss-120b": ("v5e:4x4", "expert=16", None),
}


def mesh_of(topology, axes):
    sizes = {name: int(n) for name, n in (axis.split("=") for axis in axes.split(","))}
    return make_mesh(**sizes, devices=devices_of(topology))


def largest(layers):
    """Bytes of one device's part of the largest array of a layer: in a mixture, a stack of
    experts."""
    return max(map(device_bytes, jax.tree.leaves(layers)))


@pytest.mark.parametrize("size", SLICES)
def test_a_published_size_compiles_for_a_slice_that_it_fits(size):
    family, name = size.split("/")
    topology, axes, form = SLICES[size]
    model = importlib.import_module(f"{family}.model")
    shape = importlib.import_module(f"{family}.shapes").SHAPES[name]
    mesh, config = mesh_of(topology, axes), model.config_from_hf(shape)
    capacity = min(CAPACITY, config.max_position_embeddings)
    cache = jnp.int8 if form else jnp.bfloat16
    options = dict(capacity=capacity, cache_dtype=cache, form=form)
    few = config._replace(num_hidden_layers=LAYERS)
    decode, _ = dry_run(model, few, mesh, slots=SLOTS, **options)
    prompt, _ = dry_run(model, few, mesh, slots=1, prefill=PROMPT, **options)
    weights = abstract_weights(model, config, mesh, jnp.bfloat16, form)
    state = abstract_state(model, config, mesh, SLOTS, capacity, cache)
    held = device_bytes(weights) + device_bytes(state)
    temporaries = max(decode.temporaries, prompt.temporaries)
    assert held + temporaries < 0.95 * HBM
    assert decode.aliased >= decode.cache
    assert decode.temporaries < 4 << 20 and prompt.temporaries < 12 << 20
    if "num_experts_per_tok" in config._fields and config.num_experts_per_tok:
        assert temporaries < largest(weights.layers) / 3  # no stack is copied or widened
