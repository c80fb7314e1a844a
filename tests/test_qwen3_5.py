"""What is special about Qwen3.5: states in place of keys and values, its config.json and files, and
the layer that drafts."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from engine import FIXTURES, goldens, hf_config, init_state, load

from common.fields import with_layers
from common.loading import checkpoint
from common.recurrent import PENDING, Recurrent, past
from common.serving.load import Model
from common.serving.load import load as load_model
from common.serving.score import prefill_asked
from common.serving.serve import serve
from common.serving.session import Request, start_session
from common.sharding import make_mesh
from common.speculate import generate
from qwen3_5 import model, mtp, shapes

CHUNK = 512  # in which sessions read prompts


@functools.cache
def opened():
    module, config, weights, mesh, *_ = load("qwen3_5", "dense")
    return Model(module, config, mesh, weights, None, np.dtype("float32"), None, None)


def static(engine):
    return dict(config=engine.config, mesh=engine.mesh)


def read(engine, tokens, size, function=None, capacity=80):
    """A state that holds the tokens, read at once with padding up to `size`."""
    state = init_state(engine, 1, capacity, jnp.float32)
    padded = np.full((1, size), 7, np.int32)
    padded[0, : len(tokens)] = tokens
    given = engine.weights, state, jnp.asarray(padded), jnp.array([len(tokens)], jnp.int32)
    return (function or engine.model.prefill)(*given, **static(engine))


def states(state):
    return [layer.state for layer in state.cache if isinstance(layer, Recurrent)]


def scored(engine_model, *given, **more):
    return prefill_asked(engine_model, *given, jnp.array([-1], jnp.int32), **more)[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scores", [False, True])
def test_padding_reaches_no_state(scores):
    engine, tokens = load("qwen3_5", "dense"), goldens("qwen3_5", "dense")[2].tokens
    function = functools.partial(scored, engine.model) if scores else None
    want = states(read(engine, tokens, len(tokens)))
    for got, exact in zip(states(read(engine, tokens, 32, function)), want, strict=True):
        assert_close(got, exact, atol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("right", range(4))
def test_drafts_that_were_wrong_leave_no_trace(right):
    """The next token's step begins behind those that were right."""
    engine, prompt = load("qwen3_5", "dense"), goldens("qwen3_5", "dense")[2]
    state = read(engine, prompt.tokens, 32)
    drafts = prompt.greedy[1:4].copy()
    drafts[right:] = (drafts[right:] + 1) % engine.config.vocab_size
    given = engine.model, engine.weights, state, jnp.asarray(drafts)[None]
    state, new_BT, *_ = generate(*given, **static(engine))
    tokens = [int(prompt.greedy[0]), *(int(x) for x in new_BT[0, : right + 1])]
    while len(tokens) < len(prompt.greedy):
        state = engine.model.generate(engine.weights, state, **static(engine))
        tokens.append(int(state.token_B[0]))
    assert tokens == prompt.greedy.tolist()


def test_a_state_is_lost_to_positions_it_cannot_go_to():
    """Those before the newest step, and those behind what it may have appended."""
    state = read(load("qwen3_5", "dense"), range(1, 21), 32)
    cache = next(layer for layer in state.cache if isinstance(layer, Recurrent))
    for start, lost in ((0, False), (19, True), (20, False), (20 + PENDING + 1, True)):
        assert bool(jnp.isnan(past(cache, jnp.array([start])).decay).any()) == lost


# ---- prefixes


def answer(session, prompt, new=4):
    events = list(serve(session, [Request(prompt, new)]))
    return [event.token for event in events], events[-1].counts.cached


@functools.cache
def text(n, seed=3):
    size = opened().config.vocab_size
    return np.random.default_rng(seed).integers(1, size, n).tolist()


def long_model():
    """Its prompts may have several chunks."""
    return opened()._replace(config=opened().config._replace(max_position_embeddings=4 * CHUNK))


@pytest.mark.full
@pytest.mark.parametrize("options", [dict(keep=8), dict(keep_host=1.0)], ids=["device", "host"])
def test_a_prompt_starts_from_a_state_that_was_kept(options):
    """At the last whole chunk of a prompt, and where another prompt went on differently."""
    session = start_session(long_model(), 2, 4 * CHUNK, **options)
    alone = lambda prompt: answer(start_session(long_model(), 2, 4 * CHUNK), prompt)[0]
    first, other = text(2 * CHUNK + 100), [*text(CHUNK + 200), *text(CHUNK, seed=4)]
    third = [*text(CHUNK + 50), *text(40, seed=5)]
    for prompt, cached in (
        (first, 0),
        (first, 2 * CHUNK),
        (other, 0),
        (third, CHUNK),
        (first, 2 * CHUNK),
    ):
        assert answer(session, prompt) == (alone(prompt), cached)


