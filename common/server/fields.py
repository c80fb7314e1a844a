"""The fields of a body, and what each of them may hold."""

import re
from functools import partial
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


class Refused(Exception):
    """Why something is not served, in one sentence; and the field that is to blame."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.status, kind = status, "invalid_request_error" if status < 500 else "server_error"
        code = code or CODES.get(status, kind)
        self.object = {"error": dict(message=message, type=kind, param=param, code=code)}


def fits(x: Any, shape: Any) -> bool:
    """Whether a value of JSON has a shape. That is a type, or the value itself; a tuple of shapes,
    one of which it has; a list, whose one shape each item has, at least one; an object with a shape
    for each key, where a key that is missing is null, and `...` stands for any others; or a test.
    """
    if isinstance(shape, type):
        return type(x) is shape
    if isinstance(shape, tuple):
        return any(fits(x, one) for one in shape)
    if isinstance(shape, list):
        same = isinstance(x, list) and bool(x) == bool(shape)
        return same and all(fits(item, shape[0]) for item in x)
    if isinstance(shape, dict):
        known = isinstance(x, dict) and (... in shape or {*x} <= {*shape})
        return known and all(fits(x.get(key), one) for key, one in shape.items() if key is not ...)
    return bool(shape(x)) if callable(shape) else type(x) is type(shape) and x == shape


class Kind(NamedTuple):
    """What a field may hold."""

    name: str
    shape: Any


def number(low: float, high: float, name: str = "a number", shape: Any = (int, float)) -> Kind:
    return Kind(f"{name} from {low} to {high}", lambda x: fits(x, shape) and low <= x <= high)


integer = partial(number, name="an integer", shape=int)


def list_of(x: Any) -> Any:
    """A text alone becomes a list of one."""
    return [x] if isinstance(x, str) else x


TEXT, FLAG, OBJECT = Kind("a text", str), Kind("true or false", bool), Kind("an object", dict)
# Each stop text is searched for at every token, so they are short and few.
SHORT = lambda x: isinstance(x, str) and len(x) <= 1000
STOPS = Kind(
    "a text of at most 1000 characters, or a list of at most 16",
    lambda x: fits(list_of(x), ([], [SHORT])) and len(list_of(x)) <= 16,
)
PROMPT = Kind(
    "a text, a list of texts, a list of ids, or a list of lists of ids",
    (str, [str], [int], [[int]]),
)
OPTIONS = Kind(  # obfuscation can only be switched off
    "an object with include_usage alone, true or false",
    dict(include_usage=(bool, None), include_obfuscation=(False, None)),
)
SCHEMA = {"schema": dict, ...: object}
FORMAT = Kind(
    "text, json_object, or json_schema with an object that has the schema",
    (dict(type=("text", "json_object"), json_schema=None),
     dict(type="json_schema", json_schema=SCHEMA)),
)  # fmt: skip
# As in vLLM, whose clients set the others to null.
STRUCTURES = dict(json=(dict, str), regex=str, grammar=str, choice=[str], json_object=True)
STRUCTURE = Kind(
    f"an object with one of {', '.join(STRUCTURES)}",
    tuple({**dict.fromkeys(STRUCTURES), name: shape} for name, shape in STRUCTURES.items()),
)
FUNCTION = {"type": "function", "function": {"name": str, ...: object}, ...: object}
CHOICE = Kind(
    "none, auto, required, or an object with a function's name",
    ("none", "auto", "required", FUNCTION),
)
TOOLS = Kind(
    "a list of tools whose type is function, each with a name of the function", ([], [FUNCTION])
)
INCLUDED = [[], ["reasoning.encrypted_content"]]  # reasoning comes anyway, as text
REASONS = Kind("an object with effort", {"effort": (str, None), "summary": (str, None)})
FORMED = Kind("an object with format", {"format": (dict, None), "verbosity": ("medium", None)})
COUNT, SCORES, SHARE = integer(0, 2**31 - 1), integer(0, LIKELIEST), number(0, 1)
OR_UNSET = Kind(COUNT.name, (COUNT.shape, -1))  # which some clients send for what is not set
BIAS, PENALTY = number(-100, 100), number(-2, 2)
is_bias = lambda id_, x: re.fullmatch("[0-9]{1,9}", id_) and fits(x, BIAS.shape)
BIASES = Kind(
    "an object of token ids and numbers from -100 to 100",
    lambda x: fits(x, dict) and all(is_bias(*one) for one in x.items()),
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
FIELDS: dict[str, dict[str, Kind]] = dict(
    chat=dict(
        messages=Kind("a list of messages", [dict]), logprobs=FLAG, top_logprobs=SCORES,
        max_completion_tokens=OR_UNSET, tools=TOOLS, tool_choice=CHOICE, reasoning_effort=TEXT,
        **TURNS, **BOTH,
    ),
    text=dict(prompt=PROMPT, logprobs=SCORES, echo=FLAG, **BOTH),
    responses=dict(
        input=Kind("a text or a list of items", (str, [dict])), instructions=TEXT,
        max_output_tokens=OR_UNSET, reasoning=REASONS, text=FORMED,
        tools=Kind("a list of tools with a type", ([], [{"type": str, ...: object}])),
        tool_choice=Kind("a text or an object", (str, dict)),
        client_metadata=OBJECT, include=Kind(f"one of {INCLUDED}", (*INCLUDED,)),
        **SHARED, **TURNS,
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
# Of a message, whatever its role, and then what else it may have, by its role.
MESSAGE = dict(content=TEXT, name=TEXT, type=Kind("text or message", ("text", "message")))
CALL = {"function": {"name": str, "arguments": str, ...: object}, "id": (str, None), ...: object}
CALLS = Kind("a list of calls with an id, and a function's name and text of arguments", [CALL])
ROLES: dict[str, dict[str, Kind]] = dict(
    system={}, developer={}, user={}, tool=dict(tool_call_id=TEXT),
    assistant=dict(tool_calls=CALLS, **dict.fromkeys(REASONING, TEXT)),
)  # fmt: skip
# Parts of text, in conversations and in responses.
PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text", None)


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
    if not fits(body, dict):
        raise Refused("the body is not a JSON object")
    known, given = FIELDS[kind], {key: x for key, x in body.items() if x is not None}
    for name, value in given.items():
        if name in known and not fits(value, known[name].shape):
            raise Refused(f"{name} must be {known[name].name}", name)
        if name not in known and name not in UNSUPPORTED:
            raise Refused(f"there is no field {name[:80]!r}", name[:80], code="unknown_parameter")
        if name not in known and value not in UNSUPPORTED[name]:
            raise Refused(f"{name} is not supported", name, code="unsupported_parameter")
    if (needed := next(iter(known))) not in given:  # the first one of each protocol
        raise Refused(f"{needed} is missing", needed)
    given |= {name: x for name, x in dict(top_k=0, seed=None).items() if given.get(name) == -1}
    return {x: y for x, y in given.items() if x in known and y is not None}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates read it: its content is one text. Refused if it has anything else."""
    role, content = message.get("role"), message.get("content")
    if not fits(role, (*ROLES,)):
        raise Refused(f"a role must be one of {', '.join(ROLES)}", "messages")
    known = MESSAGE | ROLES[str(role)]
    # Clients send the model's own messages back, including empty fields.
    given = {name: x for name, x in message.items() if x not in (None, "", [], {})}
    given |= dict(content=text_of("" if content is None and role == "assistant" else content))
    for name in sorted(given.keys() - {"role"}):
        if name not in known:
            raise Refused(f"{name[:80]} is not supported in a message", "messages")
        if not fits(given[name], known[name].shape):
            raise Refused(f"{name} must be {known[name].name}", "messages")
    return {name: x for name, x in given.items() if name != "type"}


def text_of(content: Any) -> str:
    parts = [dict(text=content)] if isinstance(content, str) else content
    if not fits(parts, ([], [{"type": PARTS, "text": str, ...: object}])):
        raise Refused("the content of a message must be text", "messages")
    return "".join(part["text"] for part in parts)
