"""The OpenAI protocol: a body of JSON becomes requests of the engine.

https://platform.openai.com/docs/api-reference; FIELDS has what of it is understood, and more."""

import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher

from common.loading.generation import SETTINGS
from common.sampling import PENALTIES
from common.server.fields import Refused, fields_of, list_of, plain
from common.serving.rules import check_grammar
from common.serving.session import Request, Session, check_request
from common.text import tools as formats
from common.text.chat import encode_chat, end_of_turn, thinking_options
from common.text.grammar import behind_thoughts, grammar_of, json_grammar
from common.text.tokenizer import encode

RESERVED = {"tok", "messages", "tools", "add_generation_prompt"}  # which no variable may replace
# The grammar of each kind of structured output.
GRAMMARS: dict[str, Callable[[Any], str]] = dict(
    json=lambda x: json_grammar(json.loads(x) if isinstance(x, str) else x),
    json_object=lambda _: json_grammar(dict(type="object")),
    choice=lambda x: f"start: {' | '.join(map(json.dumps, x))}",
    regex=LLMatcher.grammar_from_regex,
    grammar=str,
)


class Served:
    """What is served: a session, under a name, to so many requests at once."""

    def __init__(self, session: Session, name: str, most: int, tool_format: str | None = None):
        tok = session.model.tokenizer
        assert tok is not None
        self.session, self.name, self.most, self.tok = session, name, most, tok
        self.longest = max(map(len, tok.backend.get_vocab()))  # characters of a token
        self.tool_format = tool_format or formats.format_of(tok.chat_template)


def calls_of(
    served: Served, tools: Sequence[Any], choice: Any, exact: bool, parallel: bool
) -> tuple[formats.Calls | None, str | None]:
    """How calls in a reply are read, and the grammar that they must fit. If `exact`, the grammar
    allows calls alone, and one call if they are not `parallel`."""
    if not tools:
        if choice in ("none", "auto"):
            return None, None
        raise Refused("tool_choice asks for a call, and there are no tools", "tool_choice")
    if (form := served.tool_format) is None:
        raise Refused("it is not known how this model writes calls: see --tool-format", "tools")
    name = choice["function"]["name"] if isinstance(choice, dict) else None
    wanted = [tool for tool in tools if name in (None, tool["function"]["name"])]
    if not wanted:
        raise Refused(f"tool_choice: there is no tool {str(name)[:80]!r}", "tool_choice")
    try:
        grammar, calls = None, formats.start_calls(form, tools)
        if exact or any(tool["function"].get("strict") for tool in tools):
            single = name is not None or not parallel
            grammar = grammar_of(served.tok, form, wanted, exact, single)
            check_grammar(served.session.model, grammar)
    except ValueError as error:
        raise Refused(str(error), "tools") from None
    return calls, grammar


def structure_of(served: Served, given: dict[str, Any]) -> str | None:
    """What `response_format` and `structured_outputs` ask, as a grammar of llguidance."""
    form, name = given.get("response_format", {}), "structured_outputs"
    asked = {kind: x for kind, x in given.get(name, {}).items() if x is not None}
    if form.get("type", "text") != "text":
        if asked:
            raise Refused(f"response_format does not go with {name}", "response_format")
        name, wanted = "response_format", form.get("json_schema") or {}
        asked = dict(json=wanted.get("schema", dict(type="object")))
    if not asked:
        return None
    ((kind, value),) = asked.items()
    try:
        grammar = GRAMMARS[kind](value)
        check_grammar(served.session.model, grammar)
    except (TypeError, ValueError) as error:  # a schema may be text of any JSON
        raise Refused(f"{name}: {' '.join(str(error).split())[:500]}", name) from None
    return grammar


