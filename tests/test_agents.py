"""Agents: structured output, calls of tools, reasoning and the Responses protocol, as OpenAI's own
client gets them. The model speaks Shakespeare; a grammar makes it call and answer in JSON."""

import functools
import json
import re
import shutil
from enum import Enum
from typing import Literal

import jsonschema
import openai
import pytest
from engine import ROOT
from pydantic import BaseModel, TypeAdapter
from test_server import model, running

from common.server.answers import Completion
from common.server.fields import Refused
from common.server.http import begin
from common.server.protocol import Served, ask
from common.server.responses import as_chat
from common.serving.session import Event, start_session
from common.text.reply import ANALYSIS

# As Qwen's, but shorter: prompts of one length need one program.
TEMPLATE = """{# <tool_call> {"name": , "arguments": } #}
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{%- for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}
{%- endfor %}{{ mood }}{{ '' if enable_thinking else '<think></think>' }}"""


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Answer(BaseModel):
    colour: Colour
    count: Literal[1, 2, 3]


SCHEMA = dict(
    type="object",
    properties=dict(
        city=dict(enum=["Rome", "Bern"]), days=dict(type="integer", minimum=0, maximum=9)
    ),
    required=["city", "days"],
    additionalProperties=False,
)
FUNCTION = dict(name="weather", description="tells it", parameters=SCHEMA)
TOOLS = [
    dict(type="function", function=FUNCTION),
    dict(type="function", function=dict(name="wait")),
]
USER = [dict(role="user", content="How is it?")]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    directory = tmp_path_factory.mktemp("agents") / "model"
    shutil.copytree(ROOT / "llama3" / "embedded", directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    with running("--ckpt", str(directory), "--slots", "4") as server:
        yield server.client()


@functools.cache
def served():
    tok = model().tokenizer._replace(chat_template=TEMPLATE)
    return Served(start_session(model()._replace(tokenizer=tok), 4, 512, logprobs=True), "m", 9)


def check_calls(calls):
    assert len({call.id for call in calls}) == len(calls) > 0
    for call in calls:
        known = SCHEMA if call.function.name == "weather" else dict(type="object")
        jsonschema.validate(json.loads(call.function.arguments), known)


def test_an_answer_is_parsed_whole_and_streamed(client):
    ask = dict(model="model", messages=USER, response_format=Answer)
    told = client.chat.completions.parse(**ask).choices[0].message
    assert isinstance(told.parsed, Answer)
    with client.chat.completions.stream(**ask) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Answer)
    form = dict(type="json_object")
    cut = client.chat.completions.create(**ask | dict(response_format=form), max_tokens=9)
    assert (
        cut.choices[0].message.content.startswith("{") and cut.choices[0].finish_reason == "length"
    )
    told = client.responses.parse(model="model", input="Which one?", text_format=Answer)
    assert isinstance(told.output_parsed, Answer)


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_structure_may_be_a_pattern_or_a_choice_or_a_grammar(client, kind):
    asks = client.chat.completions if kind == "chat" else client.completions
    given = dict(messages=USER) if kind == "chat" else dict(prompt="a")
    structures = [dict(regex="[0-9]{4}"), dict(choice=['é"\\', "b\n"]), dict(json='{"const": [1]}')]
    structures += [dict(grammar='start: "a"+ "b"', json=None)]
    said = []
    for structure in structures:
        more = dict(extra_body=dict(structured_outputs=structure))
        choice = asks.create(model="model", max_tokens=100, **given, **more).choices[0]
        said.append(choice.message.content if kind == "chat" else choice.text)
    assert len(said[0]) == 4 and said[0].isdigit() and said[1] in ('é"\\', "b\n")
    assert said[2] == "[1]" and said[3].strip("a") in ("b", "")


def test_a_tool_is_called_and_its_answer_comes_back(client):
    ask = functools.partial(client.chat.completions.create, model="model", tools=TOOLS, seed=1)
    told = ask(messages=USER, tool_choice="required", parallel_tool_calls=False).choices[0]
    check_calls(told.message.tool_calls)
    assert told.finish_reason == "tool_calls" and told.message.content is None
    results = [
        dict(role="tool", tool_call_id=call.id, content="sunny", name=call.function.name)
        for call in told.message.tool_calls
    ]
    messages = [*USER, told.message.model_dump(), *results]
    done = ask(messages=messages, max_tokens=5)
    assert done.choices[0].message.content and not done.choices[0].message.tool_calls
    before = ask(messages=USER, max_tokens=1).usage.prompt_tokens
    assert done.usage.prompt_tokens > before + 5
    less = ask(messages=USER, max_tokens=1, tool_choice="none").usage.prompt_tokens
    assert less < before  # the template is not told of them


