"""A session over HTTP. The thread that starts this steps the session; a second one runs the event
loop, which has the connections. They pass messages, and share nothing else."""

import argparse
import asyncio
import contextlib
import hmac
import json
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as Call
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from common.server.protocol import (
    Asked,
    Choice,
    Refused,
    add,
    ask,
    envelope,
    error_object,
    read_json,
    tell,
    usage_of,
)
from common.serving.serve import cancel, is_busy, step, submit
from common.serving.session import Event, Request, Session

BODY = 32 << 20  # bytes of a request
BACKLOG = 4096  # events that a client may leave unread


class Answer:
    """The events of one HTTP request's choices, as the event loop gets them."""

    def __init__(self, requests: Sequence[Request]):
        self.requests, self.task = requests, asyncio.current_task()
        self.events = asyncio.Queue[tuple[int, Event] | Exception]()
        self.numbers = list[int]()  # of its requests in the session, whose thread has them

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """Yields the choice and the event, until all choices have ended."""
        left = len(self.requests)
        while left:
            if isinstance(item := await self.events.get(), Exception):
                raise item
            left -= item[1].finish is not None
            yield item


class Desk:
    """Passes requests to the thread that steps the session, and events back."""

    def __init__(self, session: Session, waiting: int, grace: float):
        self.session, self.most, self.grace = session, session.slots + waiting, grace
        self.inbox = queue.SimpleQueue[Callable[[], None]]()  # what the session's thread is to do
        self.open = set[Answer]()
        self.places = dict[int, tuple[Answer, int]]()  # by number of the request
        self.deadline = math.inf  # when a server that is to stop gives up what still runs
        self.loop: asyncio.AbstractEventLoop | None = None

    # of the event loop

    def enter(self, requests: Sequence[Request]) -> Answer:
        """Lets requests in. Refused if too many wait, or if the server stops."""
        if self.deadline < math.inf:
            raise Refused("the server is stopping", status=503)
        if sum(len(answer.requests) for answer in self.open) + len(requests) > self.most:
            raise Refused("too many requests are waiting: try again later", status=429)
        answer = Answer(requests)
        self.open.add(answer)
        self.inbox.put(partial(self.submit, answer))
        return answer

    def leave(self, answer: Answer) -> None:
        """Gives up what has not ended of an answer, before the next step."""
        self.open.discard(answer)
        self.inbox.put(partial(self.cancel, answer))

    def deliver(self, events: Sequence[tuple[Answer, Any]]) -> None:
        for answer, item in events:
            answer.events.put_nowait(item)
            if answer.events.qsize() > BACKLOG and answer.task:
                answer.task.cancel()  # its client does not read

    def fail(self, error: Exception) -> None:
        self.deliver([(answer, error) for answer in self.open])

    # of the thread that steps the session

    def submit(self, answer: Answer) -> None:
        for i, request in enumerate(answer.requests):
            number = submit(self.session, request)
            answer.numbers.append(number)
            self.places[number] = answer, i

    def cancel(self, answer: Answer) -> None:
        for number in answer.numbers:
            if self.places.pop(number, None):
                cancel(self.session, number)

    def stop(self, *_: Any) -> None:
        """Handles a signal; a second one ends the process at once."""
        self.deadline = time.monotonic() + self.grace
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)
        self.inbox.put(lambda: None)

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Calls a function on the event loop."""
        with contextlib.suppress(RuntimeError):  # it has ended
            if self.loop:
                self.loop.call_soon_threadsafe(function, *args)

    def receive(self) -> None:
        """Does what has arrived, and waits for it if there is nothing else to do."""
        left = 0.0 if is_busy(self.session) else min(self.deadline - time.monotonic(), 60.0)
        with contextlib.suppress(queue.Empty):
            while True:
                self.inbox.get(timeout=max(left, 0.0))()
                left = 0.0

    def run(self) -> None:
        """Steps the session, until it is to stop and nothing is open, or time is up."""
        while self.open or self.deadline == math.inf:
            self.receive()
            if time.monotonic() > self.deadline:
                break
            events = [(event, self.places.get(event.request)) for event in step(self.session)]
            told = [(place[0], (place[1], event)) for event, place in events if place]
            for event, _ in events:
                if event.finish:
                    self.places.pop(event.request, None)
            if told:
                self.call(self.deliver, told)


async def body_of(call: Call) -> Any:
    """Reads a body of JSON."""
    data = bytearray()
    async for part in call.stream():
        data += part
        if len(data) > BODY:
            raise Refused(f"the body has more than {BODY} bytes", status=413)
    return read_json(bytes(data))


async def unless_gone(call: Call, work: Awaitable[Any]) -> Any:
    """Awaits `work`. Gives it up if the client goes away."""

    async def gone() -> None:
        while (await call.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    is_done = tasks[0].done()
    for task in tasks:
        task.cancel()
    if not is_done:
        raise Refused("the client has gone", status=499)
    return tasks[0].result()


class Stream(StreamingResponse):
    """Calls `at_end` whatever ends it, also if its client goes away."""

    def __init__(self, lines: AsyncIterator[str], at_end: Callable[[], None]):
        super().__init__(lines, media_type="text/event-stream")
        self.at_end = at_end

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self.at_end()


class Api:
    """The endpoints."""

    def __init__(self, desk: Desk, name: str):
        self.desk, self.session, self.name = desk, desk.session, name
        self.tok: Any = desk.session.model.tokenizer
        self.created = int(time.time())

    async def complete(self, call: Call, kind: str) -> Response:
        body = await body_of(call)
        asked = await asyncio.to_thread(ask, self.session, self.name, kind, body)
        answer = self.desk.enter(asked.requests)
        known = dict(id=f"{kind}-{uuid.uuid4().hex}", model=self.name, created=int(time.time()))
        if asked.stream:
            return Stream(self.stream(asked, answer, known), partial(self.desk.leave, answer))
        try:
            return JSONResponse(await unless_gone(call, self.whole(asked, answer, known)))
        finally:
            self.desk.leave(answer)

    async def whole(self, asked: Asked, answer: Answer, known: dict[str, Any]) -> dict[str, Any]:
        choices = [Choice(request, i) for i, request in enumerate(asked.requests)]
        async for i, event in answer:
            add(asked, choices[i], self.tok, event)
        told = [tell(asked, choice, self.tok) for choice in choices]
        return envelope(asked, **known, choices=told, usage=usage_of(asked, choices))

    async def stream(
        self, asked: Asked, answer: Answer, known: dict[str, Any]
    ) -> AsyncIterator[str]:
        choices = [Choice(request, i) for i, request in enumerate(asked.requests)]
        line = lambda **more: f"data: {json.dumps(envelope(asked, **known, **more))}\n\n"
        last: dict[str, Any] = dict(usage=None) if asked.usage else {}
        try:
            async for i, event in answer:
                add(asked, choice := choices[i], self.tok, event)
                if choice.content or choice.reasoning or choice.scores or choice.finish:
                    yield line(choices=[tell(asked, choice, self.tok)], **last)
            if asked.usage:
                yield line(choices=[], usage=usage_of(asked, choices))
        except Refused as error:
            yield f"data: {json.dumps(error_object(error))}\n\n"
        yield "data: [DONE]\n\n"

    async def models(self, call: Call) -> Response:
        model = dict(id=self.name, object="model", created=self.created, owned_by="folio")
        return JSONResponse(dict(object="list", data=[model]))

    async def health(self, call: Call) -> Response:
        stopping = self.desk.deadline < math.inf
        return JSONResponse(dict(status="stopping" if stopping else "ok"), 503 if stopping else 200)

    async def metrics(self, call: Call) -> Response:
        """What `Stats` has, and how many requests are open and running, for Prometheus."""
        s, kinds = self.session, dict[str, tuple[str, float]]()
        kinds["open_requests"] = "gauge", sum(len(answer.requests) for answer in self.desk.open)
        kinds["running_requests"] = "gauge", len(s.running)
        kinds |= {name + "_total": ("counter", value) for name, value in vars(s.stats).items()}
        lines = [f"# TYPE folio_{k} {kind}\nfolio_{k} {x}\n" for k, (kind, x) in kinds.items()]
        return PlainTextResponse("".join(lines))

    def routes(self) -> list[Route]:
        return [
            Route("/", lambda call: FileResponse(Path(__file__).with_name("page.html"))),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", partial(self.complete, kind="chat"), methods=["POST"]),
            Route("/v1/completions", partial(self.complete, kind="text"), methods=["POST"]),
        ]


class Guard:
    """Lets in who has the key; and while the server listens on this machine alone, who calls it by
    its own name: a page of the web could give its name this machine's address."""

    def __init__(self, app: Any, hosts: set[str], key: str | None):
        self.app, self.hosts, self.key = app, hosts, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (refused := self.refusal(scope)):
            await JSONResponse(error_object(refused), refused.status)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def refusal(self, scope: Any) -> Refused | None:
        headers = dict(scope["headers"])
        if self.hosts and headers.get(b"host", b"").decode("latin-1").lower() not in self.hosts:
            return Refused("this server has another name: see its Host header", status=403)
        given, wanted = headers.get(b"authorization", b""), f"Bearer {self.key}".encode()
        open_to_all = scope["path"] in ("/", "/health")
        if self.key and not open_to_all and not hmac.compare_digest(given, wanted):
            return Refused("the API key is missing or wrong", status=401)
        return None


