"""The Responses protocol without a store, as another form of a conversation: a body becomes one of
chat completions, and what comes of it becomes items.

https://platform.openai.com/docs/api-reference/responses
"""

import json
import time
from typing import Any

from common.server.answers import CALL, SAID, THOUGHT, Choice, add, new_id, usage_of
from common.server.fields import FIELDS, Refused, fields_of, text_of
from common.server.protocol import Asked, Served
from common.serving.session import Event

# By kind of item: what the events of its text are called; how its id begins, and its first fields.
TEXTS = {THOUGHT: "reasoning_text", SAID: "output_text", CALL: "function_call_arguments"}
FRESH: dict[str, tuple[str, dict[str, Any]]] = {
    THOUGHT: ("rs", dict(summary=[], content=[])),
    SAID: ("msg", dict(role="assistant", content=[])),
    CALL: ("fc", dict(arguments="")),
}
STATUS = {None: "in_progress", "length": "incomplete"}  # by what has ended the reply
# What a response repeats of its request, and says if that does not.
REPEATED: dict[str, Any] = dict(
    instructions=None, max_output_tokens=None, metadata={}, reasoning=None,
    tool_choice="auto", parallel_tool_calls=True, text=dict(format=dict(type="text")),
)  # fmt: skip


def message_of(item: dict[str, Any]) -> dict[str, Any]:
    """What an item says, as a message of a conversation."""
    get, kind = item.get, item.get("type", "message")
    if kind == "message":
        return dict(role=str(get("role")), content=text_of(get("content")))
    if kind == "reasoning":
        thoughts = text_of(get("content") or get("summary") or [])
        return dict(role="assistant", reasoning_content=thoughts)
    if kind == "function_call":
        function = dict(name=get("name"), arguments=get("arguments"))
        call = dict(id=get("call_id"), type="function", function=function)
        return dict(role="assistant", tool_calls=[call])
    if kind == "function_call_output":
        return dict(role="tool", tool_call_id=get("call_id"), content=text_of(get("output")))
    raise Refused(f"items of type {str(kind)[:80]} are not supported", "input")


def as_chat(body: Any) -> dict[str, Any]:
    """The same request as one for chat completions. Refused if it has anything else."""
    given = fields_of("responses", body)
    same = FIELDS["chat"].keys() & given.keys() - {"stream_options"}
    return {name: given[name] for name in same} | dict(
        messages=messages_of(given),
        max_completion_tokens=given.get("max_output_tokens"),
        reasoning_effort=given.get("reasoning", {}).get("effort"),
        response_format=nested(given.get("text", {}).get("format"), "json_schema"),
        tools=[nested(tool, "function") for tool in offered(given)],
        tool_choice=nested(given.get("tool_choice"), "function"),
    )


