"""The server: what the protocol's own clients get from it, what it refuses, and what happens when
things go wrong. Most tests start real processes."""

import asyncio
import contextlib
import functools
import http.client
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import openai
import pytest
from engine import ENVIRONMENT, ROOT

from common.command import cli
from common.server.answers import Choice, scores_of_text, spelled
from common.server.fields import FIELDS, UNSUPPORTED, Refused
from common.server.http import Desk, Guard, body_of, names_of
from common.server.protocol import Served, ask
from common.serving.load import load, open_model
from common.serving.serve import complete, serve, submit
from common.serving.session import Request, Score, start_session
from common.sharding import make_mesh
from common.text.chat import encode_chat
from common.text.tokenizer import decode, encode, load_tokenizer
from llama3 import model as llama3
from tools.browser import browser, chromium

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PROMPT, USER = "ACT I.\n\n", [dict(role="user", content="a")]
# What `code` of a server may do.
PATCH = "from common.server import http\nreal = http.step"
SLOW = f"""{PATCH}
import time
http.step = lambda session: (time.sleep(0.02), real(session))[1]"""


class Server:
    """A server in a process of its own. `code` runs before it starts."""

    def __init__(self, *options, code=""):
        argv = ["--serve", "127.0.0.1:0", "--dtype", "float32", "--max-len", "512", *options]
        start = "from common.command.cli import main\nfrom llama3 import model\n"
        code = f"{start}{code}\nmain(model, {argv!r})"
        options = dict(cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        self.process = subprocess.Popen([sys.executable, "-c", code], **options)
        told = self.process.stderr.readline()
        while "serving" not in told:
            assert told, "the server did not start"
            told = self.process.stderr.readline()
        self.port = int(re.search(r"http://127.0.0.1:(\d+)", told)[1])

    def call(self, method, path, body=None, **headers):
        """Returns the status, the headers, and the body."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, 120)) as http_:
            data = body if isinstance(body, bytes | None) else json.dumps(body)
            http_.request(method, path, data, {k.replace("_", "-"): x for k, x in headers.items()})
            answer = http_.getresponse()
            return answer.status, answer.headers, answer.read().decode()

    def post(self, path="/v1/completions", **body):
        status, _, answer = self.call("POST", path, {"temperature": 0, **body})
        return status, json.loads(answer)

    def metric(self, name):
        return float(re.search(rf"^folio_{name} (.*)$", self.call("GET", "/metrics")[2], re.M)[1])

    def is_idle(self):
        return not self.metric("running_requests") + self.metric("open_requests")

    def client(self, kind=openai.OpenAI, key="any"):
        return kind(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0)

    def end(self, number=signal.SIGTERM):
        """Returns the exit code, and what is on stderr."""
        self.process.send_signal(number)
        return self.process.wait(60), self.process.stderr.read()


@contextlib.contextmanager
def running(*options, **given):
    server = Server(*options, **given)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        server.process.stderr.close()


def within(seconds, condition):
    """Whether a condition holds before long."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return holds


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """The embedded model, with a chat template."""
    directory = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(ROOT / "llama3" / "embedded", directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="module")
def server(chat_model):
    with running("--ckpt", str(chat_model), "--slots", "4") as server:
        yield server


@functools.cache
def model():
    return load(llama3, dtype="float32")


# ---- clients


def test_a_text_is_that_of_the_engine_streamed_or_whole(server):
    (want,) = complete(model(), [PROMPT], 40)
    client = server.client()
    told = client.models.list().data[0]
    assert told.max_model_len == 512
    ask = functools.partial(client.completions.create, model=told.id, max_tokens=40, temperature=0)
    assert ask(prompt=PROMPT).choices[0].text == want
    ids = encode(model().tokenizer, PROMPT)
    assert [c.text for c in ask(prompt=[ids, ids]).choices] == [want, want]
    pieces = [chunk.choices[0] for chunk in ask(prompt=PROMPT, stream=True)]
    assert "".join(piece.text for piece in pieces) == want
    assert [piece.finish_reason for piece in pieces[-2:]] == [None, "length"]
    echoed = ask(prompt=[PROMPT], echo=True).choices[0].text
    assert echoed == PROMPT + want
    assert ask(prompt=PROMPT, stop=[want[10:14]]).choices[0].text == want[: want.index(want[10:14])]


def test_a_conversation_goes_through_the_template(server, chat_model):
    client, message = server.client(), dict(role="user", content="Who is there?")
    ask = functools.partial(
        client.chat.completions.create,
        **dict(model=client.models.list().data[0].id, temperature=0, max_completion_tokens=24),
    )
    (want,) = complete(model(), [encode_chat(load_tokenizer(chat_model), [message])], 24)
    whole = ask(messages=[message])
    assert whole.choices[0].message.content == want
    assert whole.usage.completion_tokens == 24
    usage = dict(include_usage=True, include_obfuscation=False)
    options = dict(stream=True, stream_options=usage)
    *chunks, last = ask(messages=[message], **options)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == want
    roles = [chunk.choices[0].delta.role for chunk in chunks]
    assert roles == ["assistant", *[None] * (len(chunks) - 1)]
    with client.chat.completions.stream(
        model=whole.model, messages=[message], temperature=0, max_completion_tokens=24
    ) as stream:
        assert list(stream)
        told = stream.current_completion_snapshot.choices[0].message
        assert (told.role, told.content) == ("assistant", want)
    own = dict(role="assistant", content=want, reasoning_content="Hm.", tool_calls=[])
    assert ask(messages=[message, own, message]).usage.prompt_tokens > whole.usage.prompt_tokens
    assert client.models.retrieve(whole.model).id == whole.model
    assert last.usage.total_tokens == whole.usage.total_tokens and not last.choices
    typed = dict(role="user", content="<|end_of_text|>")  # a control token, as text
    count = len(encode_chat(load_tokenizer(chat_model), [typed]))
    assert ask(messages=[typed]).usage.prompt_tokens == count > len("<|end_of_text|>") // 2
    parts = [dict(type="text", text="Who is "), dict(type="text", text="there?")]
    assert ask(messages=[dict(role="user", content=parts)]).choices[0].message.content == want


@pytest.mark.parametrize(
    "given, asked, settings",
    [
        ({}, {}, (1.0, 0, 1.0, 0.0)),
        (dict(top_p=0.9), {}, (1.0, 0, 0.9, 0.0)),
        (dict(temperature=0.6, top_k=20, min_p=0.1), {}, (0.6, 20, 1.0, 0.1)),
        (dict(temperature=0.6, top_k=20), dict(temperature=None), (0.6, 20, 1.0, 0.0)),
        (dict(temperature=0.6, top_k=20), dict(temperature=0, top_p=0.5), (0.0, 20, 0.5, 0.0)),
        (dict(temperature=0.6, top_k=20), dict(top_k=0, min_p=0.2), (0.6, 0, 1.0, 0.2)),
        (dict(temperature=0.6, do_sample=False), {}, (0.0, 0, 1.0, 0.0)),
    ],
    ids=str,
)
def test_what_a_request_does_not_say_is_what_the_checkpoint_recommends(
    chat_model, given, asked, settings, tmp_path
):
    shutil.copytree(chat_model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    model = open_model(llama3, str(tmp_path), mesh=make_mesh())
    served = Served(SimpleNamespace(model=model, capacity=64, logprobs=False), "model", 8)
    for kind, what in ("text", dict(prompt="a")), ("chat", dict(messages=USER)):
        (request,) = ask(served, kind, what | asked).requests
        assert (request.temperature, request.top_k, request.top_p, request.min_p) == settings


def test_seeds_and_n(server):
    ask = functools.partial(server.post, prompt=[PROMPT, "Enter "], temperature=1, n=3, seed=7)
    texts = [[choice["text"] for choice in ask()[1]["choices"]] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) == len(texts[0]) == 6
    alone = server.post(prompt="Enter ", temperature=1, seed=8)[1]["choices"][0]["text"]
    assert alone == texts[0][4]


@pytest.mark.full
def test_log_probabilities_are_those_of_the_engine(server):
    ids = encode(model().tokenizer, PROMPT + "Enter the")
    session = start_session(model(), 4, 512, logprobs=True)
    events = list(serve(session, [Request(ids, 5, logprobs=2, echo=True)]))
    want = [*events[0].echo, *(event.score for event in events)]
    _, answer = server.post(prompt=ids, max_tokens=5, logprobs=2, echo=True)
    got = answer["choices"][0]["logprobs"]
    assert got["token_logprobs"][0] is None and got["top_logprobs"][0] is None
    assert got["token_logprobs"][1:] == pytest.approx([score.logprob for score in want], abs=1e-4)
    assert [max(top.values()) for top in got["top_logprobs"][1:]] == pytest.approx(
        [score.likeliest[0][1] for score in want], abs=1e-4
    )
    assert "".join(got["tokens"][1:]) == answer["choices"][0]["text"]  # without <|begin_of_text|>
    at = [len("".join(got["tokens"][1:i])) for i in range(1, len(ids) + 5)]
    assert got["text_offset"] == [0, *at]
    client = server.client()
    told = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[dict(role="user", content="Who?")],
        **dict(max_tokens=3, temperature=0, logprobs=True, top_logprobs=4),
    )
    content = told.choices[0].logprobs.content
    assert "".join(x.token for x in content) == told.choices[0].message.content
    assert all(x.logprob == x.top_logprobs[0].logprob for x in content)
    _, only = server.post(prompt=ids, max_tokens=0, logprobs=0, echo=True)
    assert len(only["choices"][0]["logprobs"]["tokens"]) == len(ids)
    assert only["usage"]["completion_tokens"] == 0


def test_an_offset_is_that_of_a_token_in_the_text():
    """Of a character of several tokens, the offset is that of the character and of what follows."""
    tok = model().tokenizer
    ids = encode(tok, "é “ok”")
    scored = [(i, Score(-1.0, [])) for i in ids]
    told = scores_of_text(Choice(Request(ids, 1), scores=scored), tok)
    assert told["tokens"][0] == "<|begin_of_text|>" and "bytes:" in told["tokens"][1]
    text, shown = decode(tok, ids), 0
    for name, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert 0 <= offset <= len(text)
        if name in ("ok", "o", "k", " "):
            assert text[offset:].startswith(name)
            shown += len(name)
    assert shown >= 2


def test_what_was_cached_is_found_with_the_same_salt_only():
    """A second user does not learn what a first one asked."""
    session = start_session(model(), 4, 512, reuse_multiple=64, keep=8)
    prompt, cached = [1 + i % 90 for i in range(200)], []
    for salt in ("", "a", "", "a", "b"):
        *_, last = serve(session, [Request(prompt, 2, cache_salt=salt)])
        cached.append(last.counts.cached)
    assert cached == [0, 0, 192, 192, 0]


@pytest.mark.full
def test_what_was_cached_is_told(chat_model):
    code = "from common.command import cli\ncli.PROMPT_CHUNK = 64"
    with running("--ckpt", str(chat_model), "--draft", "lookup", code=code) as server:
        ids = [1 + i % 90 for i in range(200)]
        first = server.post(prompt=ids, max_tokens=20)[1]["usage"]
        again = server.post(prompt=ids, max_tokens=100, temperature=0)[1]["usage"]
        several = server.post(prompt=ids, max_tokens=2, n=3)[1]["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == 192
    assert sum(again["completion_tokens_details"].values()) > 0
    assert several["prompt_tokens"] == 200
    assert several["prompt_tokens_details"]["cached_tokens"] == 192  # and not three times


def test_a_client_that_cancels_frees_its_slot(server):
    async def leave():
        client = server.client(openai.AsyncOpenAI)
        name = (await client.models.list()).data[0].id
        ask = functools.partial(client.completions.create, model=name, max_tokens=500)
        stream = await ask(prompt=PROMPT, stream=True, temperature=0)
        async for _ in stream:
            break
        await stream.close()
        whole = asyncio.ensure_future(ask(prompt=PROMPT, n=4))
        await asyncio.sleep(0.1)
        whole.cancel()
        await client.close()

    asyncio.run(leave())
    before = server.metric("decode_tokens_total")
    assert within(10, server.is_idle)
    assert server.metric("decode_tokens_total") - before < 1000


def test_many_clients_get_the_texts_that_they_get_alone(server, request):
    """Some of them go away."""
    count = 250 if request.config.getoption("--all") else 100
    tok, rng = model().tokenizer, random.Random(5)
    events = serve(start_session(model(), 4, 512), [Request(encode(tok, PROMPT), 30)])
    tokens = [event.token for event in events]

    def client(i):
        body = dict(prompt=PROMPT, max_tokens=1 + i % 30, temperature=0, stream=i % 3 == 0)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, 300)) as http_:
            http_.request("POST", "/v1/completions", json.dumps(body))
            if i % 7 == 0:
                return time.sleep(rng.random() / 10)
            answer = http_.getresponse().read().decode()
        if i % 3:
            text = json.loads(answer)["choices"][0]["text"]
        else:
            lines = [x[6:] for x in answer.split("\n\n") if x.startswith("data: {")]
            text = "".join(json.loads(x)["choices"][0]["text"] for x in lines)
        assert text == decode(tok, tokens[: 1 + i % 30])

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(client, range(count)))
    assert within(10, server.is_idle)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_gets_the_text_whole_and_as_it_comes(server):
    (want,) = complete(model(), [PROMPT], 9)
    for stream in (False, True):
        body = dict(prompt=PROMPT, max_tokens=9, temperature=0, stream=stream)
        address = f"http://localhost:{server.port}/v1/completions"
        command = ["curl", "-sN", address, "-d", json.dumps(body)]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        lines = [x.removeprefix("data: ") for x in told.splitlines() if x]
        assert (lines[-1] == "[DONE]") == stream
        pieces = [json.loads(x)["choices"][0]["text"] for x in lines[: -1 if stream else None]]
        assert "".join(pieces) == want


