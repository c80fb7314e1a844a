"""The fields of a body, and what each of them may hold."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from common.loading.files import parse_json
from common.serving.session import LIKELIEST

# What programs read of an error, by status.
CODES = {
    400: "invalid_value", 401: "invalid_api_key", 403: "forbidden", 404: "not_found",
    405: "method_not_allowed", 413: "body_too_large", 429: "rate_limit_exceeded",
    499: "client_gone", 503: "unavailable",
}  # fmt: skip


class Refused(ValueError):
    """Why something is not served, in one sentence; and the field that is to blame."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.status, kind = status, "invalid_request_error" if status < 500 else "server_error"
        code = code or CODES.get(status, kind)
        self.object = {"error": dict(message=message, type=kind, param=param, code=code)}


class Kind(NamedTuple):
    """What a field may hold."""

    name: str
    holds: Callable[[Any], bool]


def number(low: float, high: float) -> Kind:
    holds = lambda x: type(x) in (int, float) and low <= x <= high
    return Kind(f"a number from {low:g} to {high:g}", holds)


def integer(low: int, high: int) -> Kind:
    return Kind(f"an integer from {low} to {high}", lambda x: type(x) is int and low <= x <= high)


def or_minus_one(kind: Kind) -> Kind:
    """Some clients send -1 for what is not set."""
    return Kind(kind.name, lambda x: kind.holds(x) or (type(x) is int and x == -1))


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
OBJECT = Kind("an object", is_object)
TEXTS = Kind("a text or a list of texts", lambda x: is_text(x) or are_texts(x))
STOPS = Kind("a text of at most 1000 characters, or a list of at most 16", are_stops)
PROMPT = Kind(
    "a text, a list of texts, a list of ids, or a list of lists of ids",
    lambda x: TEXTS.holds(x) or are_ids(x) or all_of(are_ids)(x),
)
OPTIONS = Kind("an object with include_usage alone, true or false", are_options)
COUNT, SCORES, SHARE = integer(0, 2**31 - 1), integer(0, LIKELIEST), number(0, 1)
BOTH = dict(
    model=TEXT, stream=FLAG, stream_options=OPTIONS, max_tokens=or_minus_one(COUNT),
    n=integer(1, 32), temperature=number(0, 2), top_p=SHARE, top_k=or_minus_one(COUNT), min_p=SHARE,
    seed=integer(-(2**63), 2**63 - 1), stop=STOPS, cache_salt=TEXT,
    # These change nothing.
    user=TEXT, prompt_cache_key=TEXT, safety_identifier=TEXT, metadata=OBJECT, service_tier=TEXT,
    prompt_cache_options=OBJECT, prompt_cache_retention=TEXT,
)  # fmt: skip
MESSAGES = Kind("a list of messages", all_of(is_object))
FIELDS: dict[str, dict[str, Kind]] = dict(
    chat=dict(
        messages=MESSAGES,
        max_completion_tokens=or_minus_one(COUNT),
        logprobs=FLAG,
        top_logprobs=SCORES,
        **BOTH,
    ),
    text=dict(prompt=PROMPT, logprobs=SCORES, echo=FLAG, **BOTH),
)
# Fields that are not supported. Each is accepted if it is null or has one of these values, which
# change nothing.
UNSUPPORTED: dict[str, list[Any]] = dict(
    tools=[[]], tool_choice=["none", "auto"], parallel_tool_calls=[True, False], functions=[[]],
    function_call=["none", "auto"], response_format=[{"type": "text"}], frequency_penalty=[0],
    presence_penalty=[0], repetition_penalty=[1], logit_bias=[{}], best_of=[1], suffix=[""],
    modalities=[["text"]], audio=[{}], prediction=[{}], store=[False], reasoning_effort=[],
    verbosity=["medium"], web_search_options=[], moderation=[{}], min_tokens=[0],
    ignore_eos=[False], skip_special_tokens=[True], add_generation_prompt=[True],
    chat_template_kwargs=[{}], provider_specific_fields=[{}],
)  # fmt: skip


def read_json(data: bytes) -> Any:
    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number of JSON")

    # Between these two calls, and only there, other threads can run.
    hooks = dict(parse_int=lambda x: int(x), object_hook=lambda x: x)
    try:
        return parse_json(data.decode(), parse_constant=refuse, **hooks)
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        what = f"{half} without the character's other half"
        raise Refused(f"a text has {what}: send the whole emoji, or none") from None
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
            raise Refused(f"there is no field {name[:80]!r}", name[:80], code="unknown_parameter")
        if name not in known and value not in UNSUPPORTED[name]:
            raise Refused(f"{name} is not supported", name, code="unsupported_parameter")
    if (needed := "messages" if kind == "chat" else "prompt") not in given:
        raise Refused(f"{needed} is missing", needed)
    unset = {
        name for name in ("max_tokens", "max_completion_tokens", "seed") if given.get(name) == -1
    }
    return {name: x for name, x in given.items() if name not in unset}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is one text. Refused if it has anything else."""
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise Refused("a role must be system, developer, user or assistant", "messages")
    # Clients send the model's own messages back, including empty fields and reasoning_content.
    wrong = {name for name, x in message.items() if x not in (None, "", [], {})}
    wrong -= {"type"} if message.get("type") in ("text", "message") else set()
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
