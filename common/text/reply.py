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
from functools import lru_cache
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


@lru_cache
def nearly(text: str, **words: str) -> str:
    """A pattern for a text and, at the end of what is searched, for what may become it. Words in
    `words` stand for patterns. White space may stand between all characters."""
    parts = re.findall("|".join([*words, r"\S"]), text)
    return "".join(rf"\s*(?:{words.get(x, re.escape(x))}|\Z)" for x in parts)


class ParserState(NamedTuple):
    """How far the parser of a reply has come in its messages."""

    header: tuple[int, ...] = ()  # ids of the message before <|message|>
    channel: str | None = None  # of its text; None until <|message|> has been read


def speaks_harmony(tok: Tokenizer) -> bool:
    return all(tok.backend.token_to_id(x) in tok.special_ids for x in (CHANNEL, MESSAGE))


def follow(tok: Tokenizer, state: ParserState, token_id: int) -> tuple[ParserState, str | None]:
    """Returns the state after one more token, and the token's channel, or None if it is markup."""
    token = tok.backend.id_to_token(token_id) if token_id in tok.special_ids else None
    if token in (START, END):
        return ParserState(), None
    if token == MESSAGE:
        return ParserState(channel=channel_of(tok, state.header)), None
    if state.channel is not None and token != CHANNEL:
        return state, state.channel
    return ParserState(header=(*state.header, token_id)), None


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
    marks: tuple[str, ...] = ()  # of thoughts: both; the second one; none after that


def start_speech(
    tok: Tokenizer,
    prompt: Sequence[int],
    is_chat: bool,
    stop: Sequence[str],
    keep_special: bool = False,
) -> Speech:
    """Returns an empty reply. If `is_chat`, it is a message, else it continues the prompt. It ends
    before any of the texts `stop`, none of them empty, if that is in its final channel, also in the
    middle of a token; then its stream is `stopped`. With `keep_special` special tokens are text,
    apart from Harmony's markup."""
    stream = stream_start(tok, () if is_chat else prompt, keep_special)
    if is_chat and speaks_harmony(tok):
        return Speech(stream, stop, ParserState())
    if not is_chat or (marks := think_marks(tok)) is None:
        return Speech(stream._replace(stop=stop), stop)
    opened = marks[0] if prompt_end(tok, prompt).endswith(marks[0]) else ""
    return Speech(stream._replace(tail=opened), stop, marks=marks)


def say(tok: Tokenizer, speech: Speech, token_id: int) -> tuple[Speech, str]:
    """Adds a token; returns the text that is now certain."""
    keep, was = speech.stream.keep_special, speech.state
    if was is not None:
        state, channel = follow(tok, was, token_id)
        speech = speech._replace(state=state)
        if (was.channel is None) != (state.channel is None):  # a message ends, or begins
            text = stream_flush(tok, speech.stream)
            channel = state.channel or speech.channel
            stream = Stream(keep_special=keep, stop=speech.stop if channel == FINAL else ())
            return speech._replace(stream=stream, channel=channel), text
        if channel is None:
            return speech, ""
    is_mark = tok.backend.id_to_token(token_id) in speech.marks  # it may be a special token
    stream, text = stream_push(tok, speech.stream._replace(keep_special=keep or is_mark), token_id)
    speech = speech._replace(stream=stream._replace(keep_special=keep))
    return think(speech, text) if speech.marks else (speech, text)


def think(speech: Speech, text: str) -> tuple[Speech, str]:
    """Takes new text of a reply whose thoughts may not have ended; returns what is certain. The
    marks, and the newlines that templates write around them, are no text."""
    marks = speech.marks
    while marks:
        first = r"\A" if len(marks) == 2 else r"(?<!\s)"
        found = re.search(rf"{first}{nearly(marks[0])}\n*", text)
        if found is None:  # the reply does not begin with thoughts
            marks = ()
        elif found.start() > 0 or found.end() == len(text):
            stream = speech.stream._replace(tail=text[found.start() :])
            channel = FINAL if len(marks) == 2 else ANALYSIS
            speech = speech._replace(stream=stream, channel=channel, marks=marks)
            return speech, text[: found.start()]
        else:
            marks, text = marks[1:], text[found.end() :]
    stream, text = before_stop(speech.stream._replace(stop=speech.stop), text)
    return speech._replace(stream=stream, channel=FINAL, marks=()), text


def end_speech(tok: Tokenizer, speech: Speech) -> str:
    """Returns the text held back, at the end."""
    text, mark = stream_flush(tok, speech.stream), "".join(speech.marks[:1])
    return re.sub(rf"\s*{re.escape(mark)}\n*", "", text) if mark else text
