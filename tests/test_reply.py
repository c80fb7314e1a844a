"""If a reply has channels, only the final one is shown and remembered. The analysis is shown on
request. Thoughts between two marks are an analysis."""

import io
import itertools
from types import SimpleNamespace

import llguidance
import pytest
import tokenizers
from compare import refused
from tokenizers import decoders, models, pre_tokenizers

from common.command import converse
from common.command.arguments import parser
from common.serving.serve import end_of
from common.serving.session import Event, Stats, Work
from common.text.chat import thinking_options
from common.text.grammar import behind_thoughts
from common.text.reply import (
    FINAL,
    ParserState,
    end_speech,
    follow,
    say,
    speaks_harmony,
    start_speech,
)
from common.text.tokenizer import Tokenizer, encode

SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
SPECIAL += ("<|constrain|>",)
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant"
)
THOUGHT = "<|channel|>analysis<|message|>A sum, naïve.<|end|>"
CALL = "<|start|>assistant<|channel|>commentary to=f <|message|>{}<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>Père: 4<|return|>"


def bytes_tokenizer(special, added, template, stop):
    """Makes a tokenizer of bytes and the markers. In it, é is two tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*special])
    backend.add_tokens([*added])
    tokens = backend.get_added_tokens_decoder()
    return Tokenizer(
        backend, template, {}, frozenset(i for i, x in tokens.items() if x.special),
        tuple((x.content, x.special) for x in tokens.values()), None,
        frozenset([backend.token_to_id(stop)]), frozenset(), None, backend.get_vocab_size(),
    )  # fmt: skip


@pytest.fixture
def tok():
    return bytes_tokenizer(SPECIAL, (), TEMPLATE, "<|return|>")


def options(*argv):
    return parser("gpt_oss").parse_args(argv)


def events(tok, text, *argv):
    """What a session says of a reply that has this text."""
    ids, session = encode(tok, text), SimpleNamespace(model=SimpleNamespace(tokenizer=tok))
    session.capacity = 1000
    request = converse.make_request(
        SimpleNamespace(tokenizer=tok, sampling={}), options(*argv), [0], 0
    )._replace(max_new_tokens=len(ids))
    speech = start_speech(tok, [0], request.is_chat, request.stop)
    work = Work(0, request, [0], speech)
    for token in ids:
        work.tokens.append(token)
        yield end_of(session, work, Event(0, token))


def reply_to(tok, text, *argv):
    reply, shown = converse.Reply([], [], []), ""
    for event in events(tok, text, *argv):
        reply, more = converse.extend(reply, event, 0.0, options(*argv), tok)
        shown += more
    assert shown == "".join(reply.text)
    return reply


def test_every_token_belongs_to_the_channel_of_its_message(tok):
    state, found = ParserState(), {}
    for token in encode(tok, THOUGHT + "\n" + CALL + ANSWER.removesuffix("<|return|>")):
        state, channel = follow(tok, state, token)
        found[channel] = [*found.get(channel, []), token]
    text = {c: tok.backend.decode(ids) for c, ids in found.items() if c}
    assert text == {"analysis": "A sum, naïve.", "commentary": "{}", FINAL: "Père: 4"}


def test_the_final_channel_alone_is_shown(tok):
    reply = reply_to(tok, THOUGHT + CALL + ANSWER)
    assert "".join(reply.text) == "".join(reply.answer) == "Père: 4"


def test_the_analysis_is_shown_on_request_but_is_no_part_of_the_answer(tok):
    reply = reply_to(tok, THOUGHT + CALL + ANSWER, "--show-analysis")
    assert "".join(reply.text) == "A sum, naïve.\n\nPère: 4"
    assert "".join(reply.answer) == "Père: 4"


def test_a_message_without_a_channel_is_final(tok):
    assert "".join(reply_to(tok, "<|message|>Yes<|return|>").text) == "Yes"


def test_a_stop_text_ends_the_answer_and_not_the_analysis_before_it(tok):
    reply = reply_to(tok, THOUGHT + ANSWER, "--show-analysis", "--stop", "um", "--stop", "re")
    assert "".join(reply.text) == "A sum, naïve.\n\nPè" and reply.finish == "stop"


def test_what_may_begin_a_stop_text_is_shown_where_its_message_ends(tok):
    text = ANSWER.replace("<|return|>", " EN<|end|>") + CALL + ANSWER
    assert "".join(reply_to(tok, text, "--stop", "END").text) == "Père: 4 ENPère: 4"


def test_raw_prompts_and_other_tokenizers_show_everything(tok):
    text = THOUGHT + ANSWER
    words = "analysisA sum, naïve.assistantfinalPère: 4"
    assert "".join(reply_to(tok, text, "--raw").text) == words
    assert "".join(reply_to(tok._replace(chat_template=None), text).text) == words
    other = tok._replace(special_ids=tok.special_ids - {tok.backend.token_to_id("<|channel|>")})
    assert speaks_harmony(tok) and not speaks_harmony(other)
    assert "A sum" in "".join(reply_to(other, text).text)


def test_an_answer_that_did_not_begin_is_reported(tok, capsys):
    one = parser("").parse_args(["--max-new-tokens", "1"])
    converse.note_end(reply_to(tok, THOUGHT), one)
    assert "--max-new-tokens" in capsys.readouterr().err
    converse.note_end(reply_to(tok, THOUGHT + ANSWER[:-10]), one)
    converse.note_end(reply_to(tok, THOUGHT, "--raw"), one)
    assert not capsys.readouterr().err


def test_a_conversation_remembers_answers_alone(tok, monkeypatch):
    prompts, written = [], []

    def scripted(session, requests):
        prompts.append(tok.backend.decode(requests[0].prompt, skip_special_tokens=False))
        yield from events(tok, THOUGHT + ANSWER, "--chat")

    monkeypatch.setattr(converse, "serve", scripted)
    monkeypatch.setattr(converse, "write", written.append)
    monkeypatch.setattr("sys.stdin", io.StringIO("2 + 2?\nSure?\n"))
    config = SimpleNamespace(max_position_embeddings=1000, vocab_size=10**6)
    model = SimpleNamespace(tokenizer=tok, sampling={}, config=config)
    session = SimpleNamespace(model=model, capacity=1000, stats=Stats())
    converse.converse(session, options("--chat", "--show-analysis"))
    turn = "<|start|>user<|message|>{}<|end|>"
    first = turn.format("2 + 2?")
    said = "<|start|>assistant<|message|>Père: 4<|end|>"
    assert prompts == [
        f"{first}<|start|>assistant",
        f"{first}{said}{turn.format('Sure?')}<|start|>assistant",
    ]
    assert "".join(written) == "A sum, naïve.\n\nPère: 4\n" * 2


def test_the_channel_of_a_call_is_its_recipient(tok):
    for header in (
        "<|channel|>commentary to=functions.get-it <|constrain|>json<|message|>",
        " to=functions.get-it<|channel|>commentary json<|message|>",
        " to=functions.get-it<|message|>",
    ):
        state, channels = ParserState(), set()
        for token in encode(tok, THOUGHT + "<|start|>assistant" + header + "{}<|call|>"):
            state, channel = follow(tok, state, token)
            channels.add(channel)
        assert channels == {None, "analysis", "functions.get-it"}
        reply = reply_to(tok, THOUGHT + "<|start|>assistant" + header + "{}<|call|>")
        assert not "".join(reply.text) and reply.channel == "functions.get-it"


# ---- thoughts between two marks

THINKS = "{{ messages[0].content }}<think>\n</think>"


def thinker(kind):
    """The marks are text, added tokens, or special tokens."""
    marks = ("<think>", "</think>")
    special, added = marks * (kind == "special"), marks * (kind == "added")
    return bytes_tokenizer(("<eos>", "<call>", *special), added, THINKS, "<eos>")


def heard(tok, prompt, reply, stop=(), keep_special=False, is_chat=True):
    """The texts of a reply's channels, in their order."""
    speech, said = start_speech(tok, encode(tok, prompt), is_chat, stop, keep_special), []
    for token in encode(tok, reply):
        if speech.stream.stopped:
            break
        speech, text = say(tok, speech, token)
        said.append((speech.channel, text))
    said.append((speech.channel, end_speech(tok, speech)))
    grouped = itertools.groupby(((c, t) for c, t in said if t), lambda x: x[0])
    return [(channel, "".join(text for _, text in texts)) for channel, texts in grouped]


