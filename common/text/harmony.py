"""Finds the channel of each token of a reply in the Harmony format.

Such a reply is a sequence of messages. Only messages in the final channel are meant for the user:

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with `<|start|>assistant`. More words, such as a recipient, may follow the name of
a channel. A message without a channel is final.
"""

from typing import NamedTuple

from common.text.tokenizer import Tokenizer, decode

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
FINAL, ANALYSIS = "final", "analysis"


class Place(NamedTuple):
    """How far a reply has come in its messages."""

    part: str = START  # the last marker so far
    header: tuple[int, ...] = ()  # ids after <|channel|>
    channel: str = FINAL


def speaks_harmony(tok: Tokenizer) -> bool:
    return all(tok.backend.token_to_id(x) in tok.special_ids for x in (CHANNEL, MESSAGE))


def follow(tok: Tokenizer, place: Place, token_id: int) -> tuple[Place, str | None]:
    """Returns the place after one more token, and the token's channel, or None if it is markup."""
    token = tok.backend.id_to_token(token_id) if token_id in tok.special_ids else None
    if token in (START, END):
        return Place(), None
    if token == CHANNEL:
        return Place(CHANNEL), None
    if token == MESSAGE:
        words = decode(tok, place.header).split()
        return Place(MESSAGE, channel=words[0] if words else FINAL), None
    if place.part == CHANNEL:
        return place._replace(header=(*place.header, token_id)), None
    return place, place.channel if place.part == MESSAGE else None
