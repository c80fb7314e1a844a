"""Which channel each token of a reply in the Harmony format belongs to.

Such a reply is a run of messages, of which only those in the final channel are meant for the user:

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with `<|start|>assistant`. A name of a channel may have more words, such as a
recipient, and a message without one is final.
"""

from typing import NamedTuple

from common.text.tokenizer import Tokenizer, decode

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
FINAL, ANALYSIS = "final", "analysis"


class Place(NamedTuple):
    """Where in its messages a reply is."""

    part: str = START  # the marker that it is behind
    header: tuple[int, ...] = ()  # ids behind <|channel|>
    channel: str = FINAL


def speaks_harmony(tok: Tokenizer) -> bool:
    return all(tok.backend.token_to_id(x) in tok.special_ids for x in (CHANNEL, MESSAGE))


def follow(tok: Tokenizer, place: Place, token_id: int) -> tuple[Place, str | None]:
    """The place behind one more token, and the channel that it is text of, None for markup."""
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
