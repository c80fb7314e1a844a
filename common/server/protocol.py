"""The OpenAI protocol: a body of JSON becomes requests of the engine.

https://platform.openai.com/docs/api-reference; FIELDS has what is understood of it, and the fields
of the engine beside it.
"""

import secrets
from typing import Any, NamedTuple

from common.loading.generation import SETTINGS
from common.server.fields import Refused, are_ids, fields_of, is_text, list_of, plain
from common.serving.session import Request, Session, check_request
from common.text.chat import encode_chat, end_of_turn
from common.text.tokenizer import Tokenizer, encode


class Served(NamedTuple):
    """What is served."""

    session: Session
    name: str  # of the model
    most: int  # requests that may be open at once
    tok: Tokenizer
    longest: int  # characters of the longest token


def served_by(session: Session, name: str, most: int) -> Served:
    tok = session.model.tokenizer
    assert tok is not None
    return Served(session, name, most, tok, max(map(len, tok.backend.get_vocab())))


def prompts_of(served: Served, kind: str, given: dict[str, Any]) -> list[list[int]]:
    """Encodes what is asked. What cannot fit is refused first, as encoding takes long."""
    session, tok = served.session, served.tok
    if kind == "chat":
        if len(given["messages"]) > session.capacity:
            raise too_long(session, f"the conversation has {len(given['messages'])} messages")
        texts: Any = [[plain(message) for message in given["messages"]]]
        sizes = [sum(len(message["content"]) for message in texts[0])]
    else:
        texts = given["prompt"]
        texts = [texts] if is_text(texts) or are_ids(texts) else texts
        sizes = [len(text) for text in texts]
    if len(texts) * given.get("n", 1) > served.most:
        raise Refused(f"a request may ask for {served.most} texts at most", "n")
    if max(sizes) > session.capacity * served.longest:
        raise too_long(session, f"the prompt has {max(sizes)} characters")
    try:
        ids = [
            encode_chat(tok, x) if kind == "chat" else encode(tok, x) if is_text(x) else x
            for x in texts
        ]
    except ValueError as error:
        raise Refused(str(error)) from None
    if max(map(len, ids)) > session.capacity:
        raise too_long(session, f"the prompt has {max(map(len, ids))} tokens")
    return ids


def too_long(session: Session, what: str) -> Refused:
    limit = f"this model's maximum context length is {session.capacity} tokens (see --max-len)"
    return Refused(f"{what}, but {limit}", code="context_length_exceeded")


class Asked(NamedTuple):
    """What one HTTP request asks for."""

    kind: str  # "chat" or "text"
    requests: list[Request]  # n for each prompt, side by side
    n: int
    echo: bool
    only_echo: bool  # nothing is to follow the prompt
    stream: bool
    usage: bool  # whether it comes at the end of a stream

    @property
    def object(self) -> str:
        """What the protocol calls the answer, or a piece of it."""
        chat = "chat.completion" + ".chunk" * self.stream
        return "text_completion" if self.kind == "text" else chat


def ask(served: Served, kind: str, body: Any) -> Asked:
    """Reads a request. Refused if it cannot be served."""
    given, session, tok = fields_of(kind, body), served.session, served.tok
    if given.get("model", served.name) != served.name:
        raise Refused(f"the model here is {served.name}", "model", 404, "model_not_found")
    get, echo, n = given.get, given.get("echo", False), given.get("n", 1)
    wanted = get("logprobs")
    if kind == "chat":
        wanted = get("top_logprobs", 0) if wanted else None
    if get("top_logprobs") is not None and wanted is None:
        raise Refused("top_logprobs goes with logprobs", "top_logprobs")
    if wanted is not None and not session.logprobs:
        raise Refused("log-probabilities do not go with --draft mtp", "logprobs")
    requests, most = list[Request](), get("max_completion_tokens", get("max_tokens"))
    if most == 0 and not echo:
        raise Refused("max_tokens must be at least 1, but for echo", "max_tokens")
    stops = list_of(get("stop", []))
    ends = tok.stop_ids | (end_of_turn(tok) if kind == "chat" else set())
    # A special token has no text in the reply, so it is told by its id.
    ends |= tok.special_ids & {tok.backend.token_to_id(text) for text in stops}
    for ids in prompts_of(served, kind, given):
        room = session.capacity + 1 - len(ids) if kind == "chat" else 16
        request = Request(
            ids,
            max(1, room if most is None else most),
            **{"temperature": 1.0, **session.model.sampling}
            | {name: max(given[name], 0) for name in SETTINGS if name in given},
            stop_ids=ends,
            stop=stops,
            is_chat=kind == "chat",
            logprobs=wanted,
            echo=echo and wanted is not None,
            cache_salt=get("cache_salt", ""),
        )
        try:
            check_request(request, session.capacity, session.model.config)
        except ValueError as error:
            raise Refused(str(error)) from None
        seed = get("seed", secrets.randbits(32))
        requests += [request._replace(seed=(seed + i) % 2**32) for i in range(n)]
    usage = bool(get("stream_options", {}).get("include_usage"))
    return Asked(kind, requests, n, echo, most == 0, get("stream", False), usage)
