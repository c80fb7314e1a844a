"""The text of a reply, token by token. In formats that think, each token has a channel.

In the Harmony format a reply is a sequence of messages. Only messages in the final channel are
meant for the user:

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with `<|start|>assistant`. More words may follow the name of a channel. A message
with a recipient, `to=functions.NAME` before or after the channel, is a call: then the channel is
the recipient. A message without a channel is final.

Other families write their thoughts between two marks at the beginning of a reply. Their template
says which marks those are, and may write the first one itself:

    <think>...</think>...
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from common.text.tokenizer import (
    Stream,
    Tokenizer,
    before_stop,
    decode,
    stream_flush,
    stream_push,
    stream_start,
)

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, CONSTRAIN = "<|call|>", "<|constrain|>"
FINAL, ANALYSIS, CALLED = "final", "analysis", "functions."  # a call's channel begins with CALLED
# Where a reply with marks is, before its final text.
BEGIN, OPENED, THINKING, CLOSED = "begin", "opened", "thinking", "closed"


def nearly(text: str, **words: str) -> str:
    """A pattern for a text and, at the end of what is searched, for what may become it. Words in
    `words` stand for patterns. White space may stand between all characters."""
    parts = re.findall("|".join([*words, r"\S"]), text)
    return "".join(rf"\s*(?:{words.get(x, re.escape(x))}|\Z)" for x in parts)


class ParserState(NamedTuple):
    """How far the parser of a reply has come in its messages."""

    part: str = START  # the last marker so far
    header: tuple[int, ...] = ()  # ids of the message before <|message|>
    channel: str = FINAL


def speaks_harmony(tok: Tokenizer) -> bool:
    return all(tok.backend.token_to_id(x) in tok.special_ids for x in (CHANNEL, MESSAGE))


def follow(tok: Tokenizer, state: ParserState, token_id: int) -> tuple[ParserState, str | None]:
    """Returns the state after one more token, and the token's channel, or None if it is markup."""
    token = tok.backend.id_to_token(token_id) if token_id in tok.special_ids else None
    if token in (START, END):
        return ParserState(), None
    if token == MESSAGE:
        return ParserState(MESSAGE, channel=channel_of(tok, state.header)), None
    if state.part == MESSAGE and token != CHANNEL:
        return state, state.channel
    part = CHANNEL if token == CHANNEL else state.part
    return ParserState(part, (*state.header, token_id)), None


def channel_of(tok: Tokenizer, header: Sequence[int]) -> str:
    """The channel of the message with this header, or its recipient if that is a function."""
    text = decode(tok, header, keep_special=True).replace(CONSTRAIN, " ")
    before, _, after = text.partition(CHANNEL)
    words = after.split()
    recipients = [x[3:] for x in (*before.split(), *words) if x.startswith(f"to={CALLED}")]
    return (*recipients, *words, FINAL)[0]


def think_marks(tok: Tokenizer) -> tuple[str, str] | None:
    """The marks around thoughts, if the template names the second one."""
    found = re.search(r"([<◁])/((?:\w+:)?think)([>▷])", tok.chat_template or "")
    return (found[1] + found[2] + found[3], found[0]) if found else None


def has_channels(tok: Tokenizer) -> bool:
    return speaks_harmony(tok) or think_marks(tok) is not None


def prompt_end(tok: Tokenizer, prompt: Sequence[int]) -> str:
    return decode(tok, prompt[-16:], keep_special=True).rstrip("\n")


class Speech(NamedTuple):
    """The text of a reply so far. In Harmony, each message is a stream of its own."""

    stream: Stream
    stop: Sequence[str]
    state: ParserState | None = None  # None if the reply is not in Harmony
    channel: str = FINAL  # of the newest text
    marks: tuple[str, str] = ("", "")  # around thoughts
    phase: str = FINAL  # BEGIN, OPENED, THINKING, CLOSED, FINAL; it never goes back


