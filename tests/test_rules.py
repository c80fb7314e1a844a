"""Grammars, biases and penalties, against their formulas and against validators, at every slot, and
beside requests that have none."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from compare import refused
from engine import load
from hypothesis import given
from hypothesis import strategies as st
from lark import Lark
from llguidance import LLMatcher
from test_sampling import AXES, MESHES, ONE
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from common.sampling import INVALID, RULES_SPEC, Rules, count_token, ruled
from common.server.answers import Completion
from common.server.fields import Refused
from common.server.protocol import Served, ask
from common.serving import steps
from common.serving.load import Model
from common.serving.score import logits
from common.serving.serve import cancel, is_busy, serve, step, submit
from common.serving.session import Request, start_session
from common.sharding import P, make_mesh
from common.text.grammar import json_grammar
from common.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a", "bb", 3]},
        "list": {"type": "array", "items": {"type": "integer", "minimum": -9}, "maxItems": 3},
        "more": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name", "kind", "list"],
    "additionalProperties": False,
}
LARK = 'start: item ("," item)*\nitem: "a" | "b" | "(" item ")"'
CLOCK = r"[0-9]{2}:[0-5][0-9] (am|pm)"
GRAMMARS = [
    LLMatcher.grammar_from_json_schema(SCHEMA, defaults=dict(whitespace_flexible=False)),
    LLMatcher.grammar_from_lark(LARK),
    LLMatcher.grammar_from_regex(CLOCK),
]
VALID = [
    lambda text: jsonschema.validate(json.loads(text), SCHEMA),
    lambda text: Lark(LARK).parse(text),
    lambda text: re.fullmatch(CLOCK, text)[0],
]
VARIANTS = {"llama3": "scaled", "gpt_oss": "plain", "deepseek_r1": "yarn"}


@functools.cache
def model_of(family="llama3", axes=""):
    """A random model, whose tokens are the characters of ASCII, and one that ends a text."""
    module, config, weights, mesh, *_ = load(family, VARIANTS[family], axes)
    vocab = {"Ġ" if i == 32 else chr(i): i - 32 for i in range(32, 127)}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<end>", special=True)])
    stop = frozenset({95})
    tok = Tokenizer(backend, None, {}, stop, (), None, stop, frozenset(), None, 96)
    return Model(module, config, mesh, weights, tok, np.dtype("float32"), None, None)


def answers(session, requests):
    """The text, the finish reason and the tokens of each request."""
    all_ = [["", None, []] for _ in requests]
    for event in serve(session, requests):
        answer = all_[event.request]
        answer[0], answer[1] = answer[0] + event.text, event.finish
        answer[2].append(event.token)
    return all_


# ---- the formulas


@functools.cache
def ruler(shape):
    def body(x_BV, rules, token_B, is_on_B):
        return ruled(x_BV, rules), count_token(rules, token_B, is_on_B).seen_BV

    split, by_slot = P("data", AXES), P("data")
    return jax.jit(
        jax.shard_map(
            body,
            mesh=make_mesh(*shape),
            in_specs=(split, RULES_SPEC, by_slot, by_slot),
            out_specs=(split, split),
        )
    )


def formulas(x_V, allowed, biases, repetition, frequency, presence, prompt, reply):
    """OpenAI's and transformers' definitions, token by token."""
    out = np.array(x_V, np.float64)
    for i in range(len(x_V)):
        out[i] += sum(np.float64(bias) for id_, bias in biases if id_ == i)
        if i in prompt or i in reply:
            out[i] = out[i] / repetition if out[i] > 0 else out[i] * repetition
        out[i] -= frequency * reply.count(i) + presence * (i in reply)
        out[i] = out[i] if i in allowed else -np.inf
    return out


@given(st.data(), st.sampled_from([ONE, *MESHES]), st.sampled_from([1, 5, 33, 40]))
def test_logits_are_changed_as_the_definitions_say_on_any_mesh(data, shape, part):
    B, V = 4, part * shape[1] * shape[2]
    ids = st.integers(0, V - 1)
    x_BV = np.random.default_rng(V).normal(size=(B, V)).astype(np.float32) * 4
    drawn = [
        (
            data.draw(st.sets(ids)),
            [(i, data.draw(st.floats(-100, 100, width=32))) for i in data.draw(st.sets(ids))],
            *(data.draw(st.floats(low, 2, width=32)) for low in (0.5, -2, -2)),
            data.draw(st.lists(ids, max_size=5)),
            data.draw(st.lists(ids, max_size=5)),
        )
        for _ in range(B)
    ]
    allowed_BV = np.array([[i in slot[0] for i in range(V)] for slot in drawn])
    bits = np.packbits(np.pad(allowed_BV, ((0, 0), (0, -V % 32))), axis=1, bitorder="little")
    bias_id_BN, bias_BN = np.full((B, V), -1, np.int32), np.zeros((B, V), np.float32)
    seen_BV = np.zeros((B, V), np.int32)
    for b, (_, biases, *_, prompt, reply) in enumerate(drawn):
        for n, (id_, bias) in enumerate(biases):
            bias_id_BN[b, n], bias_BN[b, n] = id_, bias
        for i in range(V):
            seen_BV[b, i] = 2 * reply.count(i) + (i in prompt)
    penalties = [np.array([slot[n] for slot in drawn], np.float32) for n in (2, 3, 4)]
    rules = Rules(bits.view(np.uint32), bias_id_BN, bias_BN, *penalties, seen_BV)
    token_B, is_on_B = np.arange(B) % V, np.arange(B) != 2
    got_BV, counted_BV = ruler(shape)(x_BV, rules, token_B.astype(np.int32), is_on_B)
    want_BV = [formulas(x_V, *slot) for x_V, slot in zip(x_BV, drawn, strict=True)]
    np.testing.assert_allclose(got_BV, want_BV, rtol=1e-6, atol=1e-4)
    seen_BV[is_on_B, token_B[is_on_B]] += 2
    np.testing.assert_array_equal(counted_BV, seen_BV)


def test_a_logit_that_is_no_number_is_not_hidden_by_a_rule():
    rules = Rules(
        *(jnp.zeros((1, n), t) for n, t in ((1, jnp.uint32), (1, int), (1, float))),
        *[jnp.ones(1)] * 3,
        None,
    )
    run = jax.shard_map(
        ruled,
        mesh=make_mesh(),
        in_specs=(P("data", AXES), RULES_SPEC),
        out_specs=P("data", AXES),
    )
    got = np.asarray(run(jnp.array([[1.0, jnp.nan, jnp.inf, -jnp.inf]]), rules))
    np.testing.assert_array_equal(got, [[-np.inf, np.nan, np.inf, -np.inf]])


@functools.cache
def whole_logits(size):
    """Logits of every token of a text of `size` tokens, by the definition of attention."""
    model = model_of()
    static = dict(config=model.config, mesh=model.mesh, implementation="reference")
    cache = model.module.init_state(model.config, 1, size, jnp.float32).cache
    return jax.jit(
        lambda text: logits(model.module, model.weights, cache, text, jnp.array([size]), **static)[
            0
        ]
    )


def by_definition(request, size=64):
    """The greedy tokens of a request, each by a whole new reading of the text."""
    text, n = [*request.prompt], len(request.prompt)
    while len(text) < n + request.max_new_tokens:
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(text)] = text
        x_V = np.asarray(whole_logits(size)(padded))[0, len(text) - 1]
        rules = request.logit_bias, request.repetition_penalty, request.frequency_penalty
        known = *rules, request.presence_penalty, text[:n], text[n:]
        text.append(int(np.argmax(formulas(x_V, range(len(x_V)), *known))))
    return text[n:]


RULED = [
    dict(),
    dict(repetition_penalty=1.4),
    dict(frequency_penalty=0.7, presence_penalty=-0.4),
    dict(presence_penalty=1.5, logit_bias=[(7, 9.0), (60, 4.0), (130, -100.0)]),
    dict(repetition_penalty=0.8, frequency_penalty=2.0),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "axes, options",
    [
        ("", {}),
        ("data=2,tensor=2", dict(draft="lookup")),
        ("data=2,expert=2", {}),
        ("tensor=4", dict(logprobs=True)),
    ],
)
def test_texts_with_penalties_and_biases_are_those_of_the_definitions(axes, options):
    prompts = [[5, 9, 5, 9, 5], [70, 1], list(range(40, 60))]
    requests = [Request(p, 12, **more) for p in prompts for more in RULED]
    session = start_session(model_of(axes=axes), 4, 64, "float32", **options)
    for request, (_, _, tokens) in zip(requests, answers(session, requests), strict=True):
        assert tokens == by_definition(request), request
    assert len({tuple(by_definition(Request(prompts[0], 12, **more))) for more in RULED}) == 5


# ---- grammars


def mixed(count, seed):
    """Requests with each grammar and without, greedy or sampled, some too short for theirs."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            rng.integers(0, 95, rng.integers(1, 20)).tolist(),
            int(rng.choice([8, 100])),
            temperature=float(rng.choice([0, 0.7, 2])),
            seed=int(rng.integers(2**32)),
            stop_ids={95},
            grammar=(*GRAMMARS, None)[i % 4],
        )
        for i in range(count)
    ]


