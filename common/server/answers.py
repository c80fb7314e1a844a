"""The OpenAI protocol: the events of requests become an answer, whole or in pieces."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common.sampling import INVALID
from common.server.fields import Refused
from common.server.protocol import Asked
from common.serving.session import Counts, Event, Request, Score
from common.text.reply import FINAL
from common.text.tiktoken import byte_characters
from common.text.tokenizer import Tokenizer, decode

BYTES = {character: byte for byte, character in enumerate(byte_characters())}


@dataclass
class Choice:
    """One reply. Text and scores that were already sent to the client are removed from it."""

    request: Request
    index: int
    content: str = ""
    reasoning: str = ""
    scores: list[tuple[int, Score | None]] = field(default_factory=list)  # with the token's id
    finish: str | None = None
    offset: int = 0  # characters of all scored tokens that were told
    count: int = 0  # tokens
    counts: Counts = field(default_factory=Counts)
    begun: bool = False  # whether anything was told


def add(asked: Asked, choice: Choice, tok: Tokenizer, event: Event) -> None:
    """Adds a token; before the first one the prompt, if that is wanted. Refused if there is no
    token."""
    if event.token == INVALID:
        raise Refused("the model's logits are NaN or infinite", status=500)
    if asked.echo and not choice.count:
        choice.content += decode(tok, choice.request.prompt)
        if event.score:
            choice.scores += zip(choice.request.prompt, [None, *event.echo], strict=True)
    choice.finish, choice.counts = event.finish, event.counts
    if not asked.only_echo:
        choice.count += 1
        choice.content += event.text if event.channel == FINAL else ""
        choice.reasoning += event.text if event.channel != FINAL else ""
        choice.scores += [(event.token, event.score)] if event.score else []


def tell(asked: Asked, choice: Choice, tok: Tokenizer) -> dict[str, Any]:
    """Returns what is new of a reply, as a choice of the protocol."""
    told: dict[str, Any] = dict(index=choice.index, finish_reason=choice.finish, logprobs=None)
    if asked.kind == "text":
        told["text"] = choice.content
        if choice.scores:
            told["logprobs"] = scores_of_text(choice, tok)
    else:
        message = {} if choice.begun else dict(role="assistant")
        message["content"] = choice.content
        message |= dict(reasoning_content=choice.reasoning) if choice.reasoning else {}
        told["delta" if asked.stream else "message"] = message
        if choice.scores:
            told["logprobs"] = dict(content=[score_of_chat(tok, *x) for x in choice.scores])
    choice.content, choice.reasoning, choice.scores, choice.begun = "", "", [], True
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
            accepted_prediction_tokens=right, rejected_prediction_tokens=drafts - right
        ),
    )