def start_speech(
    tok: Tokenizer,
    prompt: Sequence[int],
    is_chat: bool,
    stop: Sequence[str],
    keep_special: bool = False,
) -> Speech:
    """Returns an empty reply. If `is_chat`, it is a message, else it continues the prompt. It ends
    before any of the texts `stop`, if that is in its final channel; then its stream is `stopped`.
    With `keep_special` special tokens are text, apart from Harmony's markup.
    """
    if not is_chat:
        return Speech(stream_start(tok, prompt, keep_special, stop), stop)
    stream, marks = stream_start(tok, (), keep_special, stop), think_marks(tok)
    if speaks_harmony(tok):
        return Speech(stream, stop, ParserState())
    if marks is None:
        return Speech(stream, stop)
    if prompt_end(tok, prompt).endswith(marks[0]):
        return Speech(until_closed(stream, marks), stop, None, ANALYSIS, marks, OPENED)
    return Speech(stream._replace(stop=()), stop, None, FINAL, marks, BEGIN)


def say(tok: Tokenizer, speech: Speech, token_id: int) -> tuple[Speech, str]:
    """Adds a token; returns the text that is now certain."""
    if speech.phase != FINAL:
        return think(tok, speech, token_id)
    if speech.state is not None:
        state, channel = follow(tok, speech.state, token_id)
        ends = speech.state.part == MESSAGE != state.part
        speech = speech._replace(state=state)
        if ends:  # what was held back belongs to the message
            text = stream_flush(tok, speech.stream)
            return speech._replace(stream=fresh(tok, speech, speech.channel)), text
        if channel is None:
            return speech, ""
        if channel != speech.channel:
            speech = speech._replace(stream=fresh(tok, speech, channel), channel=channel)
    stream, text = stream_push(tok, speech.stream, token_id)
    return speech._replace(stream=stream), text


def fresh(tok: Tokenizer, speech: Speech, channel: str) -> Stream:
    stop = speech.stop if channel == FINAL else ()
    return stream_start(tok, (), speech.stream.keep_special, stop)


def think(tok: Tokenizer, speech: Speech, token_id: int) -> tuple[Speech, str]:
    """Adds a token to a reply that has not come to its final text. The marks, and the newlines that
    templates write around them, are no text."""
    (opening, _), keep = speech.marks, speech.stream.keep_special
    is_mark = tok.backend.id_to_token(token_id) in speech.marks  # it may be a special token
    stream, text = stream_push(tok, speech.stream._replace(keep_special=keep or is_mark), token_id)
    stream, phase = stream._replace(keep_special=keep), speech.phase
    if phase == BEGIN:
        bare = text.lstrip()
        if opening.startswith(bare) and bare != opening and not any(x in text for x in speech.stop):
            return speech._replace(stream=stream._replace(tail=text)), ""
        if bare.startswith(opening):
            stream, phase = until_closed(stream, speech.marks), OPENED
            stream, text = before_stop(stream, bare.removeprefix(opening))
    if phase == OPENED:
        text = text.lstrip("\n")
        phase = THINKING if text else OPENED
    if stream.stopped:  # the second mark; what follows it is said with the next token
        stream = stream._replace(stop=(), stopped=False, tail=stream.tail.lstrip("\n"))
        channel = ANALYSIS if text else FINAL
        return speech._replace(stream=stream, phase=CLOSED, channel=channel), text
    if phase in (OPENED, THINKING):
        return speech._replace(stream=stream, phase=phase, channel=ANALYSIS), text
    text = text.lstrip("\n") if phase == CLOSED else text
    if not text and phase == CLOSED:
        return speech._replace(stream=stream, channel=FINAL), ""
    stream, text = before_stop(stream._replace(stop=tuple(filter(None, speech.stop))), text)
    return speech._replace(stream=stream, phase=FINAL, channel=FINAL), text


def until_closed(stream: Stream, marks: tuple[str, str]) -> Stream:
    """The stream of thoughts: it stops at the second mark, which newlines may precede."""
    return stream._replace(stop=tuple("\n" * n + marks[1] for n in (2, 1, 0)), tail="")