def test_the_example_of_the_page_calls_a_tool(client):
    page = (ROOT / "docs" / "http.md").read_text()
    _, example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = dict(client=client)
    exec(example, names)
    calls = names["reply"].choices[0].message.tool_calls
    jsonschema.validate(json.loads(calls[0].function.arguments), names["schema"])


def test_a_call_is_streamed_name_first(client):
    named = dict(type="function", function=dict(name="weather"))
    ask = dict(model="model", messages=USER, tools=TOOLS, tool_choice=named, seed=1)
    with client.chat.completions.stream(**ask, parallel_tool_calls=False) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        told = stream.get_final_completion().choices[0]
    check_calls(told.message.tool_calls)
    assert len(told.message.tool_calls) == 1 and told.finish_reason == "tool_calls"
    parts = [x for chunk in chunks for x in chunk.choices[0].delta.tool_calls or []]
    assert parts[0].function.name == "weather" and parts[0].id and len(parts) > 4
    assert all(x.function.name is None and x.id is None for x in parts[1:])


def test_a_reply_may_be_a_call_or_have_the_structure(client):
    """As agents ask, whose last answer has a schema."""
    for seed in range(4):
        ask = dict(messages=USER, tools=TOOLS, response_format=dict(type="json_object"), seed=seed)
        told = (
            client.chat.completions.create(model="model", max_tokens=60, **ask).choices[0].message
        )
        assert told.tool_calls or told.content.startswith("{")


def test_penalties_and_biases_reach_the_engine(client):
    token = 77
    told = client.completions.create(
        model="model", prompt="a", max_tokens=3, logit_bias={token: 100}
    )
    assert told.choices[0].text == model().tokenizer.backend.decode([token] * 3)
    penalties = dict(presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.5)
    body = dict(messages=USER, logit_bias={"77": 1}, skip_special_tokens=False, **penalties)
    (request,) = ask(served(), "chat", body).requests
    assert {name: getattr(request, name) for name in penalties} == penalties
    assert [*request.logit_bias] == [(77, 1)] and request.keep_special
    for more, keeps in ((dict(), False), (dict(tools=TOOLS), True)):  # marks may be such tokens
        (request,) = ask(served(), "chat", dict(messages=USER, **more)).requests
        assert request.keep_special == keeps


BAD = [
    (dict(response_format=dict(type="xml")), "response_format must be text, json_object, or"),
    (
        dict(response_format=dict(type="json_schema", json_schema=dict(schema=dict(format="x")))),
        "Unknown format: x",
    ),
    (
        dict(response_format=dict(type="json_schema", json_schema=dict(schema={"not": {}}))),
        'Unimplemented keys: ["not"]',
    ),
    (dict(structured_outputs=dict(regex="(?=a)")), "look-around"),
    (
        dict(structured_outputs=dict(regex="a", choice=["b"])),
        "structured_outputs must be an object",
    ),
    (dict(structured_outputs=dict(json="{")), "structured_outputs: "),
    (dict(structured_outputs=dict(grammar="start: x")), 'unknown name: "x"'),
    (
        dict(structured_outputs=dict(regex="a"), response_format=dict(type="json_object")),
        "response_format does not go with structured_outputs",
    ),
    (dict(tool_choice="required"), "tool_choice asks for a call, and there are no tools"),
    (dict(tools=[dict(type="web_search")]), "tools must be a list of tools whose type is function"),
    (dict(tools=[dict(type="function")]), "tools must be a list of"),
    (
        dict(tools=[dict(type="function", function=dict(name="f", parameters=dict(type="array")))]),
        "the parameters of 'f' must be a schema of an object",
    ),
    (dict(structured_outputs=dict(json="[1, 2]")), "a schema is an object, not [1, 2]"),
    (dict(structured_outputs=dict(json=dict(name="x", schema={}))), "give the schema alone, with"),
    (dict(chat_template_kwargs=dict(merry=1)), "the chat template has no variable merry"),
    (dict(tools=TOOLS, tool_choice=dict(type="function", function=dict(name="x"))), "no tool 'x'"),
    (
        dict(tools=TOOLS, tool_choice="any"),
        "tool_choice must be none, auto, required, or an object",
    ),
    (dict(chat_template_kwargs=dict(messages=[])), "chat_template_kwargs may not have messages"),
    (dict(reasoning_effort="low"), "the chat template has no reasoning_effort"),
    (dict(chat_template_kwargs=[]), "chat_template_kwargs must be an object"),
    (dict(logit_bias={"a": 1}), "logit_bias must be an object of token ids"),
    (dict(logit_bias={"99999": 1}), "logit_bias must have ids in"),
    (dict(presence_penalty=3), "presence_penalty must be a number from -2 to 2"),
    (dict(repetition_penalty=0), "repetition_penalty must be a number from 0.01 to 100"),
]


