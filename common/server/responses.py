"""The Responses protocol without a store, as another form of a conversation: a body becomes one of
chat completions, and what comes of it becomes items.

https://platform.openai.com/docs/api-reference/responses
"""

import json
import time
import uuid
from typing import Any

from common.server.answers import Choice, add, calls_in, usage_of
from common.server.fields import (
    BOTH,
    CHAT,
    OBJECT,
    TEXT,
    Kind,
    Refused,
    all_of,
    are_texts,
    check_fields,
    is_object,
    is_text,
)
from common.server.protocol import Asked, Served, ask
from common.serving.session import Event

OTHER = {
    *("messages", "max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs"),
    *("tools", "tool_choice", "response_format", "reasoning_effort", "stream_options"),
}
SAME = {name: kind for name, kind in (BOTH | CHAT).items() if name not in OTHER}
ITEMS = Kind("a text or a list of items", lambda x: is_text(x) or all_of(is_object)(x))
OBJECTS = Kind("a list of objects", lambda x: x == [] or all_of(is_object)(x))
CHOICE = Kind("none, auto, required, or an object", lambda x: is_text(x) or is_object(x))
INCLUDE = Kind("a list of texts", lambda x: x == [] or are_texts(x))
RESPONSES = SAME | dict(
    input=ITEMS, instructions=TEXT, tools=OBJECTS, tool_choice=CHOICE, reasoning=OBJECT,
    text=OBJECT, max_output_tokens=BOTH["max_tokens"], include=INCLUDE, stream_options=OBJECT,
)  # fmt: skip
UNSUPPORTED: dict[str, list[Any]] = dict(
    store=[False], background=[False], previous_response_id=[], conversation=[], prompt=[{}],
    truncation=["disabled"], top_logprobs=[0], max_tool_calls=[], moderation=[{}],
    context_management=[[]],
)  # fmt: skip
INCLUDED = {"reasoning.encrypted_content"}  # what comes anyway, as text
TEXTS = {None, "text", "input_text", "output_text", "summary_text", "reasoning_text"}  # parts
# Of each kind of item: what its id begins with, and what the events of its text are called.
KINDS = dict(
    reasoning=("rs", "reasoning_text"),
    message=("msg", "output_text"),
    function_call=("fc", "function_call_arguments"),
)


def as_chat(body: Any) -> dict[str, Any]:
    """The same request as one for chat completions. Refused if it has anything else."""
    given = check_fields(body, RESPONSES, UNSUPPORTED, "input")
    if wrong := {*given.get("include", [])} - INCLUDED:
        raise Refused(f"include: {min(wrong)[:80]} is not supported", "include")
    tools, choice = list[dict[str, Any]](), given.get("tool_choice", "auto")
    for tool in given.get("tools", []):
        if (kind := tool.get("type")) != "function":
            raise Refused(
                f"{str(kind)[:80]} is not supported: only tools of type function", "tools"
            )
        function = {name: x for name, x in tool.items() if name != "type" and x is not None}
        tools.append(dict(type="function", function=function))
    if is_object(choice) and choice.get("type") == "function":
        choice = dict(type="function", function=dict(name=choice.get("name")))
    form = given.get("text", {}).get("format") or dict(type="text")
    if is_object(form) and form.get("type") == "json_schema":
        form = dict(type="json_schema", json_schema={k: x for k, x in form.items() if k != "type"})
    return {name: x for name, x in given.items() if name in SAME} | dict(
        messages=messages_of(given),
        max_completion_tokens=given.get("max_output_tokens"),
        reasoning_effort=given.get("reasoning", {}).get("effort"),
        response_format=form,
        tools=tools,
        tool_choice=choice,
    )


