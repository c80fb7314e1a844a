"""The fields of a body, and what each of them may hold."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from common.loading.files import parse_json
from common.serving.session import LIKELIEST
from common.text.chat import REASONING

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


def is_format(x: Any) -> bool:
    if not is_object(x) or {*x} - {"type", "json_schema"}:
        return False
    schema = x.get("json_schema")
    if x.get("type") == "json_schema":
        return is_object(schema) and is_object(schema.get("schema", {}))
    return x.get("type") in ("text", "json_object") and schema is None


def is_structure(x: Any) -> bool:
    """One of these, as in vLLM, whose clients set the others to null."""
    kinds = dict(json=lambda x: is_object(x) or is_text(x), regex=is_text, grammar=is_text)
    kinds |= dict(choice=are_texts, json_object=lambda x: x is True)
    given = {key: one for key, one in x.items() if one is not None} if is_object(x) else {}
    return len(given) == 1 and all(key in kinds and kinds[key](one) for key, one in given.items())


def is_choice(x: Any) -> bool:
    function = x.get("function") if is_object(x) and x.get("type") == "function" else None
    named = isinstance(function, dict) and is_text(function.get("name"))
    return named or (is_text(x) and x in ("none", "auto", "required"))


TEXT, FLAG = Kind("a text", is_text), Kind("true or false", lambda x: isinstance(x, bool))
OBJECT = Kind("an object", is_object)
TEXTS = Kind("a text or a list of texts", lambda x: is_text(x) or are_texts(x))
STOPS = Kind("a text of at most 1000 characters, or a list of at most 16", are_stops)
PROMPT = Kind(
    "a text, a list of texts, a list of ids, or a list of lists of ids",
    lambda x: TEXTS.holds(x) or are_ids(x) or all_of(are_ids)(x),
)
MESSAGES = Kind("a list of messages", all_of(is_object))
ITEMS = Kind("a text or a list of items", lambda x: is_text(x) or all_of(is_object)(x))
OPTIONS = Kind("an object with include_usage alone, true or false", are_options)
FORMAT = Kind("text, json_object, or json_schema with an object that has the schema", is_format)
STRUCTURE = Kind("an object with one of json, regex, grammar, choice, json_object", is_structure)
are_tools = all_of(lambda x: is_object(x) and x.get("type") == "function")
TOOLS = Kind("a list of tools whose type is function", lambda x: x == [] or are_tools(x))
CHOICE = Kind("none, auto, required, or an object with a function's name", is_choice)
INCLUDED = [[], ["reasoning.encrypted_content"]]  # reasoning comes anyway, as text
COUNT, SCORES, SHARE = integer(0, 2**31 - 1), integer(0, LIKELIEST), number(0, 1)
BIAS, PENALTY, OR_UNSET = number(-100, 100), number(-2, 2), or_minus_one(COUNT)
BIASES = Kind(
    "an object of token ids and numbers from -100 to 100",
    lambda x: is_object(x) and all(re.fullmatch("[0-9]{1,9}", i) and BIAS.holds(x[i]) for i in x),
)
# Of all three protocols; what stands in the last two lines changes nothing.
SHARED = dict(
    model=TEXT, stream=FLAG, stream_options=OPTIONS, temperature=number(0, 2), top_p=SHARE,
    top_k=OR_UNSET, min_p=SHARE, seed=integer(-(2**63), 2**63 - 1), stop=STOPS, cache_salt=TEXT,
    presence_penalty=PENALTY, frequency_penalty=PENALTY, repetition_penalty=number(0.01, 100),
    logit_bias=BIASES, structured_outputs=STRUCTURE, skip_special_tokens=FLAG,
    user=TEXT, prompt_cache_key=TEXT, safety_identifier=TEXT, metadata=OBJECT, service_tier=TEXT,
    prompt_cache_options=OBJECT, prompt_cache_retention=TEXT,
)  # fmt: skip
BOTH = SHARED | dict(max_tokens=OR_UNSET, n=integer(1, 32), response_format=FORMAT)
TURNS = dict(parallel_tool_calls=FLAG, chat_template_kwargs=OBJECT)
CHAT = dict(
    messages=MESSAGES, logprobs=FLAG, top_logprobs=SCORES, max_completion_tokens=OR_UNSET,
    tools=TOOLS, tool_choice=CHOICE, reasoning_effort=TEXT,
)  # fmt: skip
FIELDS: dict[str, dict[str, Kind]] = dict(
    chat=CHAT | TURNS | BOTH,
    text=dict(prompt=PROMPT, logprobs=SCORES, echo=FLAG, **BOTH),
    responses=dict(
        input=ITEMS, instructions=TEXT, max_output_tokens=OR_UNSET, reasoning=OBJECT, text=OBJECT,
        tools=Kind("a list of tools", lambda x: x == [] or all_of(is_object)(x)),
        tool_choice=Kind("a text or an object", lambda x: is_text(x) or is_object(x)),
        include=Kind(f"one of {INCLUDED}", lambda x: x in INCLUDED), **SHARED, **TURNS,
    ),
)  # fmt: skip
# Fields that are not supported, here or in the other protocols. Each is accepted if it is null or
# has one of these values, which change nothing.
UNSUPPORTED: dict[str, list[Any]] = dict(
    functions=[[]], function_call=["none", "auto"], best_of=[1], suffix=[""], modalities=[["text"]],
    audio=[{}], prediction=[{}], store=[False], verbosity=["medium"], web_search_options=[],
    moderation=[{}], min_tokens=[0], ignore_eos=[False], add_generation_prompt=[True],
    provider_specific_fields=[{}], tools=[[]], tool_choice=["none", "auto"],
    parallel_tool_calls=[True, False], reasoning_effort=[], chat_template_kwargs=[{}],
    background=[False], previous_response_id=[], conversation=[], truncation=["disabled"],
    top_logprobs=[0], max_tool_calls=[], context_management=[[]],
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
    if (needed := dict(chat="messages", text="prompt", responses="input")[kind]) not in given:
        raise Refused(f"{needed} is missing", needed)
    given |= dict(top_k=0) if given.get("top_k") == -1 else {}
    unset = {"max_tokens", "max_completion_tokens", "seed"}  # if they are -1
    given = {name: x for name, x in given.items() if x != -1 or name not in unset}
    return {name: x for name, x in given.items() if name in known}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates read it: its content is one text. Refused if it has anything else."""
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise Refused("a role must be system, developer, user, assistant or tool", "messages")
    # Clients send the model's own messages back, including empty fields.
    given = {name: x for name, x in message.items() if x not in (None, "", [], {})}
    known = {"role", "content", "name"}
    known |= {"type"} if message.get("type") in ("text", "message") else set()
    known |= {"tool_call_id"} if role == "tool" else set()
    known |= {"tool_calls", *REASONING} if role == "assistant" else set()
    if wrong := {*given} - known:
        raise Refused(f"{min(wrong)[:80]} is not supported in a message", "messages")
    content = "" if content is None and role == "assistant" else content
    parts: Any = [dict(type="text", text=content)] if is_text(content) else content
    if not all_of(is_object)(parts) or any(
        part.get("type") != "text" or not is_text(part.get("text")) for part in parts
    ):
        raise Refused("the content of a message must be text", "messages")
    new = dict(role=role, content="".join(part["text"] for part in parts))
    for name in ("tool_call_id", *REASONING, *(["name"] if role == "tool" else [])):
        if not is_text(given.get(name, "")):
            raise Refused(f"{name} must be text", "messages")
        new |= {name: given[name]} if name in given else {}
    calls = given.get("tool_calls", [])
    if not isinstance(calls, list) or not all(map(is_call, calls)):
        what = "a tool call must have an id and a function, with a name and the text of arguments"
        raise Refused(what, "messages")
    return new | (dict(tool_calls=calls) if calls else {})


def is_call(x: Any) -> bool:
    function = x.get("function") if is_object(x) else None
    if not isinstance(function, dict):
        return False
    return all(map(is_text, [function.get("name"), function.get("arguments"), x.get("id", "")]))