@functools.cache
def alone(family, axes, slots, options, seed, count):
    """The answers to the requests without a grammar, where no other requests are. With another
    number of slots or of tokens in a step, products may be rounded in another way."""
    session = start_session(model_of(family, axes), slots, 128, "float32", **dict(options))
    return answers(session, mixed(count, seed)[3::4])


def check_all(requests, got, free):
    complete = 0
    for i, (request, (text, finish, tokens)) in enumerate(zip(requests, got, strict=True)):
        if request.grammar is None:
            assert [text, finish, tokens] == free[i // 4]
            continue
        if finish == "stop":
            VALID[GRAMMARS.index(request.grammar)](text)
            complete += 1
        else:  # and then its text is the beginning of one that fits
            matcher = LLMatcher(vocabulary(), request.grammar)
            assert finish == "length" and matcher.try_consume_tokens(tokens) == len(tokens)
    assert complete > len(requests) // 3


def vocabulary():
    from common.serving.rules import vocabulary_of

    return vocabulary_of(model_of())


@pytest.mark.parametrize(
    "family, axes, slots, options",
    [
        ("llama3", "", 1, {}),
        ("llama3", "", 8, dict(logprobs=True)),
        pytest.param("llama3", "", 8, dict(draft="lookup"), marks=pytest.mark.full),
        pytest.param("gpt_oss", "data=2,tensor=2", 8, dict(logprobs=True), marks=pytest.mark.full),
        pytest.param("deepseek_r1", "tensor=4", 8, {}, marks=pytest.mark.full),
    ],
)
def test_a_text_fits_its_grammar_and_changes_no_other(family, axes, slots, options, pytestconfig):
    count = 24 if not pytestconfig.getoption("--all") else 475 if slots > 1 else 100
    requests = mixed(count, slots)
    session = start_session(model_of(family, axes), slots, 128, "float32", **options)
    free = alone(family, axes, slots, tuple(options.items()), slots, count)
    check_all(requests, answers(session, requests), free)


@pytest.mark.full
def test_requests_that_are_given_up_change_no_text():
    requests, session = mixed(16, 3), start_session(model_of(), 8, 128, "float32", logprobs=True)
    got, begun = [["", None, []] for _ in requests], set()
    for request in requests:
        submit(session, request)
    while is_busy(session):
        for event in step(session):
            assert event.request % 5 != 2 or event.request not in begun
            begun.add(event.request)
            if event.request % 5 == 2:
                cancel(session, event.request)
            answer = got[event.request]
            answer[0], answer[1] = answer[0] + event.text, event.finish
            answer[2].append(event.token)
    stay = [i for i in range(len(requests)) if i % 5 != 2]
    free = alone("llama3", "", 8, (("logprobs", True),), 3, 16)
    assert all(len(got[i][2]) == 1 for i in range(len(requests)) if i not in stay)
    for i in stay:
        if requests[i].grammar is None:
            assert got[i] == free[i // 4]
        elif got[i][1] == "stop":
            VALID[i % 4](got[i][0])


def test_where_nobody_asks_the_steps_are_those_of_the_model_file(monkeypatch):
    session = start_session(model_of(), 4, 64, "float32")
    with monkeypatch.context() as patch:
        for name in ("decode", "prefill_asked"):
            patch.delattr(steps, name)
        answers(session, [Request([1, 2], 3), Request([5], 2, temperature=1.0)])
    answers(session, [Request([1, 2], 3, logit_bias=[(3, 1.0)], grammar=GRAMMARS[0])])
    assert session.seen_BV is None
    answers(session, [Request([1, 2], 3, presence_penalty=1.0)])
    assert session.seen_BV.shape == (4, 131)


def test_a_text_ends_where_its_grammar_ends_or_may_end_and_the_model_ends():
    session = start_session(model_of(), 4, 64, "float32")
    clock, items = (Request([1, 2], 50, grammar=grammar) for grammar in GRAMMARS[:0:-1])
    many = [items._replace(temperature=2.0, seed=seed, stop_ids={95}) for seed in range(12)]
    (text, finish, tokens), *others = answers(session, [clock, *many])
    assert (finish, len(tokens)) == ("stop", 8) and VALID[2](text)
    ended = [(text, tokens) for text, finish, tokens in others if finish == "stop"]
    assert len(ended) > 6 and all(tokens[-1] == 95 for _, tokens in ended)
    assert all(VALID[1](text) for text, _ in ended)


def test_a_grammar_that_fails_ends_its_own_reply(monkeypatch):
    session = start_session(model_of(), 4, 64, "float32")
    monkeypatch.setattr("common.serving.serve.check_grammar", lambda *_: None)
    requests = [Request([1, 2], 5, grammar="{}"), Request([1, 2], 5)]
    (_, finish, tokens), (*_, others) = answers(session, requests)
    assert (finish, tokens, len(others)) == ("invalid", [INVALID], 5)


def test_a_grammar_that_grows_too_large_ends_its_reply_as_invalid():
    """Whatever it has allowed so far is no reply that fits."""
    session = start_session(model_of(), 1, 64, "float32")
    grammar = LLMatcher.grammar_from_regex("a{1000000}")
    ((*_, finish, _),) = answers(session, [Request([1, 2], 50, grammar=grammar)])
    assert finish == "invalid"
    served = Served(start_session(model_of(), 1, 64, "float32", logprobs=True), "model", 9)
    body = dict(prompt=[1, 2], max_tokens=50, structured_outputs=dict(regex="a{1000000}"))
    completion = Completion(served, asked := ask(served, "text", body))
    with pytest.raises(Refused, match="a grammar grew too large"):
        for event in serve(served.session, asked.requests):
            completion.add(0, event)


def test_what_no_rule_may_be_is_refused_in_one_line():
    session = start_session(model_of(), 4, 64, "float32")
    for wrong, line in (
        (dict(repetition_penalty=0.0), "repetition_penalty must be finite and > 0, got 0.0"),
        (dict(presence_penalty=3), "presence_penalty must be in [-2, 2], got 3"),
        (dict(logit_bias=[(131, 1.0)]), "logit_bias must have ids in [0, 131) and numbers"),
        (dict(logit_bias=[(1, 101.0)]), "got 1: 101"),
        (dict(logit_bias=[(1, float("nan"))]), "got 1: nan"),
        (dict(logit_bias=[(0.5, 1.0)]), "and the ids of logit_bias must be whole numbers"),
        (dict(logit_bias=[(i, 1.0) for i in range(513)]), "logit_bias has more than 512 tokens"),
        (dict(grammar="start: x"), "the grammar cannot be followed: "),
        (dict(grammar=LLMatcher.grammar_from_lark("start: x")), 'unknown name: "x"'),
        (dict(grammar=json_grammar({"$ref": "#"})), "cannot be followed: no text fits it"),
    ):
        assert "\n" not in refused(ValueError, line, submit, session, Request([1], 2, **wrong))
    plain = start_session(model_of()._replace(tokenizer=None), 2, 64, "float32")
    refused(ValueError, "a grammar needs a tokenizer", submit, plain, Request([1], 2, grammar="{}"))