async def refuse(call: Call, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        error = Refused(error.detail, status=error.status_code)
    status = getattr(error, "status", 500)
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    return JSONResponse(error_object(error), status, headers)


def listen(place: str) -> socket.socket:
    """Listens on HOST:PORT. ValueError if that cannot be."""
    host, _, port = place.rpartition(":")
    if not port.isdigit():
        raise ValueError(f"--serve {place}: give HOST:PORT, such as 127.0.0.1:8000")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), int(port)), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--serve {place}: {getattr(error, 'strerror', error)}") from None


def names_of(listener: socket.socket) -> set[str]:
    """The values that a Host header may have; empty if other machines can connect."""
    host, port, *_ = listener.getsockname()
    local = ["127.0.0.1", "localhost", "[::1]"]
    return {f"{name}:{port}" for name in local} if host in ("127.0.0.1", "::1") else set()


def serve_http(session: Session, args: argparse.Namespace, listener: socket.socket) -> None:
    """Serves until SIGTERM or Ctrl-C, then ends what runs within --grace seconds."""
    desk = Desk(session, args.queue, args.grace)
    ckpt = str(args.ckpt or session.model.module.__package__)
    name = Path(ckpt).resolve().name if Path(ckpt).is_dir() else ckpt
    key = args.api_key or os.environ.get("FOLIO_API_KEY")

    @contextlib.asynccontextmanager
    async def started(app: Any) -> AsyncIterator[None]:
        desk.loop = asyncio.get_running_loop()
        host, port, *_ = listener.getsockname()
        sys.stderr.write(f"[serving {name} at http://{host}:{port}; Ctrl-C ends it]\n")
        yield

    errors = dict.fromkeys((Refused, HTTPException, Exception), refuse)
    guard = Middleware(Guard, hosts=names_of(listener), key=key)
    cors = Middleware(CORSMiddleware, allow_origins=args.allow_origin, allow_headers=["*"])
    middleware = [cors, guard] if args.allow_origin else [guard]
    routes = Api(desk, name).routes()
    app = Starlette(False, routes, middleware, errors, lifespan=started)
    settings = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=5)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, desk.stop)
    thread.start()
    try:
        desk.run()
        desk.call(desk.fail, Refused("the server has stopped", status=503))
    except Exception as error:
        desk.deadline = 0.0
        desk.call(desk.fail, Refused("the engine has failed", status=500))
        raise RuntimeError("the engine has failed") from error
    finally:
        server.should_exit = True
        thread.join(10)
