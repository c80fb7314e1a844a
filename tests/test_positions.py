"""Rotations and scales of positions in long contexts are those of transformers, for the published
sizes: `make_rope_fixture.py` wrote them."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from engine import FIXTURES, model_of
from families import FAMILIES

with np.load(FIXTURES / "rope.npz") as z:
    ROPE = dict(z)
# Every family but gpt2, whose positions are learned.
ROTARY = [name for name, family in FAMILIES.items() if family.shown and name != "gpt2"]
# Pairs whose frequency torch does not round correctly, because its power of float32 does not.
ROUNDED = {"qwen3": 1, "gpt_oss": 2, "kimi_k2": 1}


def config_of(family):
    shapes = importlib.import_module(f"{family}.shapes").SHAPES
    return model_of(family).config_from_hf(shapes[str(ROPE[f"{family}_size"])])


@pytest.mark.parametrize("family", ROTARY)
def test_angles_up_to_position_140_000_are_those_of_transformers(family):
    want = {kind: ROPE[f"{family}_{kind}"] for kind in ("frequency", "cos", "sin")}
    model, config = model_of(family), config_of(family)
    frequency = model.rope_frequencies(config)
    same = frequency == want["frequency"]
    assert frequency.dtype == np.float32 and (~same).sum() == ROUNDED.get(family, 0)
    assert_close(frequency, want["frequency"], atol=6e-8)
    for got, kind in zip(
        model.rotary(ROPE["positions"][None], config), ("cos", "sin"), strict=True
    ):
        assert_close(np.asarray(got)[0, :, 0, same], want[kind].T[same], atol=1e-5, what=kind)


def test_queries_far_into_a_context_are_scaled_as_published():
    """Llama 4: 1 + 0.1 ln(1 + floor((p + 1) / 8192))."""
    position = np.array([[0, 8190, 8191, 16_382, 16_383, 140_000, 10_485_759]])
    got = model_of("llama4").query_scale(jnp.asarray(position), config_of("llama4"))
    want = 1 + 0.1 * np.log(1 + np.array([[0, 0, 1, 1, 2, 17, 1280]]))
    assert_close(got[..., 0, 0], want, atol=1e-6)