@pytest.mark.full  # the harness takes ten seconds to import
def test_the_evaluation_harness_gets_the_figures_of_transformers(server, tmp_path):
    """tests/make_eval_fixture.py wrote them."""
    address = f"http://127.0.0.1:{server.port}/v1/completions"
    known = f"model=model,base_url={address},tokenizer_backend=huggingface,max_length=512"
    options = ["--model_args", f"{known},tokenizer={ROOT / 'llama3' / 'embedded'}"]
    options += ["--tasks", "lines,continued", "--include_path", ".", "--log_samples"]
    options += ["--output_path", str(tmp_path), "--batch_size", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", *options],
        **dict(cwd=ROOT / "tests" / "fixtures" / "eval", capture_output=True, text=True),
        env={**ENVIRONMENT, "HF_HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("**/samples_lines*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == 8
    for sample in samples:
        got = [float(answer[0][0]) for answer in sample["resps"]]
        assert got == pytest.approx(sample["doc"]["loglikelihoods"], abs=1e-4)
    (file,) = tmp_path.glob("**/samples_continued*.jsonl")
    for line in file.read_text().splitlines():
        sample = json.loads(line)
        assert sample["resps"] == [[sample["doc"]["continuation"]]]


# ---- the page


@pytest.fixture(scope="module")
def page(server):
    if chromium() is None:
        pytest.skip("Chromium is not installed")
    with browser() as page:
        yield page


def open_page(page, server, **settings):
    page.look(1000, 700)
    page.open(f"http://127.0.0.1:{server.port}/")
    for id, value in dict(temperature=0, **settings).items():
        page.value(f"document.getElementById('{id}').value = {json.dumps(value)}")


def say(page, text):
    page.type(text)
    page.press("Enter")


LAST = "[...document.querySelectorAll('article.assistant')].at(-1)"


def test_the_page_holds_a_conversation(server, page, chat_model):
    open_page(page, server, max_tokens=24, system="Be brief.")
    tok = load_tokenizer(chat_model)
    messages = [dict(role="system", content="Be brief.")]
    for turn, text in enumerate(["Who is there?", "Who else?"]):
        say(page, text)
        page.wait(f"{LAST}?.querySelectorAll('small')[1].textContent.includes('tokens/s')")
        messages.append(dict(role="user", content=text))
        (want,) = complete(model(), [encode_chat(tok, messages)], 24)
        assert page.value(f"{LAST}.querySelector('span').textContent") == want
        assert page.value("document.querySelectorAll('article').length") == 2 * turn + 2
        messages.append(dict(role="assistant", content=want))
    count = len(encode_chat(tok, messages[:-1]))
    assert f" of {count} prompt tokens were cached" in page.value(f"{LAST}.textContent")
    assert page.value("document.title") == page.value(
        "document.getElementById('model').textContent"
    )
    assert page.value("document.title") in str(chat_model)
    open_page(page, server)  # a reload keeps the conversation
    said = "[...document.querySelectorAll('article')].map(x => x.firstChild.textContent)"
    assert page.value(said)[:3:2] == [messages[1]["content"], messages[3]["content"]]
    assert {address.split("/")[2] for address in page.fetched} == {f"127.0.0.1:{server.port}"}
    page.value("document.getElementById('clear').click()")
    assert page.value("document.querySelectorAll('article').length") == 0


@pytest.mark.full
def test_a_reply_on_the_page_has_code_and_bold_words_and_no_markup_of_its_own(server, page):
    open_page(page, server)
    text = "Run `x <b>`:\n```sh\nls **x**\n```\nIt is **safe**.\n```py\nopen"
    made = page.value(f"show('assistant', written({json.dumps(text)})).innerHTML")
    assert made == (
        "Run <code>x &lt;b&gt;</code>:\n<pre><code>ls **x**\n</code></pre>It is <b>safe</b>.\n"
        "<pre><code>open</code></pre>"
    )


@pytest.mark.full
def test_a_reply_on_the_page_can_be_stopped_and_a_mistake_is_shown(chat_model, page):
    with running("--ckpt", str(chat_model), code=SLOW) as server:
        open_page(page, server, max_tokens=480)
        for stop in ("", "document.getElementById('stop').click()"):
            say(page, "Go on.")
            page.wait(f"{LAST}?.querySelector('span').textContent.length > 20")
            page.value(stop) if stop else page.press("Escape")
            page.wait("document.getElementById('stop').disabled")
            assert "tokens/s" not in page.value(f"{LAST}.textContent")
            assert within(5, server.is_idle)
            page.value("document.getElementById('text').focus()")
        assert page.value("document.querySelectorAll('article').length") == 4
        page.value("document.getElementById('max_tokens').value = 10000000000")
        say(page, "Again?")
        page.wait(f"{LAST}.classList.contains('error')")
        assert "max_tokens must be an integer" in page.value(f"{LAST}.textContent")


@pytest.mark.full
def test_the_page_is_for_keyboards_telephones_and_dark_rooms(server, page):
    open_page(page, server)
    reached = []
    for _ in range(12):
        page.press("Tab")
        reached.append(page.value("document.activeElement.id || document.activeElement.tagName"))
    assert {"send", "clear", "SUMMARY", "text"} <= set(reached)
    page.value("document.querySelector('details').open = true")
    for width in (320, 400, 1000):
        page.look(width, 700)
        assert page.value("document.documentElement.scrollWidth") <= width
        names = "[...document.querySelectorAll('input, textarea, button')]"
        inside = f"x => x.getBoundingClientRect().right <= {width}"
        assert page.value(f"{names}.every({inside})")
    brightness = "(color => color.match(/\\d+/g).slice(0, 3).reduce((a, x) => a + Number(x), 0))"
    for scheme, is_dark in (("light", False), ("dark", True)):
        page.look(1000, 700, scheme)
        style = "getComputedStyle(document.getElementById('text'))"
        ink, paper = (
            page.value(f"{brightness}({style}.{x})") for x in ("color", "backgroundColor")
        )
        assert (ink > paper) == is_dark and abs(ink - paper) > 400


# ---- what is refused


PATHS = dict(chat="/v1/chat/completions", text="/v1/completions", responses="/v1/responses")
GIVEN = dict(chat=dict(messages=USER), text=dict(prompt=PROMPT), responses=dict(input="a"))
LONG = "x" * 10_000_000
BAD = [
    (dict(prompt="a", temperature="hot"), "temperature must be a number from 0 to 2"),
    (dict(prompt="a", temperature=2.5), "temperature must be a number from 0 to 2"),
    (dict(prompt="a", top_p=0), "top_p"),
    (dict(prompt="a", n=0), "n must be an integer from 1 to 32"),
    (dict(prompt="a", max_tokens=0), "max_tokens must be at least 1, but for echo"),
    (dict(prompt="a", max_tokens=True), "max_tokens must be an integer"),
    (dict(prompt="a", logprobs=21), "logprobs must be an integer from 0 to 20"),
    (dict(prompt="a", stop=[1]), "stop must be a text of at most 1000 characters, or a list of"),
    (dict(prompt="a", stop="x" * 1001), "stop must be a text of at most 1000 characters"),
    (dict(prompt="a", stop=["x"] * 17), "or a list of at most 16"),
    (dict(prompt="a", stop=[], max_tokens=0), "max_tokens must be at least 1"),
    (dict(prompt="a", colour="red"), "there is no field 'colour'"),
    (dict(prompt="a", stream_options=dict(include_obfuscation=True)), "include_usage alone"),
    (
        dict(prompt="a", stream_options=dict(x=1)),
        "stream_options must be an object with",
    ),
    (dict(prompt="a", stream_options=dict(include_usage=1)), "include_usage alone, true or false"),
    (dict(prompt=["a"] * 100, n=3), "a request may ask for 260 texts at most"),
    (dict(prompt=[]), "prompt must be a text, a list of texts, a list of ids, or a list of lists"),
    (dict(prompt=[10**9]), "the prompt has an id that is not in"),
    (dict(prompt=[-1]), "the prompt has an id that is not in"),
    (dict(prompt="word " * 3000), "but this model's maximum context length is 512 tokens"),
    (dict(prompt=LONG), "has 10000000 characters, but this model's maximum context length is 512"),
    (dict(max_tokens=1), "prompt is missing"),
    ([1], "the body is not a JSON object"),
    (b"{", "the body is not JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "NaN is not a number of JSON"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature must be a number from 0 to 2"),
    (b'{"prompt": "\\ud83d"}', "a text has \\ud83d without the character's other half"),
    (b"[" * 100_000, "the body is not JSON"),
    (b"\xff", "the body is not JSON"),
]


@pytest.mark.parametrize("body, told", BAD, ids=lambda x: str(x)[:40])
def test_a_wrong_request_gets_one_sentence(server, body, told):
    status, _, answer = server.call("POST", "/v1/completions", body)
    error = json.loads(answer)["error"]
    assert status == 400 and isinstance(error["code"], str)
    assert (error["code"] == "context_length_exceeded") == ("context length" in told)
    assert told in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "messages, told",
    [
        ([dict(role="user", content=[dict(type="image_url", image_url={})])], "must be text"),
        ([dict(role="function", content="4")], "a role must be"),
        ([dict(role="user", content="", tool_calls=[{}])], "tool_calls is not supported"),
        ([dict(role="assistant", tool_calls=[{}])], "tool_calls must be a list of calls with"),
        ([dict(role="user")], "must be text"),
        ([], "messages must be a list of messages"),
        ([dict(role="user", content="")] * 5000, "has 5000 messages, but this model's maximum"),
    ],
    ids=lambda x: str(x)[:60].encode("ascii", "replace").decode(),
)
def test_a_wrong_message_gets_one_sentence(server, messages, told):
    status, answer = server.post("/v1/chat/completions", messages=messages)
    assert status == 400 and told in answer["error"]["message"]


@pytest.mark.parametrize(
    "kind, name", [(k, n) for k in FIELDS for n in sorted({*UNSUPPORTED} - {*FIELDS[k]})]
)
def test_what_is_not_supported_is_refused_by_name_unless_it_asks_for_nothing(server, kind, name):
    path, most = PATHS[kind], "max_output_tokens" if kind == "responses" else "max_tokens"
    given = GIVEN[kind] | {most: 1}
    status, answer = server.post(path, **given, **{name: ["x"]})
    assert status == 400 and answer["error"]["message"] == f"{name} is not supported"
    assert answer["error"]["param"] == name
    for value in [None, *UNSUPPORTED[name]]:
        assert server.post(path, **given, **{name: value})[0] == 200


def test_values_that_change_nothing_are_accepted(server):
    """Also in the messages of a client that sends the model's own back."""
    nothing = dict(top_k=-1, seed=-1, metadata=dict(a="b"), service_tier="default")
    more = dict(prompt_cache_retention="24h", prompt_cache_options=dict(mode="implicit"))
    own = dict(role="assistant", content="Hm.", type="message", provider_specific_fields={})
    messages = [dict(role="user", content="a", type="text"), own, dict(role="user", content="b")]
    path = "/v1/chat/completions"
    plain = [dict(role=m["role"], content=m["content"]) for m in messages]
    ask = functools.partial(server.post, path, max_completion_tokens=5)
    status, answer = ask(messages=messages, **nothing, **more)
    want = ask(messages=plain)[1]
    assert status == 200 and answer["usage"]["prompt_tokens"] == want["usage"]["prompt_tokens"]
    assert answer["choices"] == want["choices"]
    seeded = [server.post(prompt="a", seed=-1, temperature=1, max_tokens=20) for _ in range(2)]
    assert len({answer["choices"][0]["text"] for _, answer in seeded}) == 2  # -1 is not a seed


@pytest.mark.parametrize("given, tokens", [({}, 16), (dict(max_tokens=-1), 511)], ids=str)
def test_a_text_has_16_tokens_and_all_that_fit_if_that_is_asked(given, tokens):
    served = Served(start_session(model(), 4, 512), "model", 9)
    (request,) = ask(served, "text", dict(prompt=[1, 2], **given)).requests
    assert request.max_new_tokens == tokens


def test_two_different_limits_are_refused_and_a_name_reaches_the_template():
    template = "{% for m in messages %}{{ m.name or m.role }}: {{ m.content }}\n{% endfor %}"
    tok = model().tokenizer._replace(chat_template=template)
    served = Served(start_session(model()._replace(tokenizer=tok), 4, 512), "model", 9)
    body = dict(messages=[dict(role="user", name="bob", content="Hm.")], max_tokens=2)
    (request,) = ask(served, "chat", body | dict(max_completion_tokens=2)).requests
    assert decode(tok, request.prompt) == "bob: Hm.\n"
    with pytest.raises(Refused, match="max_tokens and max_completion_tokens differ"):
        ask(served, "chat", body | dict(max_completion_tokens=5))


def test_a_stop_text_that_is_a_special_token_is_a_stop_id():
    served = Served(start_session(model(), 4, 512), "model", 9)
    (request,) = ask(served, "text", dict(prompt="a", stop=["<|begin_of_text|>", "x"])).requests
    submit(served.session, request)
    ((_, own),) = served.session.arrived
    assert {*own.stop_ids} == model().tokenizer.stop_ids | {model().tokenizer.bos_id}


def test_the_page_says_what_is_understood():
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", (ROOT / "docs" / "http.md").read_text(), re.M)
    said = {what: set(re.findall("`(.*?)`", names)) for names, what in rows}
    assert said["on both paths"] | said["for conversations"] == FIELDS["chat"].keys()
    assert said["on both paths"] | said["for texts"] == FIELDS["text"].keys()
    assert said["not supported"] == UNSUPPORTED.keys() - FIELDS["chat"].keys()
    assert said["for responses"] == FIELDS["responses"].keys() - FIELDS["chat"].keys()


def test_unknown_models_paths_and_methods_get_the_error_object(server):
    status, answer = server.post(prompt="a", model="gpt-4o")
    assert status == 404 and answer["error"]["message"].startswith("the model here is ")
    wrong = ("GET", "/v2", 404), ("GET", "/v1/models/gpt-4o", 404), ("GET", "/v1/completions", 405)
    for method, path, status in wrong:
        got, headers, answer = server.call(method, path)
        assert got == status and isinstance(json.loads(answer)["error"]["code"], str)
        assert status != 405 or headers["allow"] == "POST"


def test_random_requests_never_break_it(server, request):
    rng = random.Random(11)
    values = [None, True, -1, 0, 1, 3, 0.5, 1e308, 2**70, "", "a", "\u0000", [], [1], ["a"], {}]
    values += [[[2]], {"a": None}, [{}], [dict(role="user", content="hi")], "é" * 50]
    tool = dict(type="function", function=dict(name="f", parameters={}), name="g")
    values += [[tool], "required", dict(type="json_object"), dict(regex="[a-c]+"), {"7": -100}]
    values += [dict(choice=["a", ""]), dict(json={}), dict(effort="none"), dict(format=tool)]
    values += [[dict(type="function_call", name="f", arguments="{}", call_id="x")]]
    for _ in range(2000 if request.config.getoption("--all") else 100):
        kind = rng.choice([*FIELDS])
        path = PATHS[kind]
        names = rng.sample([*FIELDS[kind], *UNSUPPORTED, "x"], rng.randrange(5))
        most = "max_output_tokens" if kind == "responses" else "max_tokens"
        body = {name: rng.choice(values) for name in names} | {most: rng.choice([1, 2, 0])}
        body |= GIVEN[kind] if rng.random() < 0.8 else {}
        data = json.dumps(body).encode()
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))] + bytes([rng.randrange(256)])
        status, _, answer = server.call("POST", path, data)
        assert status in (200, 400, 404), (body, answer)
        assert "the server has made a mistake" not in answer, body
    assert within(10, server.is_idle)


