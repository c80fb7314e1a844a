"""The OpenAI protocol: the events of requests become an answer, whole or in pieces."""

import json
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.sampling import WHY_INVALID
from common.server.fields import Refused
from common.server.protocol import Asked, Served
from common.serving.session import Counts, Event, Request, Score
from common.text.reply import ANALYSIS, CALLED, FINAL
from common.text.tiktoken import byte_characters
from common.text.tokenizer import Tokenizer, decode
from common.text.tools import Calls, Piece, finish, push

BYTES = {character: byte for byte, character in enumerate(byte_characters())}
THOUGHT, SAID, CALL = "reasoning", "message", "function_call"  # as Responses names what is new


@dataclass
class Choice:
    """One reply. What was already sent to the client is removed from it."""

    request: Request
    calls: Calls | None = None  # how far its calls are read
    pieces: list[tuple[str, Piece]] = field(default_factory=list)  # each is THOUGHT, SAID or CALL
    scores: list[tuple[int, Score | None]] = field(default_factory=list)  # with the token's id
    finish: str | None = None
    offset: int = 0  # characters of all scored tokens that were told
    count: int = 0  # tokens
    thoughts: int = 0  # tokens of its reasoning
    counts: Counts = field(default_factory=Counts)
    begun: bool = False  # whether anything was told
    called: int = 0  # calls that have begun


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def add(asked: Asked, choice: Choice, tok: Tokenizer, event: Event) -> None:
    """Adds a token, and the prompt before the first if it is wanted. Refused without a token."""
    get = asked.given.get
    if event.finish == "invalid":
        raise Refused(WHY_INVALID, status=500)
    if choice.finish:  # it ended before the model did
        return
    if get("echo") and not choice.count:
        choice.pieces.append((SAID, Piece(decode(tok, choice.request.prompt))))
        if event.score:
            choice.scores += zip(choice.request.prompt, [None, *event.echo], strict=True)
    choice.finish, choice.counts = event.finish, event.counts
    if get("echo") and get("max_tokens") == 0:  # nothing is to follow the prompt
        return
    choice.count += 1
    choice.thoughts += 1 if event.channel == ANALYSIS else 0
    choice.scores += [(event.token, event.score)] if event.score else []
    kind, new = SAID if event.channel == FINAL else THOUGHT, [Piece(event.text)]
    if choice.calls is not None and (kind == SAID or event.channel.startswith(CALLED)):
        kind = SAID
        choice.calls, new = push(choice.calls, event.text, event.channel)
    told = [(kind, piece) for piece in new if piece.text or piece.name is not None]
    if event.finish and choice.calls is not None:
        told += [(SAID, piece) for piece in finish(choice.calls)]
    for kind, piece in told:
        if piece.name is not None and choice.called and not get("parallel_tool_calls", True):
            choice.finish = "stop"
            break
        choice.called += 1 if piece.name is not None else 0
        choice.pieces.append((kind if piece.call is None else CALL, piece))
    if choice.finish == "stop" and choice.called:
        choice.finish = "tool_calls"


