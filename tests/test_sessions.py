"""Requests that come, end and are given up at any time, and beginnings of prompts that are kept.
Whatever happens around a request, its text is the one that it has alone."""

import functools

import numpy as np
import pytest
from engine import load
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st

from common.serving import prefixes
from common.serving import serve as serving
from common.serving import session as sessions
from common.serving.load import Model
from common.serving.score import log_probabilities
from common.serving.serve import cancel, is_busy, serve, step, submit
from common.serving.session import Request, start_session

CHUNK, CAPACITY = 16, 64
SAMPLED = dict(temperature=0.9, top_k=50, top_p=0.95)
CASES = {
    "gpt2": ("prefixed", "", "float32"),
    "llama3": ("scaled", "data=2,tensor=2", "int8"),
    "qwen3": ("moe", "data=2", "float32"),
    "gpt_oss": ("plain", "tensor=2", "float32"),  # sliding windows
    "llama4": ("text", "", "float32"),  # chunks
    "deepseek_r1": ("yarn", "data=2,tensor=2", "float32"),  # latents, split by positions
    "kimi_k2": ("plain", "tensor=2", "int8"),
}


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """Prompts of a few tokens then take several chunks, and their blocks are shared."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sessions, serving):
            patch.setattr(module, "PROMPT_CHUNK", CHUNK)
        patch.setattr(sessions, "SMALLEST_BUCKET", CHUNK)
        patch.setattr(serving, "LEAST_COST", CHUNK // 2)
        patch.setattr(prefixes, "BLOCK", 4)
        yield


@functools.cache
def model_of(family):
    variant, axes, _ = CASES[family]
    engine = load(family, variant, axes)
    module, config, weights, mesh, *_ = engine
    return Model(module, config, mesh, weights, None, np.dtype("float32"), None, None)


def open_session(family, **options):
    options = dict(reuse_multiple=CHUNK) | options
    return start_session(model_of(family), 4, CAPACITY, CASES[family][2], **options)


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


@functools.cache
def alone(family, i):
    """The tokens of a request of the pool, in a session that has no other."""
    return [event.token for event in serve(open_session(family), [pool(family)[i]])]


class Run:
    """A session, what came of each request, and which were given up."""

    def __init__(self, family, **options):
        self.family, self.session = family, open_session(family, **options)
        self.which, self.tokens, self.finish, self.dropped = [], [], [], set()

    def submit(self, i):
        assert submit(self.session, pool(self.family)[i]) == len(self.which)
        self.which.append(i)
        self.tokens.append([])
        self.finish.append(None)

    def cancel(self, number):
        cancel(self.session, number)
        self.dropped.add(number)

    def step(self):
        for number, token, finish, *_ in step(self.session):
            assert self.finish[number] is None, "a token after the last one"
            assert number not in self.dropped, "a token of a request that was given up"
            self.tokens[number].append(token)
            self.finish[number] = finish

    def end(self):
        while is_busy(self.session):
            self.step()
        for i, tokens, finish, number in zip(
            self.which, self.tokens, self.finish, range(len(self.which)), strict=True
        ):
            want = alone(self.family, i)
            if number in self.dropped:
                assert tokens == want[: len(tokens)]
            else:
                assert (tokens, finish) == (want, "length")
        assert not np.asarray(self.session.state.length_B).any()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=40,
)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f == "llama3" else pytest.mark.full) for f in CASES],
)
@settings(max_examples=25)
@given(ACTIONS, st.sampled_from([0, 2, 4]), st.sampled_from([0.0, 2e-5, 1.0]), st.booleans())
def test_each_request_has_the_text_that_it_has_alone(family, actions, keep, keep_host, replies):
    """Whatever comes before it, beside it and after it. Replies are reused where no rounding of the
    cache to integers makes a difference."""
    whole = CASES[family][2] == "int8" or not replies
    run = Run(family, keep=keep, keep_host=keep_host, reuse_multiple=CHUNK if whole else 1)
    for what, n in actions:
        if what == "submit":
            run.submit(n)
        elif what == "cancel" and run.which:
            run.cancel(n % len(run.which))
        elif what == "step":
            for _ in range(n):
                run.step()
    run.end()


def test_every_family_has_a_case():
    assert CASES.keys() >= {family for family in FAMILIES if FAMILIES[family].shown}


# ---- drafts and scores


def draft_of(family, source):
    """A source of drafts: the model itself, whose drafts are right; or a model that is half of it,
    whose drafts are mostly wrong."""
    model = model_of(family)
    if source == "itself":
        return model
    if source == "half":
        layers = model.config.num_hidden_layers // 2
        config = model.config._replace(num_hidden_layers=layers)
        weights = model.weights._replace(layers=model.weights.layers[:layers])
        return model._replace(config=config, weights=weights)
    return source


@pytest.mark.parametrize("source", ["lookup", "itself", "half"])
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f == "llama3" else pytest.mark.full) for f in CASES],
)
def test_drafts_change_no_text(family, source):
    run = Run(family, draft=draft_of(family, source), draft_tokens=3, keep=2)
    for i in (4, 0, 9, 5, 2, 8, 1, 7, 3, 6, 5, 9):
        run.submit(i)
        run.step()
    run.end()
    stats = run.session.stats
    assert stats.drafts_right <= stats.drafts
    if source == "itself":
        assert stats.drafts_right > 0.6 * stats.drafts  # a text ends in the middle of its drafts


@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize("family", ["llama3", pytest.param("deepseek_r1", marks=pytest.mark.full)])
def test_scores_are_those_of_the_whole_text(family, draft):
    """Of the tokens taken, of the likeliest, and of the prompt."""
    options = dict(reuse_multiple=CHUNK, logprobs=5, draft=draft, draft_tokens=2)
    session = start_session(model_of(family), 4, CAPACITY, "float32", **options)
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