# ---- safe by default


def test_only_its_own_names_reach_it_while_it_is_local(server):
    own = f"localhost:{server.port}"
    for host in (own, f"127.0.0.1:{server.port}", "localhost", "localhost:1"):  # as by a tunnel
        assert server.call("GET", "/health", Host=host)[0] == 200
    for host in ("evil.example", f"evil.example:{server.port}", "localhost.evil.example:1"):
        assert server.call("GET", "/", Host=host)[0] == 403
    data = json.dumps(dict(prompt=PROMPT, max_tokens=1)).encode()
    for origin, wanted in ((f"http://{own}", 200), ("http://evil.example", 403), ("null", 403)):
        got = server.call("POST", "/v1/completions", data, Host=own, Origin=origin)
        assert got[0] == wanted and "access-control-allow-origin" not in got[1]


def test_who_has_no_key_is_refused(chat_model):
    origin = "http://page.example"
    options = "--ckpt", str(chat_model), "--api-key", "secret", "--allow-origin", origin
    with running(*options) as server:
        for given in ({}, dict(Authorization="Bearer secre"), dict(Authorization="secret")):
            status, _, answer = server.call("GET", "/v1/models", **given)
            assert status == 401 and "API key" in json.loads(answer)["error"]["message"]
        assert server.client(key="secret").models.list().data
        for given in ("bearer secret", "BEARER  secret"):
            assert server.call("GET", "/v1/models", Authorization=given)[0] == 200
        assert server.call("GET", "/v1/models", Authorization="Basic secret")[0] == 401
        asked = dict(Access_Control_Request_Method="POST", Origin=origin)
        asked |= dict(Access_Control_Request_Headers="authorization,content-type")
        status, headers, _ = server.call("OPTIONS", "/v1/chat/completions", **asked)
        assert status == 200 and headers["access-control-allow-origin"] == origin
        private = dict(asked, Access_Control_Request_Private_Network="true")
        status, headers, _ = server.call("OPTIONS", "/v1/chat/completions", **private)
        assert status == 200 and headers["access-control-allow-private-network"] == "true"
        asked["Origin"] = "http://evil.example"
        assert server.call("OPTIONS", "/v1/chat/completions", **asked)[0] == 400
        assert server.call("GET", "/")[0] == 200
        server.client(key="secret").completions.create(model="model", prompt="A secret")
        code, told = server.end()
    assert code == 0 and "secret" not in told