def messages_of(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that the items say. What a model has said in several items in a row, its
    reasoning, its text and its calls, is one message. So are all instructions at the beginning,
    because most templates have a place for one."""
    items, messages = given["input"], list[dict[str, Any]]()
    items = [dict(role="user", content=items)] if is_text(items) else items
    if "instructions" in given:
        items = [dict(role="system", content=given["instructions"]), *items]
    for item in items:
        new, last = message_of(item), messages[-1] if messages else {}
        roles = {new["role"], last.get("role")}
        if len(messages) == 1 and roles <= {"system", "developer"}:
            last["content"] += "\n\n" + new["content"]
        elif roles == {"assistant"} and {*new} & {*last} <= {"role", "tool_calls"}:
            calls = last.get("tool_calls", []) + new.get("tool_calls", [])
            last |= new | (dict(tool_calls=calls) if calls else {})
        else:
            messages.append(new)
    return messages


def message_of(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        return dict(role=item.get("role"), content=text_of(item.get("content")))
    if kind == "reasoning":
        thoughts = text_of(item.get("content") or item.get("summary") or [])
        return dict(role="assistant", reasoning_content=thoughts)
    if kind == "function_call":
        function = {name: item.get(name) for name in ("name", "arguments")}
        call = dict(id=item.get("call_id"), type="function", function=function)
        return dict(role="assistant", tool_calls=[call])
    if kind == "function_call_output":
        text = text_of(item.get("output"))
        return dict(role="tool", tool_call_id=item.get("call_id"), content=text)
    raise Refused(f"items of type {str(kind)[:80]} are not supported", "input")


def text_of(content: Any) -> str:
    """The text of a content, whatever the type of its parts of text."""
    parts = [dict(text=content)] if is_text(content) else content
    for part in parts if isinstance(parts, list) else [None]:
        told = part.get("text") if isinstance(part, dict) and part.get("type") in TEXTS else None
        if not is_text(told):
            raise Refused("the content of an item must be text", "input")
    return "".join(part["text"] for part in parts)


class Reply:
    """The answer: its items, each with one text. `add` and `last` return the events of a stream."""

    def __init__(self, served: Served, asked: Asked, body: dict[str, Any]):
        request, get = asked.requests[0], body.get
        self.known: dict[str, Any] = dict(
            id=f"resp_{uuid.uuid4().hex}", object="response", created_at=int(time.time()),
            model=served.name, error=None, incomplete_details=None, store=False, background=False,
            instructions=get("instructions"), max_output_tokens=get("max_output_tokens"),
            temperature=request.temperature, top_p=request.top_p, tools=get("tools") or [],
            tool_choice=get("tool_choice") or "auto", parallel_tool_calls=asked.parallel,
            text=get("text") or dict(format=dict(type="text")), reasoning=get("reasoning"),
            truncation="disabled", previous_response_id=None, metadata=get("metadata") or {},
        )  # fmt: skip
        self.tok, self.asked, self.sent = served.tok, asked, 0
        self.choices, self.items = [Choice(request, 0, asked.calls)], list[dict[str, Any]]()
        self.kind: str | None = None  # of the newest item, if that has not ended

    def line(self, kind: str, **more: Any) -> str:
        event = dict(type=kind, sequence_number=self.sent, **more)
        self.sent += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n"

    def of_item(self, event: str, **more: Any) -> str:
        at = dict(output_index=len(self.items) - 1, item_id=self.items[-1]["id"])
        at |= dict(content_index=0) if self.kind != "function_call" else {}
        at |= dict(logprobs=[]) if event.startswith("output_text") else {}
        return self.line(f"response.{event}", **at, **more)

    def first(self) -> str:
        kinds = "response.created", "response.in_progress"
        return "".join(self.line(kind, response=self.whole()) for kind in kinds)

    def add(self, _: int, event: Event) -> str:
        add(self.asked, choice := self.choices[0], self.tok, event)
        lines = self.more("reasoning", choice.reasoning) if choice.reasoning else ""
        for piece in choice.pieces:
            if piece.name is not None:
                (call,) = calls_in([piece]).values()
                lines += self.begin("function_call", call_id=call["id"], name=piece.name)
            if piece.text:
                lines += self.more("message" if piece.call is None else "function_call", piece.text)
        choice.reasoning, choice.pieces = "", []
        return lines + (self.end() if choice.finish else "")

    def more(self, kind: str, text: str) -> str:
        """Adds text to the newest item, or to a new one if that is of another kind."""
        lines = self.begin(kind) if self.kind != kind else ""
        if kind == "function_call":
            self.items[-1]["arguments"] += text
        else:
            self.items[-1]["content"][0]["text"] += text
        return lines + self.of_item(f"{KINDS[kind][1]}.delta", delta=text)

    def begin(self, kind: str, **more: Any) -> str:
        lines, (prefix, name), self.kind = self.end(), KINDS[kind], kind
        part: dict[str, Any] = dict(type=name, text="")
        part |= dict(annotations=[], logprobs=[]) if kind == "message" else {}
        if kind == "function_call":
            more["arguments"] = ""
        else:
            more |= dict(content=[]) | (dict(summary=[]) if kind == "reasoning" else {})
        more |= dict(role="assistant") if kind == "message" else {}
        item = dict(type=kind, id=f"{prefix}_{uuid.uuid4().hex}", status="in_progress", **more)
        self.items.append(item)
        at = len(self.items) - 1
        lines += self.line("response.output_item.added", output_index=at, item=item)
        if kind == "function_call":
            return lines
        item["content"] = [part]
        return lines + self.of_item("content_part.added", part=part)

    def end(self) -> str:
        """Ends the newest item."""
        if self.kind is None:
            return ""
        item, name, at = self.items[-1], KINDS[self.kind][1], len(self.items) - 1
        item["status"] = "incomplete" if self.choices[0].finish == "length" else "completed"
        if self.kind == "function_call":
            told = {name: item[name] for name in ("arguments", "name")}
            lines = self.of_item(f"{name}.done", **told)
        else:
            (part,) = item["content"]
            lines = self.of_item(f"{name}.done", text=part["text"])
            lines += self.of_item("content_part.done", part=part)
        self.kind = None
        return lines + self.line("response.output_item.done", output_index=at, item=item)

    def last(self) -> str:
        response = self.whole()
        return self.line(f"response.{response['status']}", response=response)

    def failed(self, error: Refused) -> str:
        told = error.object["error"]
        return self.line("error", **{name: told[name] for name in ("code", "message", "param")})

    def whole(self) -> dict[str, Any]:
        finish, usage = self.choices[0].finish, usage_of(self.asked, self.choices)
        more: dict[str, Any] = dict(status="completed" if finish else "in_progress", usage=None)
        if finish == "length":
            more = dict(status="incomplete", incomplete_details=dict(reason="max_output_tokens"))
        if finish:
            thoughts = usage["completion_tokens_details"]["reasoning_tokens"]
            more["usage"] = dict(
                input_tokens=usage["prompt_tokens"],
                input_tokens_details=usage["prompt_tokens_details"] | dict(cache_write_tokens=0),
                output_tokens=usage["completion_tokens"],
                output_tokens_details=dict(reasoning_tokens=thoughts),
                total_tokens=usage["total_tokens"],
            )
        return self.known | more | dict(output=self.items)


def ask_response(served: Served, body: Any) -> tuple[Asked, Reply]:
    """Reads a request, and begins the answer to it."""
    asked = ask(served, "chat", as_chat(body))
    return asked, Reply(served, asked, body)
