"""The serving loop. What a request gets depends only on that request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine import FIXTURES, watch
from hypothesis import given
from hypothesis import strategies as st

import llama3
from common.serving import session as sessions
from common.serving import steps
from common.serving.load import load
from common.serving.score import log_probabilities, logits
from common.serving.serve import complete, is_busy, serve, step, submit
from common.serving.session import Request, start_session
from common.sharding import make_mesh
from common.speculate import NO_TOKEN, counting
from common.text.tokenizer import decode, encode
from llama3 import model

PROMPTS = [[0, *range(40, 40 + n)] for n in (3, 17, 1, 40, 9, 33, 5)]
SAMPLED = dict(temperature=0.9, top_k=50, top_p=0.95)
GREEDY = [Request(p, 6) for p in PROMPTS]
BOTH = [Request(p, 8, seed=i, **x) for x in ({}, SAMPLED) for i, p in enumerate(PROMPTS)]


def open_session(slots=2, capacity=96, **axes):
    return start_session(load(model, mesh=make_mesh(**axes), dtype="float32"), slots, capacity)


@pytest.fixture(scope="module")
def session():
    return open_session()


@pytest.fixture
def another(session):
    """Starts a new session of the same model."""
    return start_session(session.model, session.slots, session.capacity)


def answers(session, requests):
    """Returns the tokens and the finish reason of every request."""
    tokens, finish = [[] for _ in requests], [None] * len(requests)
    for event in serve(session, requests):
        assert finish[event.request] is None, "a token after the last one"
        tokens[event.request].append(event.token)
        finish[event.request] = event.finish
    return tokens, finish


def greedy_by_full_forward(model_, prompts, count):
    """Generates in the slowest way: for every token, `logits` reads the whole text again."""
    size, config = 64, model_.config
    static = dict(config=config, mesh=model_.mesh, implementation="reference")
    run = jax.jit(lambda w, c, t: logits(model, w, c, t, jnp.array([size]), **static)[0])
    cache, texts = model.init_state(config, 1, size, jnp.float32).cache, []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            padded = np.array([tokens + [0] * (size - len(tokens))], np.int32)
            logits_V = run(model_.weights, cache, padded)[0, len(tokens) - 1]
            tokens.append(int(logits_V.argmax()))
        texts.append(tokens[len(prompt) :])
    return texts


def test_more_prompts_than_slots_each_get_the_tokens_of_a_full_forward(session):
    tokens, finish = answers(session, GREEDY)
    assert tokens == greedy_by_full_forward(session.model, PROMPTS, 6)
    assert finish == ["length"] * len(PROMPTS)


def test_a_sampled_text_depends_on_seed_and_prompt_alone(session):
    requests = [Request(p, 8, **SAMPLED, seed=i) for i, p in enumerate(PROMPTS)]
    together, _ = answers(session, requests)
    order = [4, 0, 6, 2, 5, 1, 3]
    shuffled, _ = answers(session, [requests[i] for i in order])
    assert [together[i] for i in order] == shuffled
    alone = [answers(session, [request])[0][0] for request in requests]
    assert together == alone
    other_seeds, _ = answers(session, [r._replace(seed=r.seed + 100) for r in requests])
    assert sum(a != b for a, b in zip(together, other_seeds, strict=True)) > len(requests) // 2


@pytest.mark.full
@pytest.mark.parametrize("axes", [dict(), dict(data=2, tensor=2)], ids=str)
@pytest.mark.parametrize("quant", [None, "int8"])
def test_in_bf16_too_neighbours_and_order_change_no_text(quant, axes):
    """Another number of slots or another mesh may change it: that is another program, which rounds
    differently."""
    loaded = load(model, mesh=make_mesh(**axes), dtype="bfloat16", quant=quant)
    requests = [r._replace(max_new_tokens=12) for r in BOTH]
    tokens, _ = answers(start_session(loaded, 4, 96), requests)
    order = [4, 0, 13, 6, 9, 2, 11, 5, 1, 8, 3, 12, 7, 10]
    shuffled, _ = answers(start_session(loaded, 4, 96), [requests[i] for i in order])
    assert [tokens[i] for i in order] == shuffled
    few = order[:4]
    alone = [answers(start_session(loaded, 4, 96), [requests[i]])[0][0] for i in few]
    assert alone == [tokens[i] for i in few]


MESHES = dict(data=2, expert=2, tensor=2), dict(data=2), dict(tensor=4)


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [*(dict(slots=4, **mesh) for mesh in MESHES), dict(slots=5, capacity=160)], ids=str
)
def test_mesh_capacity_and_the_number_of_slots_change_nothing(session, options):
    assert answers(open_session(**options), BOTH) == answers(session, BOTH)


@pytest.mark.full
def test_chunks_of_a_prompt_change_nothing(session, another, monkeypatch):
    expected, read = answers(session, BOTH), set()
    monkeypatch.setattr(steps, "PROMPT_CHUNK", 16)
    monkeypatch.setattr(steps, "SMALLEST_BUCKET", 4)
    watch(monkeypatch, model, "prefill", lambda _, *given: read.add(given[2].shape[1]))
    assert answers(another, BOTH) == expected
    assert read == {4, 8, 16}


def test_a_repeated_beginning_is_read_once_and_changes_nothing(session):
    first, second = Request(PROMPTS[3], 8), Request([*PROMPTS[3][:35], 7, 8, 9], 8)
    expected = [answers(session, [r])[0] for r in (first, second)]
    reusing = start_session(session.model, session.slots, session.capacity, reuse_multiple=1)
    assert [answers(reusing, [r])[0] for r in (first, second)] == expected
    assert reusing.stats.cached_tokens == 35
    assert answers(reusing, [second])[0] == expected[1]
    assert reusing.stats.cached_tokens == 35 + 37, "the last token is always read, for its logits"


def test_the_first_token_does_not_wait_for_the_slot(another, monkeypatch):
    inserted = []
    watch(monkeypatch, model, "insert", lambda *_: inserted.append(1))
    assert [len(inserted) for _ in serve(another, [Request(PROMPTS[0], 2)])] == [0, 1]


def test_a_stop_id_ends_a_request_and_frees_its_slot(session):
    plain, _ = answers(session, [Request(p, 12) for p in PROMPTS])
    stop = plain[1][4]
    tokens, finish = answers(session, [Request(p, 12, stop_ids={stop}) for p in PROMPTS])
    for got, full, reason in zip(tokens, plain, finish, strict=True):
        cut = full.index(stop) + 1 if stop in full else 12
        assert got == full[:cut]
        assert reason == ("stop" if stop in full else "length")
    assert not np.asarray(session.states[0].length_B).any()


def without_numbers(model_):
    """Returns the model with NaN in its last norm, and so in every logit."""
    norm = jnp.full_like(model_.weights.norm, jnp.nan)
    return model_._replace(weights=model_.weights._replace(norm=norm))


def test_a_prompt_whose_logits_are_no_numbers_gets_no_token(session):
    broken = start_session(without_numbers(session.model), 2, session.capacity)
    tokens, finish = answers(broken, GREEDY)
    assert tokens == [[-1]] * len(PROMPTS) and finish == ["invalid"] * len(PROMPTS)


def test_logits_that_become_no_numbers_end_a_request_after_what_it_has(session, another):
    expected, _ = answers(session, GREEDY[:2])
    events = serve(another, GREEDY[:2])
    got = [next(events) for _ in range(4)]
    another.models = [without_numbers(another.model)]
    got += list(events)
    for i, want in enumerate(expected):
        *mine, last = (event for event in got if event.request == i)
        assert (last.token, last.finish) == (-1, "invalid")
        assert 2 <= len(mine) < 6 and [event.token for event in mine] == want[: len(mine)]
    assert not np.asarray(another.states[0].length_B).any()


def test_of_drafts_an_invalid_token_is_told_from_one_that_is_not_there():
    got = counting(jnp.array([[9, 4], [8, 3], [-1, 3], [9, -1]]), jnp.array([2, 1, 1, 2]))
    np.testing.assert_array_equal(got, [[9, 4], [8, NO_TOKEN], [-1, NO_TOKEN], [9, -1]])


def test_a_full_cache_ends_a_request_after_the_last_token_that_it_can_hold(session):
    room = session.capacity - len(PROMPTS[3]) + 1
    tokens, finish = answers(session, [Request(PROMPTS[3], 10_000)])
    assert len(tokens[0]) == room and finish == ["length"]
    larger, _ = answers(start_session(session.model, 2, 128), [Request(PROMPTS[3], room)])
    assert tokens == larger


def test_a_reader_who_stops_early_leaves_the_session_usable(session, another):
    events = serve(another, [Request(p, 12) for p in PROMPTS])
    for _ in range(9):
        next(events)
    events.close()
    assert step(another) == [] and not np.asarray(another.states[0].length_B).any()
    assert answers(another, GREEDY) == answers(session, GREEDY)


def test_a_session_that_has_other_requests_is_not_served(another):
    submit(another, GREEDY[0])
    with pytest.raises(ValueError, match="this session has other requests"):
        answers(another, GREEDY)
    while is_busy(another):
        step(another)
    assert answers(another, GREEDY)


@pytest.mark.full
def test_statistics_count_every_token_and_every_compilation_once(session):
    fresh = start_session(session.model, 2, 97)  # nothing was compiled for this capacity
    answers(fresh, GREEDY)
    assert fresh.stats.prefill_tokens == fresh.stats.prefill_timed == sum(map(len, PROMPTS))
    assert fresh.stats.decode_tokens == 5 * len(PROMPTS)
    assert 0 < fresh.stats.filled < fresh.stats.decode_steps
    compiled = fresh.stats.compile_s
    assert compiled > 0 and fresh.stats.prefill_s > 0 and fresh.stats.decode_s > 0
    answers(fresh, GREEDY)
    assert fresh.stats.compile_s == compiled, "a program was compiled twice"


def test_nothing_is_compiled_between_a_prompt_and_its_first_token(session, monkeypatch):
    """Otherwise compiling would hide on a CPU how long the prompt takes."""
    sessions.publish.clear_cache()
    fresh, counts = start_session(session.model, session.slots, session.capacity), []
    watch(monkeypatch, model, "prefill", lambda *_: counts.append(sessions.compilations))
    next(serve(fresh, [Request(PROMPTS[0], 2)]))
    assert counts == [sessions.compilations]


@pytest.mark.full
def test_prompts_that_several_cpus_read_while_they_compile_are_not_timed():
    session = open_session(tensor=2, capacity=98)  # nothing was compiled for this capacity
    answers(session, [Request(PROMPTS[0], 2)])
    assert (session.stats.prefill_tokens, session.stats.prefill_timed) == (len(PROMPTS[0]), 0)
    answers(session, [Request(PROMPTS[1], 2)])
    assert session.stats.prefill_timed == len(PROMPTS[1])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], 4), "prompt 2 is empty"),
        (Request([1] * 97, 4), "prompt 2 has 97 tokens, over the cache's 96"),
        (Request([1], 0), "max_new_tokens must be at least 1, got 0"),
        (Request([1], 4, temperature=-1.0), "temperature must be"),
        (Request([1], 4, top_p=0.0), "top_p must be"),
        (Request([1], 2.5), "max_new_tokens, logprobs and the ids of .* must be whole numbers"),
        (Request([1], 4, logprobs=1.5), "the ids of logit_bias must be whole numbers"),
        (Request([1], 4, logit_bias={"a": -1.0}), "the ids of logit_bias must be whole numbers"),
        (Request([1.5], 4), "prompt 2, stop_ids, max_new_tokens, logprobs and"),
        (Request([1], 4, stop_ids=5), "must be whole numbers"),
        (Request(b"HAMLET.", 4), "prompt 2 must be a list of ids, not bytes"),
        (Request({5: 1}, 4), "prompt 2 must be a list of ids, not dict"),
        (Request([1], 4, stop="Exit"), "stop must be a list of texts, none .*, not 'Exit'"),
        (Request([1], 4, stop=[5]), "stop must be a list of texts"),
        (Request([1], 4, stop=None), "stop must be a list of texts"),
        (Request([1], 4, stop=[""]), "stop must be a list of texts, none of them empty"),
        (Request([1], 4, logprobs=0), "this session gives no log-probabilities"),
        (Request([1], 4, logprobs=21), r"logprobs must be in \[0, 20\], got 21"),
        (Request([1], 4, logprobs=-1), r"logprobs must be in \[0, 20\], got -1"),
        *((Request(ids, 1), "prompt 2 has an id that") for ids in ([1, 10**6], [-1], [2**31])),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_any_work(
    session, another, request_, message
):
    before = session.stats.prefill_tokens
    with pytest.raises(ValueError, match=message):
        next(serve(session, [Request([1], 4), request_]))
    assert session.stats.prefill_tokens == before
    assert answers(session, [Request([1], 2)]) == answers(another, [Request([1], 2)])


def test_a_prompt_is_that_which_was_submitted_whatever_becomes_of_the_list(session):
    prompt, want = [*PROMPTS[0]], answers(session, [Request(PROMPTS[0], 5)])
    tokens = []
    for event in serve(session, [Request(prompt, 5)]):
        tokens.append(event.token)
        prompt[0:0] = [1, 2]
    assert tokens == want[0][0]


# ---- insert


def inserted(session, slots, capacity=40, dtype="float32", **axes):
    """Four slots after two rows full of sevens are inserted."""
    state = model.init_state(session.model.config, 4, 40, "float32")
    prompt = model.init_state(session.model.config, 2, capacity, dtype)
    prompt = jax.tree.map(lambda x: jnp.full_like(x, 7), prompt)
    return model.insert(state, prompt, np.array(slots), mesh=make_mesh(**axes))


def test_insert_copies_rows_into_the_slots_that_it_is_given_and_no_others(session):
    for leaf in jax.tree.leaves(inserted(session, [2, -1])):
        filled = np.asarray(leaf).reshape(4, -1).astype(np.float32)
        assert (filled[2] == 7).all() and not (filled[[0, 1, 3]] == 7).any()


@pytest.mark.parametrize(
    "slots, options, told",
    [
        *((slots, dict(), "insert into slots") for slots in ([4, 0], [-2, 0], [1, 1])),
        ([0], dict(), "insert needs one slot number for each of 2 rows, not 1"),
        ([3, -1], dict(data=2), r"\[0, 2\), numbered within the data shard of its row"),
        ([0, 1], dict(capacity=41), "states of one capacity and one dtype of cache"),
        ([0, 1], dict(dtype="bfloat16"), "states of one capacity and one dtype of cache"),
    ],
)
def test_an_insert_that_would_drop_or_change_something_is_refused(session, slots, options, told):
    with pytest.raises(ValueError, match=told):
        inserted(session, slots, **options)


@given(st.integers(1, 5000))
def test_a_bucket_is_the_smallest_of_a_short_list_that_holds_the_tokens(count):
    lengths = [32, 64, 128, 256, steps.PROMPT_CHUNK]
    assert steps.bucket_for(count) == next((n for n in lengths if count <= n), 512)


def test_complete_gives_the_text_of_each_prompt_without_its_stop_token(session):
    tok = session.model.tokenizer
    ids = [encode(tok, text) for text in ("HAMLET.", "Enter the queen", "KING.")]
    sampled = [Request(x, 6, seed=7 + i, temperature=0.9) for i, x in enumerate(ids)]
    tokens, _ = answers(session, sampled)
    texts = [decode(tok, x) for x in tokens]
    options = dict(max_new_tokens=6, slots=2, seed=7, temperature=0.9)
    assert complete(session.model, ["HAMLET.", ids[1], "KING."], **options) == texts
    options["seed"] = np.uint8(7)
    assert complete(session.model, iter(["HAMLET.", ids[1], "KING."]), **options) == texts
    stop = tokens[1][3]
    stopping = session.model._replace(tokenizer=tok._replace(stop_ids=frozenset([stop])))
    cut = [x[: x.index(stop)] if stop in x else x for x in tokens]
    assert complete(stopping, ids, **options) == [decode(tok, x) for x in cut]
    assert complete(session.model, [], 5) == []
    with pytest.raises(ValueError, match="no tokenizer"):
        complete(session.model._replace(tokenizer=None), ids, 5)


def test_complete_tells_of_a_reply_that_is_none(session):
    weights = session.model.weights
    spoiled = session.model._replace(weights=weights._replace(norm=weights.norm * np.nan))
    with pytest.raises(ValueError, match="prompt 1: the model's logits are NaN or infinite"):
        complete(spoiled, ["HAMLET.", "KING."], 5)


def test_a_wrong_kind_of_thing_is_told_apart(session):
    with pytest.raises(TypeError, match="a list of prompts, and each is"):
        complete(session.model, "HAMLET.", 5)
    with pytest.raises(TypeError, match="each is a text or a list of ids"):
        complete(session.model, PROMPTS[0], 5)
    with pytest.raises(ValueError, match="top_p and min_p need a temperature above 0"):
        complete(session.model, ["HAMLET."], 5, top_k=5)
    with pytest.raises(ValueError, match="no weights"):
        complete(session.model._replace(weights=None), ["HAMLET."], 5)
    with pytest.raises(TypeError, match="float"):
        log_probabilities(session.model, [1.5, 2.0])
    for weights in (None, session.model.weights._replace(layers=[])):
        with pytest.raises(ValueError, match="the weights are not those of the config"):
            log_probabilities(session.model._replace(weights=weights), [1, 2])
    for wrong in (dict(slots=-5), dict(capacity=0)):
        with pytest.raises(ValueError, match="slots and capacity must be at least 1, not"):
            load(model, **wrong)
    with pytest.raises(TypeError, match=r"<module 'llama3' .* is not a model file, such as"):
        load(llama3)
    for mesh in (None, session.model.mesh):
        with pytest.raises(ValueError, match="kv_quant 'int4' is not int8"):
            load(model, mesh=mesh, kv_quant="int4")
    with pytest.raises(TypeError, match="'llama3' is not a model file"):
        load("llama3")
    for mesh in ("tensor=2", dict(tensor=2), jax.make_mesh((1,), ("x",))):
        with pytest.raises(TypeError, match=r"a mesh is made by common\.sharding\.make_mesh, and"):
            load(model, mesh=mesh)
    with pytest.raises(ValueError, match="quant '8' is not one of int8"):
        load(model, quant=8)
    with pytest.raises(TypeError, match="this is no Request"):
        submit(session, dict(prompt=[1]))
    for wrong in (dict(grammar={"type": "object"}), dict(cache_salt=7), dict(cache_salt=None)):
        with pytest.raises(TypeError, match="grammar and cache_salt must be texts"):
            submit(session, Request([1], 4, **wrong))
    with pytest.raises(TypeError, match="each is a text or a list of ids"):
        complete(session.model, np.array(PROMPTS[0]), 5)
    with pytest.raises(ValueError, match="slots must be an integer of at least 1, got 0"):
        complete(session.model, ["HAMLET."], 5, slots=0)
    biased = [complete(session.model, ["A"], 2, logit_bias=x) for x in ({7: 99.0}, [(7, 99.0)])]
    assert biased[0] == biased[1] == [decode(session.model.tokenizer, [7, 7])]
    llama, cache = session.model, model.init_state(session.model.config, 1, 6, jnp.float32).cache
    tokens_BT, end_B = jnp.ones((2, 4), int), jnp.array([4, 3])  # the second one leaves padding out
    two = model.init_state(llama.config, 2, 6, jnp.float32).cache
    found, _ = logits(model, llama.weights, two, tokens_BT, end_B, **llama.static)
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()
    with pytest.raises(ValueError, match="the cache has room for 6 tokens"):
        given = llama.weights, cache, jnp.array([[1] * 7]), jnp.array([7])
        logits(model, *given, config=llama.config, mesh=llama.mesh)


def test_logits_of_a_text_are_one_program(session):
    """The pages call `logits` so. Operation by operation, a large model would take minutes."""
    llama = session.model
    cache = model.init_state(llama.config, 1, 7, jnp.float32).cache
    given = model, llama.weights, cache, jnp.array([PROMPTS[0]]), jnp.array([4])
    before = sessions.compilations
    scores, _ = logits(*given, config=llama.config, mesh=llama.mesh)
    jax.block_until_ready(scores)
    assert sessions.compilations - before == 1


def test_a_directory_without_a_tokenizer_takes_ids_and_says_so_when_a_text_is_given():
    opened = load(model, str(FIXTURES / "llama3" / "tied"), mesh=make_mesh(), dtype="float32")
    events = list(serve(start_session(opened, 1, 32), [Request([3, 4, 5], 4)]))
    assert len(events) == 4 and opened.tokenizer is None
    with pytest.raises(ValueError, match="has no tokenizer"):
        complete(opened, ["a text"], 4)
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        submit(start_session(opened, 1, 32), Request([3], 4, stop=["the"]))
