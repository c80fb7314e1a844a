"""The serving loop: what a request gets depends on the request alone."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import serve as serving
from common.checkpoint import load_weights
from common.score import logits
from common.serve import Engine, Request, buckets, serve, start_session
from common.sharding import make_mesh, model_shards
from llama3 import model

EMBEDDED = Path(model.__file__).parent / "embedded"
CONFIG = model.config_from_hf(json.loads((EMBEDDED / "config.json").read_text()))
PROMPTS = [[0, *range(40, 40 + n)] for n in (3, 17, 1, 40, 9, 33, 5)]
SAMPLED = dict(temperature=0.9, top_k=50, top_p=0.95)


def make_engine(slots=2, capacity=96, **axes):
    mesh = make_mesh(**axes)
    n = model_shards(mesh)
    weights = load_weights(
        EMBEDDED,
        model.checkpoint_table(CONFIG, n),
        model.weight_shapes(CONFIG),
        model.weight_shapes(CONFIG, n),
        model.weight_specs(CONFIG),
        mesh,
        jnp.float32,
    )
    return Engine(model, CONFIG, mesh, weights, slots, capacity, jnp.dtype("float32"))


@pytest.fixture(scope="module")
def engine():
    return make_engine()


@pytest.fixture(scope="module")
def session(engine):
    return start_session(engine)


def answers(engine, requests, session=None, stop_ids=(), **kwargs):
    """The tokens and the finish reason of every request."""
    session = session or start_session(engine)
    tokens, finish = [[] for _ in requests], [None] * len(requests)
    for event in serve(engine, requests, stop_ids, session, **kwargs):
        assert finish[event.request] is None, "a token after the last one"
        tokens[event.request].append(event.token)
        finish[event.request] = event.finish
    return tokens, finish


def greedy_by_full_forward(engine, prompt, count):
    """The slowest way: the whole text through `logits` again for every token."""
    tokens = list(prompt)
    size = 64
    run = jax.jit(
        lambda w, c, t: logits(
            model,
            w,
            c,
            t,
            jnp.array([size]),
            config=CONFIG,
            mesh=engine.mesh,
            implementation="reference",
        )[0]
    )
    cache = model.init_cache(CONFIG, 1, size, jnp.float32)
    for _ in range(count):
        padded = np.array([tokens + [0] * (size - len(tokens))], np.int32)
        tokens.append(int(run(engine.weights, cache, padded)[0, len(tokens) - 1].argmax()))
    return tokens[len(prompt) :]


def test_more_prompts_than_slots_each_get_the_tokens_of_a_full_forward(engine, session):
    requests = [Request(p, 6) for p in PROMPTS]
    tokens, finish = answers(engine, requests, session)
    assert tokens == [greedy_by_full_forward(engine, p, 6) for p in PROMPTS]
    assert finish == ["length"] * len(PROMPTS)


def test_a_sampled_text_depends_on_seed_and_prompt_alone(engine, session):
    requests = [Request(p, 8, **SAMPLED, seed=i) for i, p in enumerate(PROMPTS)]
    together, _ = answers(engine, requests, session)
    order = [4, 0, 6, 2, 5, 1, 3]
    shuffled, _ = answers(engine, [requests[i] for i in order], session)
    assert [together[i] for i in order] == shuffled
    alone = [answers(engine, [request], session)[0][0] for request in requests]
    assert together == alone
    other_seeds, _ = answers(engine, [r._replace(seed=r.seed + 100) for r in requests], session)
    assert sum(a != b for a, b in zip(together, other_seeds, strict=True)) > len(requests) // 2


@pytest.mark.parametrize(
    "axes", [dict(data=2), dict(data=2, expert=2, tensor=2), dict(tensor=4)], ids=str
)
def test_a_mesh_gives_the_same_texts(engine, session, axes):
    requests = [Request(p, 8, seed=i) for i, p in enumerate(PROMPTS)]
    requests += [r._replace(**SAMPLED) for r in requests]
    expected = answers(engine, requests, session)
    assert answers(make_engine(slots=4, **axes), requests) == expected


def test_capacity_and_the_number_of_slots_change_nothing(engine, session):
    requests = [Request(p, 8, **SAMPLED, seed=i) for i, p in enumerate(PROMPTS)]
    expected = answers(engine, requests, session)
    assert answers(engine._replace(slots=5, capacity=160), requests) == expected


def test_chunks_of_a_prompt_change_nothing(engine, session, monkeypatch):
    requests = [Request(p, 8, seed=i) for i, p in enumerate(PROMPTS)]
    expected = answers(engine, requests, session)
    monkeypatch.setattr(serving, "CHUNK", 16)
    monkeypatch.setattr(serving, "SMALLEST_BUCKET", 4)
    assert buckets(40) == [16, 16, 8]
    chunked = start_session(engine)
    assert answers(engine, requests, chunked) == expected
    assert ("prefill", 4) in chunked.programs and ("prefill", 64) not in chunked.programs


def test_a_repeated_beginning_is_read_once_and_changes_nothing(engine):
    first, second = Request(PROMPTS[3], 8), Request([*PROMPTS[3][:30], 7, 8, 9], 8)
    session = start_session(engine)
    expected = [answers(engine, [r])[0] for r in (first, second)]
    assert [answers(engine, [r], session, reuse_multiple=1)[0] for r in (first, second)] == expected
    assert session.stats.cached_tokens == 30
    assert answers(engine, [second], session, reuse_multiple=1)[0] == expected[1]
    assert session.stats.cached_tokens == 30 + 32, "the last token is always read, for its logits"


def test_a_stop_id_ends_a_request_and_frees_its_slot(engine, session):
    plain, _ = answers(engine, [Request(p, 12) for p in PROMPTS], session)
    stop = plain[1][4]
    tokens, finish = answers(engine, [Request(p, 12) for p in PROMPTS], session, stop_ids={stop})
    for got, full, reason in zip(tokens, plain, finish, strict=True):
        cut = full.index(stop) + 1 if stop in full else 12
        assert got == full[:cut]
        assert reason == ("stop" if stop in full else "length")
    assert not np.asarray(session.state.length_B).any()


def test_a_full_cache_ends_a_request_after_the_last_token_that_it_can_hold(engine, session):
    room = engine.capacity - len(PROMPTS[3]) + 1
    tokens, finish = answers(engine, [Request(PROMPTS[3], 10_000)], session)
    assert len(tokens[0]) == room
    assert finish == ["length"]
    larger, _ = answers(engine._replace(capacity=128), [Request(PROMPTS[3], room)])
    assert tokens == larger


def test_a_reader_who_stops_early_leaves_the_session_usable(engine):
    session = start_session(engine)
    events = serve(engine, [Request(p, 12) for p in PROMPTS], (), session)
    for _ in range(9):
        next(events)
    events.close()
    assert not np.asarray(session.state.length_B).any()
    requests = [Request(p, 6) for p in PROMPTS]
    assert answers(engine, requests, session) == answers(engine, requests)


def test_statistics_count_every_token_once(engine):
    session = start_session(engine)
    answers(engine, [Request(p, 6) for p in PROMPTS], session)
    assert session.stats.prefill_tokens == sum(map(len, PROMPTS))
    assert session.stats.decode_tokens == 5 * len(PROMPTS)
    assert 0 < session.stats.filled < session.stats.decode_steps
    assert session.stats.compile_s > 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 4), "prompt 2 is empty"),
        (Request([1] * 97, 4), "prompt 2 has 97 tokens, over the cache's 96"),
        (Request([1], 0), "max_new_tokens must be at least 1, got 0"),
        (Request([1], 4, temperature=-1.0), "temperature must be"),
        (Request([1], 4, top_p=0.0), "top_p must be"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_any_work(
    engine, session, request_, message
):
    before = session.stats.prefill_tokens
    with pytest.raises(ValueError, match=message):
        next(serve(engine, [Request([1], 4), request_], (), session))
    assert session.stats.prefill_tokens == before


def test_slots_that_do_not_divide_over_the_data_axis_are_refused():
    with pytest.raises(ValueError, match="3 slots cannot be split evenly over data=2"):
        start_session(make_engine(slots=3, data=2))


@given(st.integers(1, 5000))
def test_buckets_hold_the_prompt_and_come_from_a_short_list(count):
    lengths = buckets(count)
    assert sum(lengths[:-1]) < count <= sum(lengths)
    assert lengths[:-1] == [serving.CHUNK] * (len(lengths) - 1)
    assert lengths[-1] in {32, 64, 128, 256, 512}
    assert lengths[-1] < 2 * (count - sum(lengths[:-1])) or lengths[-1] == serving.SMALLEST_BUCKET