@pytest.mark.parametrize("kind", ["text", "added", "special"])
def test_thoughts_are_an_analysis_whoever_opens_them(kind):
    tok, both = thinker(kind), [("analysis", "So, né.\n\nYes"), (FINAL, "4\n\n")]
    for prompt, reply in (
        ("Hi", "<think>\nSo, né.\n\nYes\n</think>\n\n4\n\n"),
        ("Hi", "\n<think>So, né.\n\nYes</think>4\n\n"),
        ("Hi<think>\n", "So, né.\n\nYes\n\n</think>\n4\n\n"),
        ("Hi<think>", "\nSo, né.\n\nYes</think>4\n\n"),
    ):
        assert heard(tok, prompt, reply) == both, reply
    assert heard(tok, "Hi<think>\n", "So") == [("analysis", "So")]
    assert heard(tok, "Hi", "<think>\n\n</think>\n\n4") == [(FINAL, "4")]
    for reply in ("a <think>b</think>", "a</think>", "\n<thin", "\n\na", "<thing"):
        if kind != "special":  # these are left out of any other text
            assert heard(tok, "Hi<think>\n\n</think>\n\n", reply) == [(FINAL, reply)]
    shown = heard(tok, "Hi", "<think>a</think>b", is_chat=False)
    assert shown == [(FINAL, "ab" if kind == "special" else "<think>a</think>b")]