def offered(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools that the model is offered. It can call no others: a search would run here."""
    return [tool for tool in given.get("tools") or [] if tool["type"] == "function"]


def nested(x: Any, kind: str) -> Any:
    """What is flat in this protocol stands under its type in that of chat completions."""
    if not isinstance(x, dict) or x.get("type") != kind:
        return x
    inner = {name: value for name, value in x.items() if name != "type" and value is not None}
    return {"type": kind, kind: inner}


def messages_of(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages that the items say. What a model has said in several items in a row, its
    reasoning, its text and its calls, is one message. So are all instructions at the beginning,
    because most templates have a place for one."""
    items, messages = given["input"], list[dict[str, Any]]()
    items = [dict(role="user", content=items)] if isinstance(items, str) else items
    if "instructions" in given:
        items = [dict(role="system", content=given["instructions"]), *items]
    for item in items:
        new, last = message_of(item), messages[-1] if messages else {}
        roles = {new["role"], last.get("role")}
        if len(messages) == 1 and roles <= {"system", "developer"}:
            last["content"] += "\n\n" + new["content"]
        elif roles == {"assistant"} and {*new} & {*last} <= {"role", "tool_calls"}:
            last |= new | dict(tool_calls=last.get("tool_calls", []) + new.get("tool_calls", []))
        else:
            messages.append(new)
    return messages


class Reply:
    """The answer: its items, each with one text. `add` and `last` return the events of a stream."""

    def __init__(self, served: Served, asked: Asked, body: dict[str, Any]):
        self.tok, self.asked, request = served.tok, asked, asked.requests[0]
        self.choices, self.items = [Choice(request, asked.calls)], list[dict[str, Any]]()
        self.sent, self.kind, self.text = 0, "", ""  # of the newest item, if that has not ended
        self.known: dict[str, Any] = dict(
            id=new_id("resp"), object="response", created_at=int(time.time()), model=served.name,
            temperature=request.temperature, top_p=request.top_p, error=None, store=False,
            background=False, truncation="disabled", previous_response_id=None, tools=offered(body),
            **{name: x if body.get(name) is None else body[name] for name, x in REPEATED.items()},
        )  # fmt: skip
        kinds = "response.created", "response.in_progress"
        self.first = "".join(self.line(kind, response=self.whole()) for kind in kinds)

    def line(self, kind: str, **more: Any) -> str:
        event = dict(type=kind, sequence_number=self.sent, **more)
        self.sent += 1
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n"

    def of_item(self, event: str, **more: Any) -> str:
        """An event of the newest item, of its part or of its text."""
        item, of = self.items[-1], event.partition(".")[0]
        more |= dict(output_index=len(self.items) - 1)
        more |= dict(item=item) if of == "output_item" else dict(item_id=item["id"])
        more |= dict(content_index=0) if of not in ("output_item", TEXTS[CALL]) else {}
        more |= dict(part=self.part()) if of == "content_part" else {}
        more |= dict(logprobs=[]) if of == TEXTS[SAID] else {}
        return self.line(f"response.{event}", **more)

    def add(self, _: int, event: Event) -> str:
        add(self.asked, choice := self.choices[0], self.tok, event)
        lines = ""
        for kind, piece in choice.pieces:
            if kind != self.kind or piece.name is not None:
                named = dict(call_id=new_id("call"), name=piece.name) if kind == CALL else {}
                lines += self.end() + self.begin(kind, named)
            if piece.text:
                self.text += piece.text
                lines += self.of_item(f"{TEXTS[kind]}.delta", delta=piece.text)
        choice.pieces = []
        return lines + (self.end(STATUS.get(choice.finish, "completed")) if choice.finish else "")

    def part(self) -> dict[str, Any]:
        more: dict[str, Any] = dict(annotations=[], logprobs=[]) if self.kind == SAID else {}
        return dict(type=TEXTS[self.kind], text=self.text, **more)

    def begin(self, kind: str, named: dict[str, Any]) -> str:
        self.kind, self.text = kind, ""
        prefix, fresh = FRESH[kind]
        item = dict(type=kind, id=new_id(prefix), status="in_progress")
        self.items.append(item | fresh | named)
        begun = self.of_item("output_item.added")
        return begun if kind == CALL else begun + self.of_item("content_part.added")

    def end(self, status: str = "completed") -> str:
        """Ends the newest item. Only the last one of a reply can be incomplete."""
        if not self.kind:
            return ""
        item, done = self.items[-1], f"{TEXTS[self.kind]}.done"
        item["status"] = status
        if self.kind == CALL:
            item["arguments"] = self.text
            lines = self.of_item(done, arguments=self.text, name=item["name"])
        else:
            item["content"] = [self.part()]
            lines = self.of_item(done, text=self.text) + self.of_item("content_part.done")
        self.kind = ""
        return lines + self.of_item("output_item.done")

    def last(self) -> str:
        response = self.whole()
        return self.line(f"response.{response['status']}", response=response)

    def failed(self, error: Refused) -> str:
        told = error.object["error"]
        return self.line("error", **{name: told[name] for name in ("code", "message", "param")})

    def whole(self) -> dict[str, Any]:
        finish, usage = self.choices[0].finish, usage_of(self.asked, self.choices)
        thoughts = usage["completion_tokens_details"]["reasoning_tokens"]
        used = dict(
            input_tokens=usage["prompt_tokens"],
            input_tokens_details=usage["prompt_tokens_details"] | dict(cache_write_tokens=0),
            output_tokens=usage["completion_tokens"],
            output_tokens_details=dict(reasoning_tokens=thoughts),
            total_tokens=usage["total_tokens"],
        )
        return self.known | dict(
            status=STATUS.get(finish, "completed"),
            incomplete_details=dict(reason="max_output_tokens") if finish == "length" else None,
            usage=used if finish else None,
            output=self.items,
        )
