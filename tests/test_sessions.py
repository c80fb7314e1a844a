"""Requests that come, end and are given up at any time, and beginnings of prompts that are kept.
Whatever happens around a request, its text is the one that it has alone."""

import functools
import gc
import itertools

import jax
import numpy as np
import pytest
from engine import load, watch
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st

from common import cache
from common.fields import with_layers
from common.serving import prefixes, steps
from common.serving import score as scoring
from common.serving import serve as serving
from common.serving import session as sessions
from common.serving.load import Model
from common.serving.prefixes import Place, Prefixes, Text
from common.serving.score import log_probabilities
from common.serving.serve import cancel, is_busy, serve, step, submit
from common.serving.session import Request, start_session
from common.speculate import NO_DRAFT, lookup

CHUNK, CAPACITY = 16, 64
SAMPLED = dict(temperature=0.9, top_k=50, top_p=0.95)
CASES = {family: facts.served for family, facts in FAMILIES.items()}
QUICK = ("llama3", "qwen3_5")  # run by default: keys and values, and states that cannot be cut


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """Prompts of a few tokens then take several chunks, and their blocks are shared."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sessions, serving, steps):
            patch.setattr(module, "PROMPT_CHUNK", CHUNK)
        patch.setattr(cache, "APPENDED", CHUNK)  # so that windows and chunks are kept in rings
        patch.setattr(cache, "RING_UNIT", 8)
        patch.setattr(steps, "SMALLEST_BUCKET", CHUNK)
        patch.setattr(serving, "LEAST_COST", CHUNK // 2)
        patch.setattr(prefixes, "BLOCK", 4)
        yield


@functools.cache
def model_of(family):
    variant, axes, _ = CASES[family]
    engine = load(family, variant, axes)
    module, config, weights, mesh, *_ = engine
    return Model(module, config, mesh, weights, None, np.dtype("float32"), None, None)


@functools.cache
def slot_bytes(family):
    """What a full slot takes."""
    session = open_session(family)
    return sum(x.nbytes for x in jax.tree.leaves(session.states[0].cache)) // session.slots


def open_session(family, capacity=CAPACITY, **options):
    """With `keep_host` in full slots of each data shard."""
    options = dict(dtype=CASES[family][2], reuse_multiple=CHUNK) | options
    if slots := options.get("keep_host"):
        rows = model_of(family).mesh.shape["data"]
        options["keep_host"] = slots * rows * slot_bytes(family) / 1e9
    return start_session(model_of(family), 4, capacity, **options)


@functools.cache
def pool(family):
    """Requests whose prompts share beginnings of many lengths."""
    size, rng = model_of(family).config.vocab_size, np.random.default_rng(7)
    whole = rng.integers(1, size, CAPACITY - 8).tolist()
    prompts = [whole[:n] for n in (1, 5, 16, 17, 33, 50)]
    prompts += [[*whole[:n], *rng.integers(1, size, m).tolist()] for n, m in ((16, 9), (35, 3))]
    prompts += [whole[7:30], whole[:49]]
    return [
        Request(prompt, 1 + 3 * i % 8, seed=i, **(SAMPLED if i % 3 == 2 else {}))
        for i, prompt in enumerate(prompts)
    ]


def answer(session, request):
    """The tokens of a request, and how many of its prompt were cached."""
    events = list(serve(session, [request]))
    return [event.token for event in events], events[-1].counts.cached


@functools.cache
def alone(family, i):
    """The tokens of a request of the pool, in a session that has no other."""
    return answer(open_session(family), pool(family)[i])[0]


class Run:
    """A session, the events of each request, and which were given up."""

    def __init__(self, family, **options):
        self.family, self.session = family, open_session(family, **options)
        self.which, self.events, self.dropped = [], [], set()

    def submit(self, i):
        assert submit(self.session, pool(self.family)[i]) == len(self.which)
        self.which.append(i)
        self.events.append([])

    def cancel(self, number):
        cancel(self.session, number)
        self.dropped.add(number)

    def step(self):
        for event in step(self.session):
            events = self.events[event.request]
            assert event.counts.cached % self.session.reuse_multiple == 0
            assert not events or events[-1].finish is None, "a token after the last one"
            assert event.request not in self.dropped, "a token of a request that was given up"
            events.append(event)

    def end(self):
        steps = 0
        while is_busy(self.session):
            self.step()
            assert (steps := steps + 1) < 5000, "it never ends"
        for number, (i, events) in enumerate(zip(self.which, self.events, strict=True)):
            tokens, want = [event.token for event in events], alone(self.family, i)
            if number in self.dropped:
                assert tokens == want[: len(tokens)]
            else:
                assert (tokens, events[-1].finish) == (want, "length")
        assert not np.asarray(self.session.states[0].length_B).any()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=40,
)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.full] * (f != QUICK[0])) for f in CASES]
)
@settings(max_examples=25)
@given(
    ACTIONS,
    st.sampled_from([0, 2, 4]),
    st.sampled_from([0.0, 2.5, 100.0]),
    st.booleans(),
    st.sampled_from([None, None, "lookup"]),
)
def test_each_request_has_the_text_that_it_has_alone(
    family, actions, keep, keep_host, replies, draft
):
    """Whatever comes before it, beside it and after it. Replies are reused where no rounding of the
    cache to integers makes a difference."""
    whole = CASES[family][2] == "int8" or not replies
    options = dict(reuse_multiple=CHUNK if whole else 1, draft=draft, draft_tokens=3)
    run = Run(family, keep=keep, keep_host=keep_host, **options)
    for what, n in actions:
        if what == "submit":
            run.submit(n)
        elif what == "cancel" and run.which:
            run.cancel(n % len(run.which))
        elif what == "step":
            for _ in range(n):
                run.step()
    run.end()


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_a_ring_changes_no_text(family, monkeypatch):
    """Texts that are longer than the ring, beside those of layers that keep all positions."""
    layers = open_session(family).states[0].cache
    assert {True, False} == {layer.ring is not None for layer in layers}
    long = [i for i, r in enumerate(pool(family)) if len(r.prompt) + r.max_new_tokens > 35]
    texts = {i: alone(family, i) for i in long}
    monkeypatch.setattr(cache, "APPENDED", CAPACITY)
    whole = open_session(family, CAPACITY + 1)
    assert not any(layer.ring for layer in whole.states[0].cache)
    assert len(long) > 3 and texts == {i: answer(whole, pool(family)[i])[0] for i in long}


@pytest.mark.parametrize("reuse", [CHUNK, 1])
@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("llama4", marks=pytest.mark.full)])
def test_a_ring_that_was_copied_does_not_have_what_its_source_had_lost(family, reuse, monkeypatch):
    """The second text starts from the first one, and its ring has the first one's newest tokens in
    the places of older ones. So the third text cannot start from the second."""
    monkeypatch.setattr(cache, "APPENDED", 64)
    rng, size = np.random.default_rng(3), model_of(family).config.vocab_size
    first = rng.integers(1, size, 140).tolist()
    third = Request([*first[:64], *rng.integers(1, size, 9).tolist()], 20)
    session, fresh = (open_session(family, 160, reuse_multiple=reuse) for _ in range(2))
    assert answer(session, Request(first, 3))[1] == 0
    assert answer(session, Request([*first[:96], 3, 2, 1], 3))[1] > 0
    assert answer(session, third)[0] == answer(fresh, third)[0]


@pytest.mark.full
def test_a_beginning_that_its_own_reply_overwrote_in_a_ring_is_read_again(monkeypatch):
    monkeypatch.setattr(cache, "APPENDED", 64)
    session, fresh = (open_session("gpt_oss", 160) for _ in range(2))
    prompt = pool("gpt_oss")[3].prompt
    answer(session, Request(prompt, 120))
    again = Request([*prompt, 5], 9)
    assert answer(session, again) == answer(fresh, again)


@pytest.mark.full
@pytest.mark.parametrize("keep_host", [0, 100])
def test_a_beginning_that_one_ring_has_lost_is_found_where_another_has_it(keep_host, monkeypatch):
    """The long text comes last, and has the same beginning. With host memory, both texts leave
    their slots before the beginning is wanted again."""
    monkeypatch.setattr(cache, "APPENDED", 24)
    session, rng = open_session("gpt_oss", keep_host=keep_host), np.random.default_rng(3)
    head, *others = rng.integers(1, 90, (6, 2 * CHUNK)).tolist()

    def cached(*prompt):
        return answer(session, Request([*prompt], 2))[1]

    assert cached(*head, 1, 2) == 0
    assert cached(*head, *others[0][:28], 3) == 2 * CHUNK
    if keep_host:
        assert [cached(*other) for other in others[1:]] == [0] * 4
    assert cached(*head, 4, 5) == 2 * CHUNK


# ---- drafts and scores


def draft_of(family, source):
    """A source of drafts: the model itself, whose drafts are right; or a model that is half of it,
    whose drafts are mostly wrong."""
    model = model_of(family)
    if source != "half":
        return model if source == "itself" else source
    layers = model.config.num_hidden_layers // 2
    config = with_layers(model.config, layers)
    weights = model.weights._replace(layers=model.weights.layers[:layers])
    return model._replace(config=config, weights=weights)


@pytest.mark.parametrize(
    "family, source",
    [
        pytest.param(f, s, marks=() if f in QUICK and s == "lookup" else pytest.mark.full)
        for f, s in itertools.product(CASES, ["lookup", "half", "itself"])
        if s == "lookup"
        or f in ("llama3", "deepseek_r1", "qwen3_5")
        or (f, s) == ("gpt_oss", "half")
    ],
)
def test_drafts_change_no_text(family, source):
    run = Run(family, draft=draft_of(family, source), draft_tokens=3, keep=2)
    for i in (4, 0, 9, 5, 2, 8, 1, 7, 3, 6, 5, 9):
        run.submit(i)
        run.step()
    run.end()
    stats, counts = run.session.stats, [events[-1].counts for events in run.events]
    assert stats.drafts_right <= stats.drafts
    assert all(n.drafts_right < len(x) for n, x in zip(counts, run.events, strict=True))
    told = [sum(column) for column in zip(*counts, strict=True)]
    assert told == [stats.cached_tokens, stats.drafts, stats.drafts_right]
    if source == "itself":
        assert stats.drafts_right > 0.6 * stats.drafts  # a text ends in the middle of its drafts


@pytest.mark.one_in(2)
@pytest.mark.parametrize("prompt", [range(40, 60), [9] * 12], ids=["new", "repeated"])
def test_only_tokens_that_lookup_found_are_counted_as_drafts(prompt):
    K, drafts, right = 3, 0, 0
    session = open_session("llama3", draft="lookup", draft_tokens=K)
    request = pool("llama3")[0]._replace(prompt=prompt, max_new_tokens=16)
    text = [*prompt, *answer(session, request)[0]]
    at = len(prompt) + 1  # after the first token, which prefill gives
    while at < len(text):
        found = looked_up(text[:at], K)
        held = [a == b for a, b in zip(found, text[at:], strict=False)]
        now = [*held, False].index(False)
        drafts, right, at = drafts + K * (found[0] != NO_DRAFT), right + now, at + now + 1
    assert (session.stats.drafts, session.stats.drafts_right) == (drafts, right)
    assert bool(drafts) == (prompt != range(40, 60))


def looked_up(text, K):
    """`lookup` for one text, token by token."""
    for n in (3, 2):
        for at in range(len(text) - 2, n - 2, -1):
            if text[at - n + 1 : at + 1] == text[-n:]:
                more = list(text)
                for k in range(K):
                    more.append(more[at + 1 + k])
                return more[len(text) :]
    return [NO_DRAFT] * K


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=14), min_size=1, max_size=4))
def test_lookup_continues_as_the_text_did_when_its_newest_tokens_last_stood_there(texts):
    size, K = 16, 5
    text_BS = np.array([text + [1] * (size - len(text)) for text in texts])
    got = lookup(text_BS, np.array([len(text) - 1 for text in texts]), K)
    assert np.asarray(got).tolist() == [looked_up(text, K) for text in texts]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize("family", [*QUICK, pytest.param("deepseek_r1", marks=pytest.mark.full)])
def test_scores_are_those_of_the_whole_text(family, draft):
    """Of the tokens taken, of the likeliest, and of the prompt."""
    session = open_session(family, dtype="float32", draft=draft, draft_tokens=2, logprobs=True)
    prompt = pool(family)[4].prompt
    events = list(serve(session, [Request(prompt, 12, logprobs=3, echo=True)]))
    tokens = [*prompt, *(event.token for event in events)]
    want = np.asarray(log_probabilities(model_of(family), tokens))
    scored = [*events[0].echo, *(event.score for event in events)]
    assert len(scored) == len(tokens) - 1
    for t, score in enumerate(scored):
        assert abs(score.logprob - want[t, tokens[t + 1]]) < 1e-4
        best = np.argsort(-want[t])[:3]
        assert [i for i, _ in score.likeliest] == best.tolist()
        np.testing.assert_allclose([x for _, x in score.likeliest], want[t, best], atol=1e-4)


# ---- what goes first


def recorded(session, monkeypatch):
    """Notes the lengths of the slots after each decode step, and None for a chunk of a prompt."""
    module, log = session.model.module, []
    watch(monkeypatch, module, "prefill", lambda *_: log.append(None))
    watch(monkeypatch, module, "generate", lambda state, *_: log.append(np.asarray(state.length_B)))
    return log


def test_a_running_text_waits_for_one_chunk_at_most(monkeypatch):
    """Prompts of several chunks keep coming. The two short ones are read together, as one chunk."""
    session = open_session("gpt2")
    log = recorded(session, monkeypatch)
    submit(session, Request(pool("gpt2")[1].prompt, 40))
    for i in (5, 9, 4, 1, 0):
        for _ in range(2):
            step(session)
        submit(session, pool("gpt2")[i]._replace(max_new_tokens=2))
    while is_busy(session):
        step(session)
    gaps = "".join("c" if x is None else "d" for x in log).lstrip("c").split("d")
    assert max(map(len, gaps)) == 1 and "c" in gaps


def test_prompts_begin_in_the_order_in_which_they_came():
    """Also if a long one comes first, and if a later one begins like what is held."""
    session, began = open_session("gpt2"), []
    for i in (9, 0, 5, 1, 4, 0, 5, 2):
        submit(session, pool("gpt2")[i])
    while is_busy(session):
        began += [event.request for event in step(session)]
    assert [*dict.fromkeys(began)] == [*range(8)]


def test_no_slot_that_runs_is_taken():
    """The text that was used least recently runs longest; without its slot it would never end."""
    session, tokens = open_session("gpt2", keep=1), [0] * 7
    for i, new in zip((1, 2, 0, 4, 1, 2, 7), (40, 3, 3, 3, 9, 3, 3), strict=True):
        submit(session, Request(pool("gpt2")[i].prompt, new))
    for _ in range(100):
        for event in step(session):
            tokens[event.request] += 1
    assert tokens == [40, 3, 3, 3, 9, 3, 3] and not is_busy(session)


def test_data_shards_take_turns():
    """A long prompt on one shard does not hold up those of the other."""
    session, prompt = open_session("qwen3"), pool("qwen3")[5].prompt
    long = submit(session, Request(prompt, 2))
    short = submit(session, Request(prompt[20:25], 2))
    first = [event.request for _ in range(4) for event in step(session)]
    assert first[0] == short != long


def test_a_request_that_is_given_up_frees_its_slot_before_the_next_step(monkeypatch):
    session = open_session("gpt2")
    log = recorded(session, monkeypatch)
    requests = [Request(pool("gpt2")[i].prompt, 20, temperature=0.5) for i in (1, 2)]
    numbers = [submit(session, request) for request in requests]
    while len(session.running) < 2:
        step(session)
    step(session)
    assert (log[-1] > 0).sum() == 2
    cancel(session, numbers[0])
    assert numbers[0] not in [event.request for event in step(session)]
    assert (log[-1] > 0).sum() == 1
    cancel(session, numbers[1])
    cancel(session, 12345)  # nobody has this number
    assert step(session) == [] and not is_busy(session)
    np.testing.assert_array_equal(session.states[0].sampling.temperature_B, 0)


def test_what_is_given_up_while_it_waits_is_forgotten():
    session = open_session("gpt2")
    for i in range(9):
        submit(session, Request([1, 2, 3], 50, seed=i))
    step(session)
    waiting = len(session.waiting)
    for _ in range(5):
        cancel(session, submit(session, Request([1, 2, 3], 5)))
    step(session)
    assert len(session.waiting) <= waiting and len(session.works) == 9


@pytest.mark.parametrize(
    "options, told",
    [
        (dict(family="qwen3", slots=3), "3 slots cannot be split evenly over data=2"),
        (dict(slots=0), "slots must be an integer of at least 1, got 0"),
        (dict(slots="2"), "slots must be an integer of at least 1, got '2'"),
        (dict(capacity=10**6), "the model's context, not 1000000"),
        (dict(capacity=0), "capacity must be an integer of at least 1, got 0"),
        (dict(capacity=9.5), "capacity must be an integer of at least 1, got 9.5"),
        (dict(draft="luck"), "draft 'luck' is neither"),
        (dict(reuse_multiple=0), "reuse_multiple must be an integer of at least 1, got 0"),
        (dict(draft_tokens=2.5), "draft_tokens must be an integer of at least 1, got 2.5"),
        (dict(keep=-1), "keep must be an integer of at least 0, got -1"),
        (dict(keep_host=float("nan")), "keep_host must be finite and at least 0, got nan"),
        (dict(dtype="int4"), "a cache holds float32, .* not int4"),
    ],
)
def test_a_session_that_cannot_be_is_refused(options, told):
    options = dict(family="gpt2", slots=4, capacity=16) | options
    with pytest.raises(ValueError, match=told):
        start_session(model_of(options.pop("family")), **options)


def test_log_probabilities_of_a_long_text_are_computed_in_pieces(monkeypatch):
    ids = pool("gpt2")[5].prompt
    whole = np.asarray(log_probabilities(model_of("gpt2"), ids))
    monkeypatch.setattr(scoring, "APPENDED", 7)
    pieces = np.asarray(log_probabilities(model_of("gpt2"), ids))
    np.testing.assert_allclose(pieces, whole, atol=1e-4)


@pytest.mark.parametrize(
    "ids, told", [([], "1 to"), ([1] * 10_000, "not 10000"), ([-1], "not in"), ([10**6], "not in")]
)
def test_log_probabilities_of_what_is_no_text_are_refused(ids, told):
    with pytest.raises(ValueError, match=told):
        log_probabilities(model_of("gpt2"), ids)


@pytest.mark.parametrize(
    "ids, kind", [([[1, 2]], r"int64\[1, 2\]"), ([1.5], "float64"), ("a", "U1")]
)
def test_ids_are_a_list_of_whole_numbers(ids, kind):
    with pytest.raises(TypeError, match=f"a list of whole numbers, not <?{kind}"):
        log_probabilities(model_of("gpt2"), ids)


# ---- beginnings that are held


TEXTS = st.lists(st.integers(0, 1), min_size=0, max_size=20)
NUMBERS = st.lists(st.just(0) | st.integers(0, 20), min_size=6, max_size=6)


@given(st.lists(st.tuples(st.integers(0, 5), TEXTS), max_size=20), TEXTS, NUMBERS)
def test_the_longest_beginning_is_found(changes, wanted, least):
    """As by comparing with every text; a beginning of less than a block is not found. Place n can
    be continued from its first least[n] tokens, or more."""
    index, texts = Prefixes(lambda text, n: n if n >= text.written else 0), {}
    for n, text in changes:
        place = Place("slot", n)
        prefixes.forget(index, place)
        texts.pop(place, None)
        if text:
            prefixes.hold(index, place, Text(text, written=least[n]))
            texts[place] = text
    place, length = prefixes.longest(index, wanted)
    common = {x: prefixes.common_prefix(text, wanted) for x, text in texts.items()}
    usable = [n for x, n in common.items() if n >= max(prefixes.BLOCK, least[x.number])]
    assert length == max(usable, default=0)
    assert not length or (common[place] == length >= least[place.number])
    for place in list(texts):
        prefixes.forget(index, place)
    assert not index.texts and not index.holders


def test_the_least_missed_place_is_empty_or_held_twice_or_used_least_recently():
    index, places = Prefixes(), [Place("slot", n) for n in range(3)]
    prefixes.hold(index, places[1], Text([1] * 8))
    prefixes.hold(index, places[0], Text([2] * 8))
    assert prefixes.least_missed(index, places) == places[2]
    prefixes.hold(index, places[2], Text([3] * 8))
    assert prefixes.least_missed(index, places) == places[1]
    prefixes.use(index, places[1])
    assert prefixes.least_missed(index, places) == places[0]
    prefixes.hold(index, Place("kept", 0), Text([3] * 12, written=12))
    assert prefixes.is_covered(index, places[2])
    assert prefixes.least_missed(index, places) == places[2]
    index.usable = lambda text, n: 0 if text.written else n  # the kept text cannot be continued
    assert not prefixes.is_covered(index, places[2])
    assert prefixes.least_missed(index, places) == places[0]


@pytest.mark.parametrize("options, found", [({}, 0), (dict(keep=4), 48), (dict(keep_host=9), 48)])
def test_a_text_that_its_slot_lost_is_found_in_a_kept_slot_or_in_host_memory(options, found):
    session, rng = open_session("gpt2", **options), np.random.default_rng(3)
    first = Request(pool("gpt2")[5].prompt, 3)
    want, _ = answer(session, first)
    for _ in range(4):  # four slots, and all are needed
        answer(session, Request(rng.integers(1, 90, 40).tolist(), 2))
    assert answer(session, first) == (want, found)


def test_host_memory_is_never_more_than_allowed():
    session, rng = open_session("gpt2", keep_host=2.5), np.random.default_rng(3)
    for _ in range(12):
        answer(session, Request(rng.integers(1, 90, 40).tolist(), 1))
    stored = jax.tree.leaves([text.arrays for text in session.prefixes[0].texts.values()])
    size = sum(part.nbytes for x in stored for part in x.parts.values())
    assert 0 < size <= 2.5 * slot_bytes("gpt2")


@pytest.mark.full
def test_thousands_of_requests_leave_nothing_behind():
    """Every text is right. After every 500 there are as many arrays and objects as before."""
    session, rng = open_session("gpt2", keep=2, keep_host=2.5), np.random.default_rng(1)
    requests, counts = pool("gpt2"), []
    for _ in range(4):
        which, got = {}, {}
        for i in rng.integers(0, len(requests), 500).tolist():
            number = submit(session, requests[i])
            which[number], got[number] = i, []
            if rng.random() < 0.5:
                for event in step(session):
                    got[event.request].append(event.token)
        while is_busy(session):
            for event in step(session):
                got[event.request].append(event.token)
        assert all(got[number] == alone("gpt2", i) for number, i in which.items())
        gc.collect()
        nodes = sum(len(index.texts) for index in session.prefixes)
        arrays = sum(array.nbytes for array in jax.live_arrays())
        counts.append((len(jax.live_arrays()), arrays, nodes, len(gc.get_objects())))
    (arrays, size, nodes, objects), (arrays_, size_, nodes_, objects_) = counts[1], counts[-1]
    assert (arrays, size) == (arrays_, size_) and nodes == nodes_
    assert abs(objects_ - objects) < 2000, counts
    s = session
    assert not (s.arrived or s.works or s.waiting or s.reading or s.read or s.running or s.ahead)


def test_a_conversation_reads_what_is_new_and_every_text_is_the_one_it_has_alone():
    """The reply is reused but for its newest token, which was never read."""
    session = open_session("gpt2", reuse_multiple=1)
    text, held = list(pool("gpt2")[3].prompt), 0
    for turn in range(3):
        reply, cached = answer(session, Request(text, 5))
        assert reply == answer(open_session("gpt2"), Request(text, 5))[0]
        assert cached == held or not turn
        held, text = len(text) + len(reply) - 1, [*text, *reply, 7, 8, 9]


@pytest.mark.parametrize("options", [dict(keep=8), dict(keep=2, keep_host=6)], ids=str)
def test_each_of_many_texts_is_found_where_it_is_kept(options):
    """Twelve texts of 40 tokens, of which slots and kept places hold all, in whole chunks."""
    session, rng = open_session("gpt2", **options), np.random.default_rng(4)
    requests = [Request(rng.integers(1, 90, 40).tolist(), 3) for _ in range(12)]
    want = [answer(session, request)[0] for request in requests]
    for i in (3, 0, 7, 11, 5, 9, 1, 4):
        assert answer(session, requests[i]) == (want[i], 2 * CHUNK)
