"""The Responses protocol without a store, as another form of a conversation: a body becomes one of
chat completions, and what comes of it becomes items.

https://platform.openai.com/docs/api-reference/responses
"""

import json
import time
import uuid
from typing import Any

from common.server.answers import Choice, add, calls_in, usage_of
from common.server.fields import FIELDS, Refused, fields_of, is_object, is_text
from common.server.protocol import Asked, Served, ask
from common.serving.session import Event

TEXTS = {None, "text", "input_text", "output_text", "summary_text", "reasoning_text"}  # parts
# Of each kind of item: what its id begins with, what the events of its text are called, and what it
# has at its beginning.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = dict(
    reasoning=("rs", "reasoning_text", dict(summary=[], content=[])),
    message=("msg", "output_text", dict(role="assistant", content=[])),
    function_call=("fc", "function_call_arguments", dict(arguments="")),
)


def as_chat(body: Any) -> dict[str, Any]:
    """The same request as one for chat completions. Refused if it has anything else."""
    given = fields_of("responses", body)
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
    same = FIELDS["chat"].keys() & given.keys() - {"stream_options"}
    return {name: given[name] for name in same} | dict(
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
        self.kind, self.text = "", ""  # of the newest item, if that has not ended

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
        self.text += text
        return lines + self.of_item(f"{KINDS[kind][1]}.delta", delta=text)

    def begin(self, kind: str, **more: Any) -> str:
        lines, (prefix, _, fresh) = self.end(), KINDS[kind]
        number = f"{prefix}_{uuid.uuid4().hex}"
        self.items.append(dict(type=kind, id=number, status="in_progress", **fresh, **more))
        self.kind, self.text = kind, ""
        lines += self.line("response.output_item.added", **self.newest())
        is_call = kind == "function_call"
        return lines if is_call else lines + self.of_item("content_part.added", part=self.part())

    def newest(self) -> dict[str, Any]:
        return dict(output_index=len(self.items) - 1, item=self.items[-1])

    def part(self) -> dict[str, Any]:
        more: dict[str, Any] = dict(annotations=[], logprobs=[]) if self.kind == "message" else {}
        return dict(type=KINDS[self.kind][1], text=self.text, **more)

    def end(self) -> str:
        """Ends the newest item."""
        if not self.kind:
            return ""
        item, done = self.items[-1], f"{KINDS[self.kind][1]}.done"
        item["status"] = "incomplete" if self.choices[0].finish == "length" else "completed"
        if self.kind == "function_call":
            item["arguments"] = self.text
            lines = self.of_item(done, arguments=self.text, name=item["name"])
        else:
            item["content"] = [self.part()]
            lines = self.of_item(done, text=self.text)
            lines += self.of_item("content_part.done", part=self.part())
        self.kind = ""
        return lines + self.line("response.output_item.done", **self.newest())

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