def test_a_token_may_hold_a_mark_and_text_beside_it():
    tok = bytes_tokenizer(("<eos>",), (">\n4", "b</think>c", "<think>d"), THINKS, "<eos>")
    assert heard(tok, "Hi", "<think>a</think>\n45") == [("analysis", "a"), (FINAL, "45")]
    assert heard(tok, "Hi", "<think>d</think>\n4") == [("analysis", "d"), (FINAL, "4")]
    assert heard(tok, "Hi", "<think>ab</think>cd") == [("analysis", "ab"), (FINAL, "cd")]


def test_a_stop_text_ends_the_answer_and_not_the_thoughts():
    tok, reply = thinker("added"), "<think>a END b</think>\n\nc END d"
    assert heard(tok, "Hi", reply, ["END"]) == [("analysis", "a END b"), (FINAL, "c ")]
    assert heard(tok, "Hi", reply, ["\n\n"]) == [("analysis", "a END b"), (FINAL, "c END d")]
    assert heard(tok, "Hi", "<th END", ["END"]) == [(FINAL, "<th ")]


def test_special_tokens_are_said_on_request():
    tok, reply = thinker("special"), "<think>a</think>b<call>c"
    assert heard(tok, "Hi", reply, (), True) == [("analysis", "a"), (FINAL, "b<call>c")]
    assert heard(tok, "Hi", reply) == [("analysis", "a"), (FINAL, "bc")]
    plain = tok._replace(chat_template="{{ messages[0].content }}")
    assert heard(plain, "Hi", "b<call>", (), True) == [(FINAL, "b<call>")]


@pytest.mark.parametrize("kind", ["text", "added", "special"])
def test_a_grammar_lets_the_model_think_first(kind):
    tok = thinker(kind)
    machine = llguidance.LLTokenizer(tok.backend.to_str(), eos_token=256)

    def allows(prompt, reply, *grammars):
        grammar = behind_thoughts(tok, encode(tok, prompt), *grammars)
        matcher, ids = llguidance.LLMatcher(machine, grammar), encode(tok, reply)
        assert not matcher.is_error()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    for grammar in ('start: "yes"', llguidance.LLMatcher.grammar_from_regex("yes")):
        for prompt, thought in (("Hi", "<think>\nWell\n</think>\n\n"), ("Hi", "")):
            assert allows(prompt, thought + "yes", grammar)
            assert not allows(prompt, thought + "no", grammar)
        assert allows("Hi<think>\n", "Well</think>yes", grammar)
        assert not allows("Hi<think>\n", "yes", grammar)
        assert not allows("Hi<think>\n\n</think>\n\n", "<think></think>yes", grammar)
        for reply, fits in (("yes", True), ("call", True), ("no", False)):  # or a call
            for thought in ("<think>Well</think>", ""):
                assert allows("Hi", thought + reply, grammar, 'start: "call"') == fits


def test_a_grammar_in_harmony_is_that_of_the_final_message(tok):
    end = tok.backend.token_to_id("<|return|>")
    machine = llguidance.LLTokenizer(tok.backend.to_str(), eos_token=end)
    start = "<|start|>assistant<|channel|>final<|message|>4"
    call = "<|start|>assistant<|channel|>commentary to=f<|message|>{}"
    for called in (None, 'start: <|channel|> "commentary to=f" <|message|> "{}"'):
        grammar = behind_thoughts(tok, [0], 'start: "4"', called)
        for reply, fits in ((start, True), (start[:-1] + "5", False), (call, called is not None)):
            matcher = llguidance.LLMatcher(machine, grammar)
            assert matcher.consume_tokens(encode(tok, THOUGHT + reply)) == fits
            assert matcher.is_accepting() == fits


def test_thinking_is_switched_by_the_variables_of_the_template(tok):
    options = thinking_options
    qwen, deepseek, gpt = (
        tok._replace(chat_template=template)
        for template in (
            "{% if enable_thinking is defined and not enable_thinking %}{% endif %}",
            "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}",
            "{{ reasoning_effort }}{% for m in messages %}{{ m.thinking }}{% endfor %}",
        )
    )
    assert options(qwen, False, None) == options(qwen, None, "none") == dict(enable_thinking=False)
    assert options(deepseek, True, None) == dict(thinking=True) and options(tok, None, None) == {}
    assert options(gpt, None, "low") == dict(reasoning_effort="low")
    refused(ValueError, "cannot switch thinking", options, gpt, True, None)
    refused(ValueError, "no reasoning_effort", options, qwen, None, "high")
