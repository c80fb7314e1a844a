"""The OpenAI protocol: the events of requests become an answer, whole or in pieces."""

import json
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.sampling import INVALID
from common.server.fields import Refused
from common.server.protocol import Asked, Served
from common.serving.session import Counts, Event, Request, Score
from common.text.reply import ANALYSIS, CALLED, FINAL
from common.text.tiktoken import byte_characters
from common.text.tokenizer import Tokenizer, decode
from common.text.tools import Calls, Piece, finish, push

BYTES = {character: byte for byte, character in enumerate(byte_characters())}


@dataclass
class Choice:
    """One reply. What was already sent to the client is removed from it."""

    request: Request
    index: int
    calls: Calls | None = None  # how far its calls are read
    pieces: list[Piece] = field(default_factory=list)  # of content and of calls
    reasoning: str = ""
    scores: list[tuple[int, Score | None]] = field(default_factory=list)  # with the token's id
    finish: str | None = None
    offset: int = 0  # characters of all scored tokens that were told
    count: int = 0  # tokens
    thoughts: int = 0  # tokens of its reasoning
    counts: Counts = field(default_factory=Counts)
    begun: bool = False  # whether anything was told
    called: int = 0  # calls that have begun


def add(asked: Asked, choice: Choice, tok: Tokenizer, event: Event) -> None:
    """Adds a token; before the first one the prompt, if that is wanted. Refused if there is no
    token."""
    if event.token == INVALID:
        raise Refused("the model's logits are NaN or infinite", status=500)
    if choice.finish:  # it ended before the model did
        return
    if asked.echo and not choice.count:
        choice.pieces.append(Piece(decode(tok, choice.request.prompt)))
        if event.score:
            choice.scores += zip(choice.request.prompt, [None, *event.echo], strict=True)
    choice.finish, choice.counts = event.finish, event.counts
    if not asked.only_echo:
        choice.count += 1
        choice.thoughts += 1 if event.channel == ANALYSIS else 0
        choice.scores += [(event.token, event.score)] if event.score else []
        read(asked, choice, event)


def read(asked: Asked, choice: Choice, event: Event) -> None:
    """Adds the text of an event to the content, the calls or the reasoning."""
    new = list[Piece]()
    if choice.calls is not None and (event.channel == FINAL or event.channel.startswith(CALLED)):
        choice.calls, new = push(choice.calls, event.text, event.channel)
    elif event.channel == FINAL:
        new = [Piece(event.text)] if event.text else []
    else:
        choice.reasoning += event.text
    if event.finish and choice.calls is not None:
        new += finish(choice.calls)
    for piece in new:
        if piece.name is not None and choice.called and not asked.parallel:
            choice.finish = "stop"
            break
        choice.called += 1 if piece.name is not None else 0
        choice.pieces.append(piece)
    if choice.finish == "stop" and choice.called:
        choice.finish = "tool_calls"


class Completion:
    """The answer to a request for completions. `add` and `last` return what a stream sends."""

    def __init__(self, served: Served, asked: Asked):
        number = f"{asked.kind}-{uuid.uuid4().hex}"
        self.known = dict(id=number, object=asked.object, created=int(time.time()))
        self.known |= dict(model=served.name)
        self.tok, self.asked = served.tok, asked
        self.choices = [Choice(x, i, asked.calls) for i, x in enumerate(asked.requests)]

    def first(self) -> str:
        return ""

    def line(self, **more: Any) -> str:
        usage = dict(usage=None) if self.asked.usage else {}
        return f"data: {json.dumps(self.known | usage | more)}\n\n"

    def add(self, i: int, event: Event) -> str:
        add(self.asked, choice := self.choices[i], self.tok, event)
        if not self.asked.stream or not is_new(choice):
            return ""
        return self.line(choices=[tell(self.asked, choice, self.tok)])

    def last(self) -> str:
        usage = self.line(choices=[], usage=usage_of(self.asked, self.choices))
        return (usage if self.asked.usage else "") + "data: [DONE]\n\n"

    def failed(self, error: Refused) -> str:
        return f"data: {json.dumps(error.object)}\n\ndata: [DONE]\n\n"

    def whole(self) -> dict[str, Any]:
        told = [tell(self.asked, choice, self.tok) for choice in self.choices]
        return self.known | dict(choices=told, usage=usage_of(self.asked, self.choices))