@pytest.mark.parametrize("more, told", BAD, ids=lambda x: str(x)[:50])
def test_what_cannot_be_done_is_refused_with_its_sentence(more, told):
    with pytest.raises(Refused) as error:
        ask(served(), "chat", dict(messages=USER) | more)
    assert told in str(error.value) and error.value.status == 400


def test_variables_of_the_template_reach_it():
    def count(messages=USER, **more):
        (request,) = ask(served(), "chat", dict(messages=messages, **more)).requests
        return len(request.prompt)

    assert count(chat_template_kwargs=dict(mood="merry")) > count()
    assert count(chat_template_kwargs=dict(enable_thinking=True)) < count()
    assert count(reasoning_effort="none") == count()  # it switches thinking off
    for name in ("reasoning", "reasoning_content"):
        own = {"role": "assistant", "content": None, name: "I think."}
        assert count([*USER, own]) > count([*USER, own | {name: None, "content": ""}])


def events_of(*told):
    return [
        Event(0, 5, "stop" if i == len(told) - 1 else None, text, channel)
        for i, (text, channel) in enumerate(told)
    ]


SAID = events_of(
    *[("I ", ANALYSIS), ("see.", ANALYSIS), ("Let me look", "final"), (".\n", "final")],
    *[('<tool_call>\n{"name": "weather", "argu', "final"), ('ments": {"city"', "final")],
    *[(': "Rome"}}\n</tool_call>\n<tool_call>\n', "final")],
    *[('{"name": "wait", "arguments": {}}\n</tool_call>', "final")],
)


def test_only_the_last_item_of_a_response_can_be_incomplete():
    tools = [dict(type="function", name=tool["function"]["name"]) for tool in TOOLS]
    reply = begin(served(), "responses", dict(input="How is it?", tools=tools))
    text = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>\nAnd th'
    reply.add(0, Event(0, 5, "length", text))
    items = [(item["type"], item["status"]) for item in reply.whole()["output"]]
    assert items == [("function_call", "completed"), ("message", "incomplete")]


def test_reasoning_and_calls_are_told_apart():
    body = dict(messages=USER, tools=TOOLS)
    whole, stream = (
        Completion(served(), ask(served(), "chat", body | dict(stream=x))) for x in (False, True)
    )
    for event in SAID:
        whole.add(0, event)
    told = whole.whole()
    message, usage = told["choices"][0]["message"], told["usage"]["completion_tokens_details"]
    assert (message["reasoning_content"], usage["reasoning_tokens"]) == ("I see.", 2)
    assert message["content"].strip() == "Let me look."
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]
    assert calls == [("weather", '{"city": "Rome"}'), ("wait", "{}")]
    lines = "".join(stream.add(0, event) for event in SAID).split("\n\n")[:-1]
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I see."
    parts = [part for delta in deltas for part in delta.get("tool_calls", [])]
    assert [part["function"].get("name") for part in parts if "id" in part] == ["weather", "wait"]
    ends = "".join(part["function"]["arguments"] for part in parts if part["index"] == 0)
    assert ends == '{"city": "Rome"}'


# ---- responses

FLAT = [dict(type="function", strict=False, **FUNCTION), dict(type="function", name="wait")]


