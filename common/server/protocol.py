"""The OpenAI protocol: a body of JSON becomes requests, and their events become its answer.

https://platform.openai.com/docs/api-reference; FIELDS has what is understood of it, and two fields
of the engine beside it, top_k and min_p.
"""

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from common.loading.files import parse_json
from common.loading.generation import SETTINGS
from common.sampling import INVALID
from common.serving.session import (
    LIKELIEST,
    Counts,
    Event,
    Request,
    Score,
    Session,
    check_request,
)
from common.text.chat import encode_chat, end_of_turn
from common.text.reply import FINAL
from common.text.tiktoken import byte_characters
from common.text.tokenizer import Tokenizer, decode, encode

BYTES = {character: byte for byte, character in enumerate(byte_characters())}


class Refused(ValueError):
    """Why something is not served, in one sentence; and the field that is to blame."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.status, kind = status, "invalid_request_error" if status < 500 else "server_error"
        self.object = {"error": dict(message=message, type=kind, param=param, code=status)}


class Kind(NamedTuple):
    """What a field may hold."""

    name: str
    holds: Callable[[Any], bool]


def number(low: float, high: float) -> Kind:
    holds = lambda x: type(x) in (int, float) and low <= x <= high
    return Kind(f"a number from {low:g} to {high:g}", holds)


def integer(low: int, high: int) -> Kind:
    return Kind(f"an integer from {low} to {high}", lambda x: type(x) is int and low <= x <= high)


def all_of(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, list) and len(x) > 0 and all(map(holds, x))


def list_of(x: Any) -> Any:
    """A text alone becomes a list of one."""
    return [x] if is_text(x) else x


def are_stops(x: Any) -> bool:
    """Each stop text is searched for at every token, so they are short and few."""
    texts = list_of(x)
    few = isinstance(texts, list) and len(texts) <= 16
    return few and all(is_text(text) and len(text) <= 1000 for text in texts)


def are_options(x: Any) -> bool:
    """Obfuscation can only be switched off."""
    known = dict(include_usage=(True, False, None), include_obfuscation=(False, None))
    return is_object(x) and all(
        any(value is one for one in known.get(key, ())) for key, value in x.items()
    )


is_text, is_object = lambda x: isinstance(x, str), lambda x: isinstance(x, dict)
are_ids, are_texts = all_of(lambda x: type(x) is int), all_of(is_text)
TEXT, FLAG = Kind("a text", is_text), Kind("true or false", lambda x: isinstance(x, bool))
TEXTS = Kind("a text or a list of texts", lambda x: is_text(x) or are_texts(x))
STOPS = Kind("a text of at most 1000 characters, or a list of at most 16", are_stops)
PROMPT = Kind(
    "a text, a list of texts, a list of ids, or a list of lists of ids",
    lambda x: TEXTS.holds(x) or are_ids(x) or all_of(are_ids)(x),
)
OPTIONS = Kind("an object with include_usage alone, true or false", are_options)
COUNT, SCORES, SHARE = integer(0, 2**31 - 1), integer(0, LIKELIEST), number(0, 1)
BOTH = dict(
    model=TEXT, stream=FLAG, stream_options=OPTIONS, max_tokens=COUNT,
    n=integer(1, 32), temperature=number(0, 2), top_p=SHARE, top_k=COUNT, min_p=SHARE,
    seed=integer(-(2**63), 2**63 - 1), stop=STOPS,
    user=TEXT, prompt_cache_key=TEXT, safety_identifier=TEXT,  # these three change nothing
)  # fmt: skip
MESSAGES = Kind("a list of messages", all_of(is_object))
FIELDS: dict[str, dict[str, Kind]] = dict(
    chat=dict(
        messages=MESSAGES, max_completion_tokens=COUNT, logprobs=FLAG, top_logprobs=SCORES, **BOTH
    ),
    text=dict(prompt=PROMPT, logprobs=SCORES, echo=FLAG, **BOTH),
)
# Fields that are not supported. Each is accepted if it is null or has this value, its default.
UNSUPPORTED: dict[str, Any] = dict(
    tools=[], tool_choice="none", parallel_tool_calls=True, functions=[], function_call="none",
    response_format={"type": "text"}, frequency_penalty=0, presence_penalty=0, logit_bias={},
    best_of=1, suffix="", modalities=["text"], audio={}, prediction={}, store=False, metadata={},
    service_tier="auto", reasoning_effort=None, verbosity=None, web_search_options=None,
)  # fmt: skip


def read_json(data: bytes) -> Any:
    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number of JSON")

    try:
        return parse_json(data.decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {str(error)[:200]}") from None


def fields_of(kind: str, body: Any) -> dict[str, Any]:
    """Returns the fields that are set. Refused if one is not understood."""
    if not is_object(body):
        raise Refused("the body is not a JSON object")
    known, given = FIELDS[kind], {key: x for key, x in body.items() if x is not None}
    for name, value in given.items():
        if name in known and not known[name].holds(value):
            raise Refused(f"{name} must be {known[name].name}", name)
        if name not in known and name not in UNSUPPORTED:
            raise Refused(f"there is no field {name[:80]!r}", name[:80])
        if name not in known and value != UNSUPPORTED[name]:
            raise Refused(f"{name} is not supported", name)
    if (needed := "messages" if kind == "chat" else "prompt") not in given:
        raise Refused(f"{needed} is missing", needed)
    return given


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is one text. Refused if it has anything else."""
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise Refused("a role must be system, developer, user or assistant", "messages")
    # Clients send the model's own messages back, including empty fields and reasoning_content.
    wrong = {name for name, x in message.items() if x not in (None, "", [])}
    if wrong := wrong - {"role", "content", "name", "reasoning_content"}:
        raise Refused(f"{min(wrong)[:80]} is not supported in a message", "messages")
    parts: Any = [dict(type="text", text=content)] if is_text(content) else content
    if not all_of(is_object)(parts) or any(
        part.get("type") != "text" or not is_text(part.get("text")) for part in parts
    ):
        raise Refused("the content of a message must be text", "messages")
    thoughts = message.get("reasoning_content") or None
    if not is_text(thoughts or ""):
        raise Refused("reasoning_content must be text", "messages")
    text = "".join(part["text"] for part in parts)
    return {"role": role, "content": text, "reasoning_content": thoughts}


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
            raise Refused(f"more messages than the cache's {session.capacity} tokens", "messages")
        texts: Any = [[plain(message) for message in given["messages"]]]
        sizes = [sum(len(message["content"]) for message in texts[0])]
    else:
        texts = given["prompt"]
        texts = [texts] if is_text(texts) or are_ids(texts) else texts
        sizes = [len(text) for text in texts]
    if len(texts) * given.get("n", 1) > served.most:
        raise Refused(f"a request may ask for {served.most} texts at most", "n")
    if max(sizes) > session.capacity * served.longest:
        raise Refused(f"the prompt has more tokens than the cache's {session.capacity}")
    try:
        ids = [
            encode_chat(tok, x) if kind == "chat" else encode(tok, x) if is_text(x) else x
            for x in texts
        ]
    except ValueError as error:
        raise Refused(str(error)) from None
    return ids


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
        raise Refused(f"the model here is {served.name}", "model", 404)
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
    ends = tok.stop_ids | (end_of_turn(tok) if kind == "chat" else set())
    for ids in prompts_of(served, kind, given):
        room = session.capacity + 1 - len(ids) if kind == "chat" else 16
        request = Request(
            ids,
            max(1, room if most is None else most),
            **{"temperature": 1.0, **session.model.sampling}
            | {name: given[name] for name in SETTINGS if name in given},
            stop_ids=ends,
            stop=list_of(get("stop", [])),
            is_chat=kind == "chat",
            logprobs=wanted,
            echo=echo and wanted is not None,
        )
        try:
            check_request(request, session.capacity, session.model.config)
        except ValueError as error:
            raise Refused(str(error)) from None
        seed = get("seed", secrets.randbits(32))
        requests += [request._replace(seed=(seed + i) % 2**32) for i in range(n)]
    usage = bool(get("stream_options", {}).get("include_usage"))
    return Asked(kind, requests, n, echo, most == 0, get("stream", False), usage)


# ---- answers


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
