"""If a reply has channels, only the final one is shown and remembered. The analysis is shown on
request."""

import io
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from common.command import converse
from common.command.arguments import parser
from common.serving.serve import end_of
from common.serving.session import Event, Work
from common.text.reply import FINAL, ParserState, follow, speaks_harmony, start_speech
from common.text.tokenizer import Tokenizer, encode

SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant"
)
THOUGHT = "<|channel|>analysis<|message|>A sum, naïve.<|end|>"
CALL = "<|start|>assistant<|channel|>commentary to=f <|message|>{}<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>Père: 4<|return|>"


@pytest.fixture
def tok():
    """Makes a tokenizer of bytes and the markers. In it, é is two tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    ids = {x: backend.token_to_id(x) for x in SPECIAL}
    stop = frozenset([ids["<|return|>"]])
    return Tokenizer(
        backend, TEMPLATE, {}, frozenset(ids.values()), (), None, stop, frozenset(), None, 300
    )


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
    converse.note_end(reply_to(tok, THOUGHT), 1)
    assert "--max-new-tokens" in capsys.readouterr().err
    converse.note_end(reply_to(tok, THOUGHT + ANSWER[:-10]), 1)
    converse.note_end(reply_to(tok, THOUGHT, "--raw"), 1)
    assert not capsys.readouterr().err


def test_a_conversation_remembers_answers_alone(tok, monkeypatch):
    prompts, written = [], []

    def scripted(session, requests):
        prompts.append(tok.backend.decode(requests[0].prompt, skip_special_tokens=False))
        yield from events(tok, THOUGHT + ANSWER, "--chat")

    monkeypatch.setattr(converse, "serve", scripted)
    monkeypatch.setattr(converse, "write", written.append)
    monkeypatch.setattr("sys.stdin", io.StringIO("2 + 2?\nSure?\n"))
    model = SimpleNamespace(tokenizer=tok, sampling={})
    session = SimpleNamespace(model=model, capacity=1000)
    converse.converse(session, options("--chat", "--show-analysis"))
    turn = "<|start|>user<|message|>{}<|end|>"
    first = turn.format("2 + 2?")
    said = "<|start|>assistant<|message|>Père: 4<|end|>"
    assert prompts == [
        f"{first}<|start|>assistant",
        f"{first}{said}{turn.format('Sure?')}<|start|>assistant",
    ]
    assert "".join(written) == "A sum, naïve.\n\nPère: 4\n" * 2
