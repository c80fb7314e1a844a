"""Properties of all families that are tested only on Llama 3: other requests do not change what a
request gets, gradients are right, and a missing reduction is refused. Also the special keys of its
config.json."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from engine import SLOTS, Request, empty_cache, forward, goldens, hf_config, load, serve
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kernels.hopper import plgpu
from common.serving.score import logits as every_logit
from llama3 import model

INTERPRETED = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="JAX before 0.11 has no public interpreter of Mosaic GPU",
)

# ---- what is around a request changes nothing


SAMPLED = dict(temperature=0.8, top_k=20, top_p=0.95)


@functools.cache
def alone(i):
    """Serves prompt i in the only slot, read at once. Returns 8 greedy and 8 sampled tokens."""
    engine, prompt = load("llama3", "scaled"), goldens("llama3", "scaled")[i].tokens
    one = dict(slots=1, capacity=80, bucket=64)
    greedy = serve(engine, [Request(prompt, 0, 8)], **one)[0]
    return greedy, serve(engine, [Request(prompt, 0, 8, sampling={**SAMPLED, "seed": i})], **one)[0]


@st.composite
def chunks(draw, total, most):
    """Draws numbers from 1 to `most` that sum to `total`."""
    parts = []
    while sum(parts) < total:
        parts.append(draw(st.integers(1, min(most, total - sum(parts)))))
    return tuple(parts)


@pytest.mark.full
@settings(max_examples=8)
@given(st.data())
def test_order_slot_neighbours_padding_buckets_chunks_and_capacity_change_nothing(data):
    axes = data.draw(st.sampled_from(("", "data=2,tensor=2")), "mesh")
    slots = data.draw(st.sampled_from((4, 8)), "slots")
    capacity = data.draw(st.sampled_from((77, 128)), "capacity")
    bucket = data.draw(st.sampled_from((16, 48)), "bucket")
    who = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4), "prompts")
    where = data.draw(st.permutations(range(slots)), "places")
    requests, want = [], []
    for i, slot in zip(who, where, strict=False):
        prompt, hot = goldens("llama3", "scaled")[i].tokens, data.draw(st.booleans(), "sampled")
        parts = data.draw(st.none() | chunks(len(prompt), bucket), "chunks")
        arrive = data.draw(st.integers(0, 6), "arrives")
        sampling = {**SAMPLED, "seed": i} if hot else {}
        requests.append(Request(prompt, slot, 8, arrive, parts, sampling))
        want.append(alone(i)[hot])
    options = dict(slots=slots, capacity=capacity, bucket=bucket)
    assert serve(load("llama3", "scaled", axes), requests, **options) == want


# ---- few queries


@pytest.mark.full
@pytest.mark.parametrize(
    "implementation", ["tpu", pytest.param("gpu", marks=INTERPRETED), "blocked"]
)
def test_a_prompt_read_eight_tokens_at_a_time_in_bf16_goes_through_the_kernels(implementation):
    """Speculative decoding verifies so. The kernels are interpreted."""
    engine, n = load("llama3", "heads_of_16", dtype="bfloat16"), 8
    prompt, got = goldens("llama3", "heads_of_16")[-1], []
    cache = empty_cache(engine, 1, capacity=128, dtype=jnp.bfloat16)
    for end in range(n, len(prompt.tokens) + 1, n):
        tokens_BT = prompt.tokens[None, end - n : end]
        logits, cache = forward(engine, cache, tokens_BT, [end], implementation)
        got.append(logits[0])
    assert_close(np.concatenate(got), prompt.logits, rms=0.045)


@pytest.mark.full
def test_gradients_of_the_reference_match_finite_differences():
    """The difference is along a random direction through all weights at once, on two devices."""
    engine = load("llama3", "tied", "tensor=2")
    tokens_BT = jnp.asarray(goldens("llama3", "tied")[2].tokens)[None]
    T = tokens_BT.shape[1]
    cache = jax.tree.map(jnp.nan_to_num, empty_cache(engine, 1, capacity=T))

    @jax.jit
    def loss(weights):
        options = dict(config=engine.config, mesh=engine.mesh, implementation="reference")
        logits_BTV, _ = every_logit(model, weights, cache, tokens_BT, jnp.array([T]), **options)
        return -jnp.take_along_axis(
            jax.nn.log_softmax(logits_BTV[:, :-1]), tokens_BT[:, 1:, None], 2
        ).mean()

    leaves, tree = jax.tree.flatten(engine.weights)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    direction = tree.unflatten(
        [jax.random.normal(k, x.shape) * 0.1 for k, x in zip(keys, leaves, strict=True)]
    )
    gradient = jax.jit(jax.grad(loss))(engine.weights)
    along = sum(
        jnp.vdot(g, d)
        for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    )
    step = 2.0**-9

    def moved(by):
        return loss(jax.tree.map(lambda w, d: w + by * d, engine.weights, direction))

    assert_close(along, (moved(step) - moved(-step)) / (2 * step), rtol=2e-3)


def test_a_body_that_misses_a_reduction_is_refused(monkeypatch):
    """`check_vma` is on. An argmax over one device's logits is not a token that all devices agree
    on."""
    engine = load("llama3", "scaled", "tensor=2")
    monkeypatch.setattr(
        model, "sample", lambda logits_BV, *_, **__: logits_BV.argmax(-1).astype(jnp.int32)
    )
    state = model.init_state(engine.config, SLOTS, 77, jnp.float32, engine.shards)
    with pytest.raises(ValueError, match="varying"):
        jax.eval_shape(
            functools.partial(
                model.generate.__wrapped__,
                config=engine.config,
                mesh=engine.mesh,
                implementation="blocked",
            ),
            engine.weights,
            state,
        )


# ---- config.json


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_another_rope_scaling_is_refused_by_name_in_both_spellings(kind, key):
    scaling = {key: kind, "factor": 2.0, "rope_theta": 1e4}
    for variant, spelling in (("tied", "rope_scaling"), ("bf16_sharded", "rope_parameters")):
        with pytest.raises(ValueError, match=f"{spelling}.rope_type='{kind}' is not implemented"):
            model.config_from_hf(hf_config("llama3", variant) | {spelling: scaling})


def test_both_spellings_of_a_config_mean_the_same():
    hub = hf_config("llama3", "scaled")
    rope = {**hub["rope_scaling"], "rope_theta": hub["rope_theta"]}
    new = {k: v for k, v in hub.items() if k not in ("rope_theta", "rope_scaling")}
    config = model.config_from_hf(hub)
    assert model.config_from_hf(new | dict(rope_parameters=rope, head_dim=6)) == config
    assert config.rope_theta == 50 and config.rope_scaling == (8, 1, 4, 32) and config.head_dim == 6
    assert model.config_from_hf(hf_config("llama3", "tied")).rope_scaling is None
    assert model.config_from_hf(hf_config("llama3", "wide_heads")).head_dim == 14