def test_a_key_may_have_any_characters():
    guard = Guard(None, set(), [], "schlüssel")
    for key, is_in in (("schlüssel", True), ("schlussel", False)):
        given = [(b"authorization", f"Bearer {key}".encode())]
        assert (guard.refusal(dict(headers=given, path="/v1/models")) is None) == is_in


# ---- load and faults


def test_too_many_requests_and_too_large_ones_are_refused(chat_model):
    options = "--ckpt", str(chat_model), "--slots", "1", "--queue", "1"
    with running(*options, code=f"{SLOW}\nhttp.BODY = 1000") as server:
        with ThreadPoolExecutor(2) as pool:
            ask = functools.partial(server.post, prompt=PROMPT, max_tokens=60)
            asked = [pool.submit(ask) for _ in range(2)]
            assert within(30, lambda: server.metric("open_requests") == 2)
            body = json.dumps(dict(prompt=PROMPT))
            status, headers, answer = server.call("POST", "/v1/completions", body.encode())
            assert (status, headers["Retry-After"]) == (429, "1") and "too many" in answer
            assert [x.result()[0] for x in asked] == [200, 200]
        assert server.call("POST", "/v1/completions", b" " * 1001)[0] == 413


def test_a_large_body_is_parsed_while_others_are_served():
    ticks = []

    async def stream():
        yield b'{"prompt": [' + b"1, {}, " * 500_000 + b"1]}"

    async def tick():
        while True:
            ticks.append(time.perf_counter())
            await asyncio.sleep(0)

    async def read():
        ticking = asyncio.create_task(tick())
        body = await body_of(SimpleNamespace(stream=stream))
        ticking.cancel()
        return body

    assert len(asyncio.run(read())["prompt"]) == 1_000_001
    assert len(ticks) > 10