def test_the_events_of_a_response_come_in_order():
    body = dict(input="How is it?", tools=FLAT, stream=True)
    reply = begin(served(), "responses", body)
    text = reply.first + "".join(reply.add(0, event) for event in SAID) + reply.last()
    events = [json.loads(part.split("data: ")[1]) for part in text.split("\n\n")[:-1]]
    read = TypeAdapter(openai.types.responses.ResponseStreamEvent).validate_python
    assert all(type(read(event)).__name__ for event in events)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    kinds = [event["type"].removeprefix("response.") for event in events]
    item = ["output_item.added", "content_part.added"]
    ends = ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    once = [kind for i, kind in enumerate(kinds) if kinds[i - 1] != kind]
    assert once == [
        *("created", "in_progress", *item, "reasoning_text.delta", "reasoning_text.done", *ends),
        *(*item, "output_text.delta", "output_text.done", *ends),
        *(*call, "output_item.done", *call, "output_item.done", "completed"),
    ]
    reasoning, message, first, second = events[-1]["response"]["output"]
    assert reasoning["content"][0]["text"] == "I see."
    assert message["content"][0]["text"].strip() == "Let me look."
    assert (first["name"], json.loads(first["arguments"])) == ("weather", dict(city="Rome"))
    assert second["name"] == "wait" and first["call_id"] != second["call_id"]
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    # What came is given back as it is, and is one message of a conversation.
    again = as_chat(dict(input=[*USER, reasoning, message, first, second]))["messages"]
    assert [m["role"] for m in again] == ["user", "assistant"] and len(again[1]["tool_calls"]) == 2
    assert again[1]["reasoning_content"] == "I see." and again[1]["content"]


def test_a_response_calls_a_tool_and_goes_on(client):
    ask = functools.partial(client.responses.create, model="model", tools=FLAT, store=False)
    told = ask(input="How is it?", tool_choice="required", parallel_tool_calls=False)
    calls = [item for item in told.output if item.type == "function_call"]
    assert calls and told.status == "completed" and told.usage.output_tokens > 10
    results = [dict(type="function_call_output", call_id=x.call_id, output="sunny") for x in calls]
    given = [dict(role="user", content="How is it?"), *told.output, *results]
    include = dict(include=["reasoning.encrypted_content"], reasoning=dict(effort="none"))
    done = ask(input=given, instructions="Be brief.", max_output_tokens=5, **include)
    assert done.output_text and done.status == "incomplete"
    assert done.incomplete_details.reason == "max_output_tokens"
    assert done.usage.input_tokens > told.usage.input_tokens
    with client.responses.stream(model="model", input="Hm?", max_output_tokens=5) as stream:
        *events, last = stream
    said = "".join(x.delta for x in events if x.type == "response.output_text.delta")
    assert said == last.response.output_text and last.type == "response.incomplete"


@pytest.mark.parametrize(
    "more, told",
    [
        (dict(previous_response_id="resp_1"), "previous_response_id is not supported"),
        (dict(store=True), "store is not supported"),
        (dict(background=True), "background is not supported"),
        (dict(conversation="conv_1"), "conversation is not supported"),
        (dict(input=[dict(type="item_reference", id="x")]), "items of type item_reference"),
        (dict(input=[dict(role="user", content=[dict(type="input_image")])]), "must be text"),
        (dict(tools=[dict(name="wait")]), "tools must be a list of tools with a type"),
        (
            dict(tools=[dict(type="web_search")], tool_choice=dict(type="web_search")),
            "tool_choice must be",
        ),
        (dict(include=["file_search_call.results"]), "include must be one of [[], "),
        (dict(text=dict(format=dict(type="x"))), "response_format must be"),
        (dict(input=[]), "input must be a text or a list of items"),
        (dict(text=dict(formt=dict(type="json_object"))), "text must be an object with format"),
        (dict(reasoning=dict(foo=1)), "reasoning must be an object with effort"),
    ],
    ids=str,
)
def test_what_a_response_cannot_have_is_refused_by_name(more, told):
    with pytest.raises(Refused) as error:
        begin(served(), "responses", dict(input="a") | more)
    assert told in str(error.value)


def test_only_functions_are_offered_to_the_model():
    tools = [dict(type="web_search"), *FLAT, dict(type="namespace", name="x", tools=FLAT)]
    reply = begin(served(), "responses", dict(input="a", tools=tools))
    assert reply.whole()["tools"] == FLAT
    assert [tool["function"]["name"] for tool in reply.asked.given["tools"]] == ["weather", "wait"]


def test_an_error_of_a_response_reaches_its_client(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        client.responses.create(model="model", input="word " * 3000)