@pytest.mark.full
def test_without_room_nothing_is_reused():
    session = start_session(long_model(), 2, 4 * CHUNK)
    assert [answer(session, text(CHUNK + 9))[1] for _ in range(2)] == [0, 0]


def test_a_conversation_goes_on_from_the_state_at_its_end():
    """A text that leaves the conversation earlier is read anew."""
    session, replies = start_session(opened(), 3, 128, reuse_multiple=1), [[], [], []]
    for event in serve(session, [Request(text(40, seed), 4) for seed in (8, 3, 9)]):
        replies[event.request].append(event.token)
    longer = [*text(40), *replies[1], 5, 6, 7]  # beside two others
    alone = lambda prompt: answer(start_session(opened(), 1, 128, reuse_multiple=1), prompt)[0]
    assert answer(session, longer) == (alone(longer), 43)
    assert answer(session, longer[:30]) == (alone(longer[:30]), 0)


def test_more_drafts_than_a_state_can_take_back_are_refused():
    with pytest.raises(ValueError, match="at most 7 tokens are drafted"):
        start_session(opened(), 1, 64, draft="lookup", draft_tokens=8)


# ---- config.json and files


def test_the_largest_has_no_vision_tower_and_its_text_is_not_nested():
    config = model.config_from_hf(shapes.SHAPES["qwen3.8-2.4t-a95b"])
    assert not config.multimodal and config.num_experts == 512
    assert config.layer_types[:5] == (*["linear_attention"] * 3, model.FULL, "linear_attention")


@pytest.mark.parametrize(
    "name, value",
    [("attn_output_gate", False), ("output_gate_type", "sigmoid"), ("mamba_ssm_dtype", "bfloat16")],
)
def test_a_setting_that_is_not_implemented_is_refused_by_name(name, value):
    hf = hf_config("qwen3_5", "nested_moe")
    hf["text_config"][name] = value
    with pytest.raises(ValueError, match=f"{name}={value!r} is not implemented"):
        model.config_from_hf(hf)


def test_the_embedding_is_the_head_if_either_part_of_the_file_says_so():
    for outer, inner, tied in ((True, None, True), (None, True, True), (None, None, False)):
        hf = hf_config("qwen3_5", "nested_tied") | dict(tie_word_embeddings=outer)
        hf["text_config"]["tie_word_embeddings"] = inner
        for part in (hf, hf["text_config"]):
            if part["tie_word_embeddings"] is None:
                del part["tie_word_embeddings"]
        assert model.config_from_hf(hf).tie_word_embeddings == tied
    hf = hf_config("qwen3_5", "nested_tied")
    hf["text_config"]["tie_word_embeddings"] = False
    with pytest.raises(ValueError, match="one setting under two names"):
        model.config_from_hf(hf)


def test_fewer_layers_keep_their_kinds():
    config = with_layers(opened().config, 3)
    assert config.layer_types == ("linear_attention",) * 3 and config.num_hidden_layers == 3


# ---- the layer that drafts


def texts(opened, requests):
    session = start_session(opened, 2, 200)
    out = [[] for _ in requests]
    for event in serve(session, requests):
        out[event.request].append(event.token)
    return out, session.stats


@pytest.mark.full
def test_half_of_the_drafts_of_the_embedded_model_are_right_and_its_text_is_the_same():
    """Its layer that drafts was trained with it."""
    embedded = load_model(mtp, mesh=make_mesh(), dtype="float32")
    plain = embedded._replace(module=model, weights=mtp.without_mtp(embedded.weights))
    requests = [Request([*range(9, 9 + n)], 60) for n in (3, 17, 1, 30)]
    want, _ = texts(plain, requests)
    got, stats = texts(embedded, requests)
    assert got == want
    assert stats.drafts_right / stats.drafts > 0.4


def test_files_without_a_layer_that_drafts_are_refused():
    with pytest.raises(ValueError, match="mtp_num_hidden_layers=None, but drafting takes one"):
        mtp.config_from_hf(hf_config("qwen3_5", "dense"))


def test_a_missing_weight_of_the_layer_that_drafts_is_named():
    hf = hf_config("qwen3_5", "dense") | dict(mtp_num_hidden_layers=1)
    directory = FIXTURES / "qwen3_5" / "dense"
    with pytest.raises(ValueError, match=r"no file has mtp\.fc\.weight"):
        checkpoint.load_weights(directory, mtp, mtp.config_from_hf(hf), make_mesh(), "float32")