def test_a_stream_is_alive_from_the_start_and_its_programs_are_compiled(chat_model):
    options = "--ckpt", str(chat_model), "--allow-host", "own.example"
    code = f"{SLOW.replace('0.02', '0.3')}\nhttp.QUIET = 0.1"
    with running(*options, code=code) as server:
        compiled = server.metric("compile_s_total")
        body = json.dumps(dict(prompt=PROMPT, stream=True, max_tokens=3)).encode()
        status, headers, answer = server.call("POST", "/v1/completions", body, Host="own.example")
        assert status == 200
        assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
        lines = answer.split("\n\n")
        assert lines[0].startswith(":") and sum(line.startswith("data: ") for line in lines) == 4
        assert 0 < compiled == server.metric("compile_s_total")
        assert server.metric("prefill_tokens_total") < 10  # its own tokens do not count
        assert server.call("GET", "/health", Host="evil.example")[0] == 403


SMALL_BUFFERS = f"""{PATCH}
import socket
listen = http.open_listener
def small(args):
    listener = listen(args)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener
http.open_listener = small
"""


@contextlib.contextmanager
def unread(server, **body):
    """A client that asks for a reply, and does not read it."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        data = json.dumps(dict(prompt=PROMPT, stream=True, logprobs=20) | body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{server.port}\r\n"
        slow.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield


@pytest.mark.full
def test_a_client_that_does_not_read_is_dropped_and_holds_up_nobody(chat_model):
    options, code = ("--ckpt", str(chat_model)), f"{SMALL_BUFFERS}http.BACKLOG = 50"
    with running(*options, code=code) as server, unread(server, max_tokens=480, n=4):
        assert within(30, lambda: server.metric("open_requests") == 4)
        assert server.post(prompt=PROMPT, max_tokens=5)[0] == 200
        assert within(60, server.is_idle)
        assert server.metric("decode_tokens_total") < 4 * 470


@pytest.mark.full
def test_a_client_that_leaves_its_reply_unread_takes_no_place(chat_model):
    options = "--ckpt", str(chat_model), "--slots", "2", "--queue", "0"
    with running(*options, code=SMALL_BUFFERS) as server:
        with unread(server, max_tokens=200, n=2):
            assert within(30, lambda: server.metric("decode_tokens_total") > 100)
            assert within(30, lambda: server.metric("running_requests") == 0)
            assert server.metric("open_requests") == 2  # its events are kept
            assert server.post(prompt=PROMPT, max_tokens=5)[0] == 200
        assert within(20, server.is_idle)


def test_what_the_event_loop_cannot_do_is_told_in_one_line(capsys):
    desk = Desk(SimpleNamespace(session=None), 1)
    desk.loop.call_exception_handler(dict(message="no more files", exception=OSError("A secret")))
    desk.loop.close()
    assert capsys.readouterr().err == "[no more files]\n"


def test_a_host_may_have_the_name_that_was_given():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert {"my-host", "own.example"} <= names_of(listener, "My-Host:8000", ["Own.example"])


@pytest.mark.full
@pytest.mark.parametrize("grace, wanted", [("60", 200), ("0.2", 503)])
def test_sigterm_ends_what_runs_within_the_grace(chat_model, grace, wanted):
    options = "--ckpt", str(chat_model), "--grace", grace
    with running(*options, code=SLOW) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, prompt=PROMPT, max_tokens=100)
        assert within(30, lambda: server.metric("running_requests") == 1)
        server.process.send_signal(signal.SIGTERM)
        if grace == "60":
            assert within(5, lambda: server.call("GET", "/health")[0] == 503)
            status, answer = server.post(prompt=PROMPT)
            assert (status, answer["error"]["message"]) == (503, "the server is stopping")
        status, answer = asked.result()
        assert server.process.wait(60) == 0
    assert status == wanted
    assert wanted == 200 or answer["error"]["message"] == "the server has stopped"


@pytest.mark.full
def test_a_failure_of_the_engine_reaches_every_client_and_ends_the_process(chat_model, tmp_path):
    code = f"""{SLOW}