class Completion:
    """The answer to a request for completions. `add` and `last` return what a stream sends."""

    def __init__(self, served: Served, asked: Asked):
        self.tok, self.asked, get = served.tok, asked, asked.given.get
        self.stream, self.usage = get("stream"), get("stream_options", {}).get("include_usage")
        self.choices = [Choice(x, asked.calls) for x in asked.requests]
        kind = "chat.completion" + (".chunk" if self.stream else "")
        kind = "text_completion" if asked.kind == "text" else kind
        self.known = dict(id=new_id(asked.kind), object=kind, created=int(time.time()))
        self.known |= dict(model=served.name) | (dict(usage=None) if self.usage else {})
        self.first = ""

    def line(self, **more: Any) -> str:
        return f"data: {json.dumps(self.known | more)}\n\n"

    def add(self, i: int, event: Event) -> str:
        add(self.asked, choice := self.choices[i], self.tok, event)
        if not self.stream or not (choice.pieces or choice.scores or choice.finish):
            return ""
        return self.line(choices=[self.tell(i)])

    def last(self) -> str:
        usage = self.line(choices=[], usage=usage_of(self.asked, self.choices))
        return (usage if self.usage else "") + "data: [DONE]\n\n"

    def failed(self, error: Refused) -> str:
        return f"data: {json.dumps(error.object)}\n\ndata: [DONE]\n\n"

    def whole(self) -> dict[str, Any]:
        told = [self.tell(i) for i in range(len(self.choices))]
        return self.known | dict(choices=told, usage=usage_of(self.asked, self.choices))

    def tell(self, i: int) -> dict[str, Any]:
        """Returns what is new of a reply, as a choice of the protocol."""
        choice = self.choices[i]
        told: dict[str, Any] = dict(index=i, finish_reason=choice.finish, logprobs=None)
        text = lambda kind: "".join(piece.text for one, piece in choice.pieces if one == kind)
        if self.asked.kind == "text":
            told["text"] = text(SAID)
            if choice.scores:
                told["logprobs"] = scores_of_text(choice, self.tok)
        else:
            message: dict[str, Any] = {} if choice.begun else dict(role="assistant")
            message["content"] = text(SAID) or (None if choice.called else "")
            message |= dict(reasoning_content=text(THOUGHT)) if text(THOUGHT) else {}
            calls = dict[int, dict[str, Any]]()
            for piece in (piece for kind, piece in choice.pieces if kind == CALL):
                first: dict[str, Any] = dict(index=piece.call) if self.stream else {}
                call = calls.setdefault(piece.call or 0, first | dict(function=dict(arguments="")))
                if piece.name is not None:  # the call begins here
                    call |= dict(id=new_id("call"), type="function")
                    call["function"]["name"] = piece.name
                call["function"]["arguments"] += piece.text
            message |= dict(tool_calls=[*calls.values()]) if calls else {}
            told["delta" if self.stream else "message"] = message
            if choice.scores:
                content = [score_of_chat(self.tok, *x) for x in choice.scores]
                told["logprobs"] = dict(content=content)
        choice.pieces, choice.scores, choice.begun = [], [], True
        return told


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
    rows = list[tuple[Any, ...]]()
    for token, score in choice.scores:
        name, data = spelled(tok, token)
        top = [*score.likeliest, (token, score.logprob)] if score else []
        named = score and {spelled(tok, i)[0]: x for i, x in top}
        rows.append((name, score and score.logprob, named, choice.offset))
        if token not in tok.special_ids:  # which the text leaves out
            # A character of several tokens counts with the one that begins it.
            choice.offset += sum(byte & 0xC0 != 0x80 for byte in data)
    names = "tokens", "token_logprobs", "top_logprobs", "text_offset"
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def score_of_chat(tok: Tokenizer, token: int, score: Any) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        name, data = spelled(tok, token)
        return dict(token=name, logprob=logprob, bytes=data)

    return one(token, score.logprob) | dict(top_logprobs=[one(*x) for x in score.likeliest])


def usage_of(asked: Asked, choices: Sequence[Choice]) -> dict[str, Any]:
    # A prompt with n choices counts once; its cached tokens are those of the first choice.
    firsts, counts = choices[:: asked.given.get("n", 1)], [choice.counts for choice in choices]
    prompt = sum(len(choice.request.prompt) for choice in firsts)
    reply, right = sum(choice.count for choice in choices), sum(x.drafts_right for x in counts)
    return dict(
        prompt_tokens=prompt,
        completion_tokens=reply,
        total_tokens=prompt + reply,
        prompt_tokens_details=dict(cached_tokens=sum(x.counts.cached for x in firsts)),
        completion_tokens_details=dict(
            accepted_prediction_tokens=right,
            rejected_prediction_tokens=sum(x.drafts for x in counts) - right,
            reasoning_tokens=sum(choice.thoughts for choice in choices),
        ),
    )
