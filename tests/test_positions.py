"""Positions far into a context are those of transformers, for the published sizes: rotations and
scales alone (`make_rope_fixture.py` wrote them), and what whole models compute of a text of 140,000
tokens (`make_far_fixture.py`)."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from engine import FIXTURES, Engine, empty_cache, model_of
from families import FAMILIES
from far import END, POINTS, SHOWN, tokens

from common.loading.checkpoint import load_weights
from common.loading.files import read_json
from common.serving.score import logits
from common.sharding import make_mesh

with np.load(FIXTURES / "rope.npz") as z:
    ROPE = dict(z)
# Every family but gpt2, whose positions are learned.
ROTARY = [name for name, family in FAMILIES.items() if family.shown and name != "gpt2"]
# Those of them whose slots can go back to a position. Qwen3.5's states cannot.
FAR = [family for family in ROTARY if family != "qwen3_5"]
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


CHUNK = 2000  # tokens
CAPACITY = 139 * 1024  # holds the text and one more chunk, in whole parts of latents
# Here programs run for minutes, so they are optimised.
compiled = functools.partial(
    jax.jit,
    static_argnames=("model", "config", "mesh"),
    donate_argnames="cache",
    compiler_options=dict(xla_backend_optimization_level=3),
)
LOGITS = compiled(logits)


@compiled
def fill(model, weights, cache, tokens_BT, end_B, *, config, mesh):
    """Without logits, the compiler leaves out the attention of the last layer, which takes most of
    the time: in these models it is the only one that sees all positions."""
    return logits(model, weights, cache, tokens_BT, end_B, config=config, mesh=mesh)[1]


def load_far(family):
    model, mesh, directory = model_of(family), make_mesh(), FIXTURES / "far" / family
    config = model.config_from_hf(read_json(directory / "config.json"))
    weights = load_weights(directory, model, config, mesh, "float32")
    return Engine(model, config, weights, mesh, "far", family)


def read(run, engine, cache, token_T, start):
    """Runs LOGITS or `fill` on tokens from position `start` on."""
    model, config, weights, mesh, *_ = engine
    given = jnp.asarray(token_T)[None], jnp.array([start + len(token_T)])
    return run(model, weights, cache, *given, config=config, mesh=mesh)


@pytest.mark.parametrize(
    "family, points",
    [pytest.param("qwen3", POINTS[:2], id=f"qwen3-{POINTS[1]}")]
    + [pytest.param(f, POINTS, id=f"{f}-{END}", marks=pytest.mark.full) for f in FAR],
)
def test_logits_far_into_a_text_are_those_of_transformers(family, points):
    """The text is read in chunks up to the last token of each point. Then the tokens of the point
    are read once more, one at a time."""
    engine, text, at = load_far(family), tokens(), 0
    with np.load(FIXTURES / "far" / family / "golden.npz") as z:
        golden = z["logits"]
    cache = empty_cache(engine, 1, CAPACITY)
    for point, want in zip(points, golden, strict=False):
        end = point + SHOWN
        while at + CHUNK < end:
            cache = read(fill, engine, cache, text[at : at + CHUNK], at)
            at += CHUNK
        chunk = np.pad(text[at:end], (0, CHUNK - (end - at)), constant_values=5)
        got, cache = read(LOGITS, engine, cache, chunk, at)
        assert_close(got[0, point - at : end - at], want, atol=1e-4, what=f"chunk to {end}")
        for i in range(point, end):
            got, cache = read(LOGITS, engine, cache, text[i : i + 1], i)
            assert_close(got[0, 0], want[i - point], atol=1e-4, what=f"token {i}")
        at = end