from pathlib import Path
slow = http.step
def fail(session):
    assert not Path({str(tmp_path / "now")!r}).exists(), "a fault"
    return slow(session)
http.step = fail"""
    with running("--ckpt", str(chat_model), code=code) as server:
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(server.post, prompt=PROMPT, max_tokens=300) for _ in range(3)]
            assert within(30, lambda: server.metric("running_requests") == 3)
            (tmp_path / "now").touch()
            answers = [x.result() for x in asked]
        assert server.process.wait(60) == 1
        assert "a fault" in server.process.stderr.read()
    assert {status for status, _ in answers} == {500}
    assert {answer["error"]["message"] for _, answer in answers} == {"the engine has failed"}


def test_a_reply_whose_logits_are_no_numbers_ends_alone(chat_model):
    code = f"""{PATCH}
from common.sampling import INVALID
spoil = lambda event: event._replace(token=INVALID, finish="invalid")
http.step = lambda session: [spoil(e) if e.request == 3 else e for e in real(session)]"""
    with running("--ckpt", str(chat_model), code=code) as server:
        status, answer = server.post(prompt=PROMPT, max_tokens=5)
        assert status == 500 and "NaN or infinite" in answer["error"]["message"]
        assert server.post(prompt=PROMPT, max_tokens=5)[0] == 200


def test_a_mistake_of_the_server_is_told_without_what_a_client_has_sent(chat_model):
    code = """from common.server import answers