def is_new(choice: Choice) -> bool:
    """Whether there is anything to tell."""
    return bool(choice.pieces or choice.reasoning or choice.scores or choice.finish)


def tell(asked: Asked, choice: Choice, tok: Tokenizer) -> dict[str, Any]:
    """Returns what is new of a reply, as a choice of the protocol."""
    told: dict[str, Any] = dict(index=choice.index, finish_reason=choice.finish, logprobs=None)
    content = "".join(piece.text for piece in choice.pieces if piece.call is None)
    if asked.kind == "text":
        told["text"] = content
        if choice.scores:
            told["logprobs"] = scores_of_text(choice, tok)
    else:
        message: dict[str, Any] = {} if choice.begun else dict(role="assistant")
        message["content"] = content or (None if choice.called else "")
        message |= dict(reasoning_content=choice.reasoning) if choice.reasoning else {}
        if calls := calls_in(choice.pieces):
            message["tool_calls"] = [
                call | (dict(index=i) if asked.stream else {}) for i, call in calls.items()
            ]
        told["delta" if asked.stream else "message"] = message
        if choice.scores:
            told["logprobs"] = dict(content=[score_of_chat(tok, *x) for x in choice.scores])
    choice.pieces, choice.reasoning, choice.scores, choice.begun = [], "", [], True
    return told


def calls_in(pieces: Sequence[Piece]) -> dict[int, dict[str, Any]]:
    """The new parts of calls: with an id and the function's name if the call begins here."""
    calls = dict[int, dict[str, Any]]()
    for piece in pieces:
        if piece.call is None:
            continue
        call = calls.setdefault(piece.call, dict(function=dict(arguments="")))
        if piece.name is not None:
            call |= dict(id=f"call_{uuid.uuid4().hex}", type="function")
            call["function"]["name"] = piece.name
        call["function"]["arguments"] += piece.text
    return calls


def spelled(tok: Tokenizer, token: int) -> tuple[str, list[int]]:
    """The text and the bytes of a token; "bytes:\\xe2" if it holds a part of a character."""
    text = decode(tok, [token], keep_special=True)
    if "\ufffd" not in text:
        return text, list(text.encode())
    piece = str(tok.backend.id_to_token(token))
    is_byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
    data = [int(is_byte[1], 16)] if is_byte else [BYTES[c] for c in piece if c in BYTES]
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


def scores_of_text(choice: Choice, tok: Tokenizer) -> dict[str, list[Any]]:
    names, offsets = list[str](), list[int]()
    for token, _ in choice.scores:
        name, data = spelled(tok, token)
        names.append(name)
        offsets.append(choice.offset)
        if token not in tok.special_ids:  # which the text leaves out
            # A character of several tokens counts with the one that begins it.
            choice.offset += sum(byte & 0xC0 != 0x80 for byte in data)
    return dict(
        tokens=names,
        token_logprobs=[score and score.logprob for _, score in choice.scores],
        top_logprobs=[
            score and {spelled(tok, i)[0]: x for i, x in [*score.likeliest, (token, score.logprob)]}
            for token, score in choice.scores
        ],
        text_offset=offsets,
    )


def score_of_chat(tok: Tokenizer, token: int, score: Any) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        name, data = spelled(tok, token)
        return dict(token=name, logprob=logprob, bytes=data)

    return one(token, score.logprob) | dict(top_logprobs=[one(*x) for x in score.likeliest])


def usage_of(asked: Asked, choices: Sequence[Choice]) -> dict[str, Any]:
    prompt = sum(len(choice.request.prompt) for choice in choices[:: asked.n])
    reply = sum(choice.count for choice in choices)
    # A prompt with n choices counts once; its cached tokens are those of the first choice.
    cached = sum(choice.counts.cached for choice in choices[:: asked.n])
    drafts = sum(choice.counts.drafts for choice in choices)
    right = sum(choice.counts.drafts_right for choice in choices)
    return dict(
        prompt_tokens=prompt,
        completion_tokens=reply,
        total_tokens=prompt + reply,
        prompt_tokens_details=dict(cached_tokens=cached),
        completion_tokens_details=dict(
            accepted_prediction_tokens=right,
            rejected_prediction_tokens=drafts - right,
            reasoning_tokens=sum(choice.thoughts for choice in choices),
        ),
    )
