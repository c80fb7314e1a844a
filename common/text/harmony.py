"""The text of a reply, token by token. In the Harmony format each token has a channel.

Such a reply is a sequence of messages. Only messages in the final channel are meant for the user:

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with `<|start|>assistant`. More words, such as a recipient, may follow the name of
a channel. A message without a channel is final.
"""

from collections.abc import Sequence
from typing import NamedTuple

from common.text.tokenizer import (
    Stream,
    Tokenizer,
    decode,
    stream_flush,
    stream_push,
    stream_start,
)

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
FINAL, ANALYSIS = "final", "analysis"


class ParserState(NamedTuple):
    """How far the parser of a reply has come in its messages."""

    part: str = START  # the last marker so far
    header: tuple[int, ...] = ()  # ids after <|channel|>
    channel: str = FINAL


def speaks_harmony(tok: Tokenizer) -> bool:
    return all(tok.backend.token_to_id(x) in tok.special_ids for x in (CHANNEL, MESSAGE))


def follow(tok: Tokenizer, state: ParserState, token_id: int) -> tuple[ParserState, str | None]:
    """Returns the state after one more token, and the token's channel, or None if it is markup."""
    token = tok.backend.id_to_token(token_id) if token_id in tok.special_ids else None
    if token in (START, END):
        return ParserState(), None
    if token == CHANNEL:
        return ParserState(CHANNEL), None
    if token == MESSAGE:
        words = decode(tok, state.header).split()
        return ParserState(MESSAGE, channel=words[0] if words else FINAL), None
    if state.part == CHANNEL:
        return state._replace(header=(*state.header, token_id)), None
    return state, state.channel if state.part == MESSAGE else None


class Speech(NamedTuple):
    """The text of a reply so far. If it has channels, each message is a stream of its own."""

    stream: Stream
    stop: Sequence[str]
    state: ParserState | None = None  # None if the reply has no channels
    channel: str = FINAL  # of the newest text


def is_answer(speech: Speech) -> bool:
    """Whether the next token belongs to the answer, and not to what is thought before it."""
    return True


def start_speech(
    tok: Tokenizer, prompt: Sequence[int], is_chat: bool, stop: Sequence[str]
) -> Speech:
    """Returns an empty reply. If `is_chat`, it is a message, else it continues the prompt. It ends
    before any of the texts `stop`, if that is in its final channel; then its stream is `stopped`.
    """
    if not is_chat:
        return Speech(stream_start(tok, prompt, stop=stop), stop)
    return Speech(
        stream_start(tok, stop=stop), stop, ParserState() if speaks_harmony(tok) else None
    )


def say(tok: Tokenizer, speech: Speech, token_id: int) -> tuple[Speech, str]:
    """Adds a token; returns the text that is now certain."""
    if speech.state is not None:
        state, channel = follow(tok, speech.state, token_id)
        ends = speech.state.part == MESSAGE != state.part
        speech = speech._replace(state=state)
        if ends:  # what was held back belongs to the message
            text = stream_flush(tok, speech.stream)
            stop = speech.stop if speech.channel == FINAL else ()
            return speech._replace(stream=stream_start(tok, stop=stop)), text
        if channel is None:
            return speech, ""
        if channel != speech.channel:
            stream = stream_start(tok, stop=speech.stop if channel == FINAL else ())
            speech = speech._replace(stream=stream, channel=channel)
    stream, text = stream_push(tok, speech.stream, token_id)
    return speech._replace(stream=stream), text