def fail(*args):
    raise KeyError("A secret")
answers.Completion.tell = fail"""
    with running("--ckpt", str(chat_model), code=code) as server:
        for stream in (False, True):
            body = dict(prompt="A secret", max_tokens=3, stream=stream)
            answer = server.call("POST", "/v1/completions", json.dumps(body).encode())[2]
            assert "the server has made a mistake" in answer
        with socket.create_connection(("127.0.0.1", server.port)) as gone:  # in mid-sentence
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{server.port}\r\n"
            gone.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
            time.sleep(0.2)
        assert within(10, server.is_idle)
        code, told = server.end()
    assert told.count("[a request failed") == told.count("[a request failed: KeyError]") == 2
    assert code == 0 and "secret" not in told


@pytest.mark.full
def test_the_layer_that_drafts_serves_too_without_log_probabilities():
    code = """
import functools
from deepseek_r1 import model, mtp
main = functools.partial(main, drafting=mtp)"""
    with running("--draft", "mtp", "--max-len", "256", code=code) as server:
        status, answer = server.post(prompt=PROMPT, max_tokens=40)
        assert status == 200 and sum(answer["usage"]["completion_tokens_details"].values()) > 10
        status, answer = server.post(prompt=PROMPT, logprobs=1)
        assert status == 400 and "--draft mtp" in answer["error"]["message"]


def test_the_bytes_of_tokens_are_those_of_the_text():
    """Also where a token holds a part of a character."""
    tok, text = model().tokenizer, "é — π 漢字"
    names, data = zip(*(spelled(tok, i) for i in encode(tok, text)[1:]), strict=True)
    assert bytes(itertools.chain(*data)).decode() == text
    assert [n for n in names if n.startswith("bytes:")][:2] == ["bytes:\\xc3", "bytes:\\xa9"]


@pytest.fixture
def refused_start(capsys, monkeypatch):
    """Starts a command line with some options and variables, and returns its one line of error."""
    monkeypatch.setattr(cli, "read_weights", lambda *_: pytest.fail("weights were loaded first"))

    def start(*options, **variables):
        with monkeypatch.context() as context, pytest.raises(SystemExit) as stop:
            for name, value in variables.items():
                context.setenv(name, value)
            cli.main(llama3, options)
        told = capsys.readouterr()
        assert (stop.value.code, told.out, told.err.count("\n")) == (2, "", 1)
        return told.err

    return start


def test_a_place_where_it_cannot_listen_is_named_before_anything_is_read(refused_start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"--serve {place}: Address already in use" in refused_start("--serve", place)
    for place in ("here", "8000", ":8000", "", "[]:8000", "[::1:8000", "::1]:8000", "::1:8000"):
        assert "give HOST:PORT" in refused_start("--serve", place)
    assert "--grace: must be at least 0, got nan" in refused_start("--serve", "--grace", "nan")
    assert "--api-key goes with --serve only" in refused_start("--api-key", "x")


def test_a_key_that_lets_all_in_or_none_is_refused(refused_start):
    told = "--api-key or FOLIO_API_KEY must be printable"
    assert told in refused_start("--serve", "--api-key", "")
    for key in ("", "key\n", "\udcff"):
        assert told in refused_start("--serve", FOLIO_API_KEY=key)


def test_it_is_said_how_the_extra_is_installed(tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError(\"No module named 'uvicorn'\")")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "llama3.main", "--serve", "127.0.0.1:0"],
        **dict(cwd=ROOT, env={**ENVIRONMENT, "PYTHONPATH": path}, text=True),
        **dict(capture_output=True, stdin=subprocess.DEVNULL, timeout=120),
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "pip install -e '.[serve]'" in done.stderr