def prompts_of(served: Served, kind: str, given: dict[str, Any], tools: Any) -> list[list[int]]:
    """Encodes what is asked. ValueError if it cannot fit, or the template does not take it."""
    session, tok, variables = served.session, served.tok, given.get("chat_template_kwargs", {})
    if kind == "chat":
        check_length(session, "the conversation has {} messages", len(given["messages"]))
        texts: Any = [[plain(message) for message in given["messages"]]]
        size = sum(len(message["content"]) for message in texts[0])
    else:
        texts = given["prompt"]
        texts = [texts] if isinstance(texts, str) or isinstance(texts[0], int) else texts
        size = max(map(len, texts))
    if len(texts) * given.get("n", 1) > served.most:
        raise Refused(f"a request may ask for {served.most} texts at most", "n")
    check_length(session, "the prompt has {} characters", size, served.longest)
    if wrong := RESERVED & {*variables}:
        raise Refused(f"chat_template_kwargs may not have {min(wrong)}", "chat_template_kwargs")
    if effort := given.get("reasoning_effort"):
        variables = thinking_options(tok, None, effort) | variables
    if kind == "chat":
        ids = [encode_chat(tok, texts[0], tools=tools, **variables)]
    else:
        ids = [encode(tok, x) if isinstance(x, str) else x for x in texts]
    check_length(session, "the prompt has {} tokens", max(map(len, ids)))
    return ids


def check_length(session: Session, what: str, count: int, most: int = 1) -> None:
    """Refused if a prompt has more of something than fits, at `most` of it for each token."""
    if count > session.capacity * most:
        limit = f"this model's maximum context length is {session.capacity} tokens (see --max-len)"
        raise Refused(f"{what.format(count)}, but {limit}", code="context_length_exceeded")


class Asked(NamedTuple):
    """What one HTTP request asks for."""

    kind: str  # "chat" or "text"
    given: dict[str, Any]  # its fields
    requests: list[Request]  # n for each prompt, side by side
    calls: formats.Calls | None  # how calls in a reply are read


def ask(served: Served, kind: str, body: Any) -> Asked:
    """Reads a request. Refused if it cannot be served."""
    given, session, tok = fields_of(kind, body), served.session, served.tok
    get, is_chat = given.get, kind == "chat"
    if get("model", served.name) != served.name:
        raise Refused(f"the model here is {served.name}", "model", 404, "model_not_found")
    wanted = (get("top_logprobs", 0) if get("logprobs") else None) if is_chat else get("logprobs")
    if get("top_logprobs") is not None and wanted is None:
        raise Refused("top_logprobs goes with logprobs", "top_logprobs")
    if wanted is not None and not session.logprobs:
        raise Refused("log-probabilities do not go with --draft mtp", "logprobs")
    most = get("max_completion_tokens", get("max_tokens"))
    if most != get("max_tokens", most):
        raise Refused("max_tokens and max_completion_tokens differ", "max_tokens")
    if most == 0 and not get("echo"):
        raise Refused("max_tokens must be at least 1, but for echo", "max_tokens")
    ends = tok.stop_ids | (end_of_turn(tok) if is_chat else set())
    structure = structure_of(served, given)
    choice, requests = get("tool_choice", "auto"), list[Request]()
    tools, required = [] if choice == "none" else get("tools", []), choice not in ("none", "auto")
    # Beside a structure, calls are the other thing that the reply may be.
    exact, parallel = required or structure is not None, get("parallel_tool_calls", True)
    calls, must_fit = calls_of(served, tools, choice, exact, parallel)
    marks = calls is not None and served.tool_format != "harmony"
    settings: dict[str, Any] = {"temperature": 1.0, **session.model.sampling}
    settings |= {x: given[x] for x in (*SETTINGS, *PENALTIES, "cache_salt") if x in given}
    try:
        for ids in prompts_of(served, kind, given, tools):
            grammar = structure
            if is_chat and (structure or must_fit):
                grammar = behind_thoughts(tok, ids, None if required else structure, must_fit)
            room = session.capacity + 1 - len(ids) if is_chat or most == -1 else 16
            request = Request(
                ids,
                max(1, room if most in (None, -1) else most),
                **settings,
                logit_bias=[(int(id_), bias) for id_, bias in get("logit_bias", {}).items()],
                grammar=grammar,
                stop_ids=ends,
                stop=[text for text in list_of(get("stop", [])) if text],
                keep_special=marks or not get("skip_special_tokens", True),
                is_chat=is_chat,
                logprobs=wanted,
                echo=get("echo", False) and wanted is not None,
            )
            if request.is_ruled and not session.logprobs:
                raise Refused("--draft mtp goes with no grammar, no bias and no penalty")
            check_request(request, session.capacity, session.model.config)
            seed = get("seed", secrets.randbits(32))
            requests += [request._replace(seed=(seed + i) % 2**32) for i in range(get("n", 1))]
    except ValueError as error:
        raise Refused(str(error)) from None
    return Asked(kind, given, requests, calls)
