"""A session over HTTP. The main thread steps the session. A second thread runs the event loop,
which has the connections. They pass messages to each other; apart from that, each one only reads
what the other one counts."""

import argparse
import asyncio
import contextlib
import hmac
import ipaddress
import math
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Call
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from common.server.answers import Completion
from common.server.fields import Refused, read_json
from common.server.protocol import Served, ask
from common.server.responses import Reply, as_chat
from common.serving.serve import cancel, is_busy, serve, step, submit
from common.serving.session import PROMPT_CHUNK, Event, Request, Session, Stats

BODY = 16 << 20  # bytes of a request
BACKLOG = 4096  # events that a client may leave unread
WAITING = 128  # connections that may wait to be accepted
QUIET = 5.0  # seconds; a stream that has nothing to send sends a comment as often
IDLE = 75  # seconds that a connection stays open; proxies close theirs after 60
UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # which proxies read


class Answer:
    """The events of one HTTP request's choices, as the event loop gets them."""

    def __init__(self, requests: Sequence[Request]):
        self.requests = requests
        self.task: Any = asyncio.current_task()  # which answers the request
        self.events = asyncio.Queue[tuple[int, Event] | Exception]()
        self.left = len(requests)  # requests that have not ended


class Desk:
    """The endpoints. Passes requests to the thread that steps the session, and events back."""

    def __init__(self, served: Served, grace: float):
        self.served, self.session, self.grace = served, served.session, grace
        self.inbox = queue.SimpleQueue[Callable[[], None]]()  # what the session's thread is to do
        self.open, self.created = set[Answer](), int(time.time())
        self.places = dict[int, tuple[Answer, int]]()  # by number of the request
        self.deadline = math.inf  # when a server that is to stop gives up what still runs
        self.loop = asyncio.new_event_loop()
        # No text that a client has sent.
        self.loop.set_exception_handler(lambda _, x: print(f"[{x['message']}]", file=sys.stderr))

    # of the event loop

    def check_room(self, count: int) -> None:
        """Refused if so many more requests would be too many, or if the server stops."""
        if self.deadline < math.inf:
            raise Refused("the server is stopping", status=503)
        if sum(answer.left for answer in self.open) + count > self.served.most:
            raise Refused("too many requests are waiting: try again later", status=429)

    def enter(self, requests: Sequence[Request]) -> Answer:
        self.check_room(len(requests))
        answer = Answer(requests)
        self.open.add(answer)
        self.inbox.put(partial(self.submit, answer))
        # It also ends if its client goes away.
        answer.task.add_done_callback(lambda _: self.leave(answer))
        return answer

    def leave(self, answer: Answer) -> None:
        """Gives up what has not ended of an answer, before the next step."""
        self.open.discard(answer)
        self.inbox.put(partial(self.cancel, answer))

    def deliver(self, told: Sequence[tuple[Answer, int, Event]]) -> None:
        for answer, i, event in told:
            answer.events.put_nowait((i, event))
            answer.left -= event.finish is not None
            if answer.events.qsize() > BACKLOG:
                answer.task.cancel()  # its client does not read

    def fail(self, error: Exception) -> None:
        for answer in self.open:
            answer.events.put_nowait(error)

    # of the thread that steps the session

    def submit(self, answer: Answer) -> None:
        for i, request in enumerate(answer.requests):
            self.places[submit(self.session, request)] = answer, i

    def cancel(self, answer: Answer) -> None:
        for number in [n for n, (other, _) in self.places.items() if other is answer]:
            del self.places[number]
            cancel(self.session, number)

    def stop(self, *_: Any) -> None:
        """Handles a signal; a second one ends the process at once."""
        self.deadline = time.monotonic() + self.grace
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)
        self.inbox.put(lambda: None)

    def receive(self) -> None:
        """Does what has arrived, and waits for it if there is nothing else to do."""
        left = min(self.deadline - time.monotonic(), 3600.0)  # a queue waits for no infinity
        left = 0.0 if is_busy(self.session) else max(left, 0.0)
        with contextlib.suppress(queue.Empty):
            while True:
                self.inbox.get(timeout=left)()
                left = 0.0

    def run(self) -> None:
        """Steps the session, until it is to stop and nothing is open, or time is up."""
        while (self.open or self.deadline == math.inf) and time.monotonic() < self.deadline:
            self.receive()
            told = [(*self.places[event.request], event) for event in step(self.session)]
            if told:
                self.loop.call_soon_threadsafe(self.deliver, told)

    # endpoints, of the event loop

    async def complete(self, call: Call, kind: str) -> Response:
        self.check_room(1)  # before a long text is encoded
        told = await asyncio.to_thread(begin, self.served, kind, await body_of(call))
        answer = self.enter(told.asked.requests)
        if told.asked.given.get("stream"):
            lines = follow(told, answer)
            return StreamingResponse(lines, media_type="text/event-stream", headers=UNBUFFERED)

        async def watch() -> None:  # ends the answer if its client goes away
            while (await call.receive())["type"] != "http.disconnect":
                pass
            answer.events.put_nowait(Refused("the client has gone", status=499))

        watcher = asyncio.create_task(watch())
        try:
            async for _ in follow(told, answer):
                pass
        finally:
            watcher.cancel()
        return JSONResponse(told.whole())

    async def models(self, call: Call) -> Response:
        served, name = self.served, call.path_params.get("name")
        if name not in (None, served.name):
            what = f"the model here is {served.name}, not {name[:80]}"
            raise Refused(what, "model", 404, "model_not_found")
        model = dict(id=served.name, object="model", created=self.created, owned_by="folio")
        model |= dict(max_model_len=served.session.capacity)
        return JSONResponse(model if name else dict(object="list", data=[model]))

    async def health(self, call: Call) -> Response:
        stopping = self.deadline < math.inf
        return JSONResponse(dict(status="stopping" if stopping else "ok"), 503 if stopping else 200)

    async def metrics(self, call: Call) -> Response:
        """What `Stats` has, and how many requests are open and running, for Prometheus."""
        s, kinds = self.session, dict[str, tuple[str, float]]()
        kinds["open_requests"] = "gauge", sum(len(answer.requests) for answer in self.open)
        kinds["running_requests"] = "gauge", len(s.running)
        kinds |= {name + "_total": ("counter", value) for name, value in vars(s.stats).items()}
        lines = [f"# TYPE folio_{k} {kind}\nfolio_{k} {x}\n" for k, (kind, x) in kinds.items()]
        return Response("".join(lines), media_type="text/plain")

    def routes(self) -> list[Route]:
        return [
            Route("/", lambda call: FileResponse(Path(__file__).with_name("page.html"))),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.models),
            Route("/v1/chat/completions", partial(self.complete, kind="chat"), methods=["POST"]),
            Route("/v1/completions", partial(self.complete, kind="text"), methods=["POST"]),
            Route("/v1/responses", partial(self.complete, kind="responses"), methods=["POST"]),
        ]


async def body_of(call: Call) -> Any:
    """Reads a body of JSON. A large one takes a second, in which other clients are served."""
    data = bytearray()
    async for part in call.stream():
        data += part
        if len(data) > BODY:
            raise Refused(f"the body has more than {BODY} bytes", status=413)
    return await asyncio.to_thread(read_json, bytes(data))


def begin(served: Served, kind: str, body: Any) -> Completion | Reply:
    """Reads a request, and begins the answer to it."""
    if kind == "responses":
        return Reply(served, ask(served, "chat", as_chat(body)), body)
    return Completion(served, ask(served, kind, body))


async def follow(told: Completion | Reply, answer: Answer) -> AsyncIterator[str]:
    """Adds the events to what is told, and yields what a stream sends of it."""
    sent = time.monotonic()
    try:
        yield told.first
        while not all(choice.finish for choice in told.choices):
            lines = ""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUIET):
                    item = await answer.events.get()
                if isinstance(item, Exception):
                    raise item
                lines = told.add(*item)
            if not lines and time.monotonic() > sent + QUIET / 2:
                lines = ": nothing to send yet\n\n"
            if lines:
                yield lines
                sent = time.monotonic()
        yield told.last()
    except Exception as error:
        if not told.asked.given.get("stream"):
            raise
        yield told.failed(refusal_of(error))


class Guard:
    """Refuses requests without the API key. If the server listens on a loopback address, it also
    refuses unknown Host headers (DNS rebinding) and unknown Origin headers (cross-site
    requests)."""

    def __init__(self, app: Any, names: set[str], origins: list[str], key: str | None):
        self.app, self.names, self.origins, self.key = app, names, origins, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        app = self.app
        if scope["type"] == "http" and (refused := self.refusal(scope)):
            app = JSONResponse(refused.object, refused.status)
        await app(scope, receive, send)

    def refusal(self, scope: Any) -> Refused | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", "").lower(), headers.get(b"origin")
        name = re.sub(r":\d*$", "", host)
        if self.names and name not in self.names:
            return Refused("this server has another name: see --allow-host", status=403)
        known = origin is None or origin.partition("//")[2].lower() == host
        if self.names and not known and not {origin, "*"} & {*self.origins}:
            return Refused("pages of this origin may not call: see --allow-origin", status=403)
        scheme, _, given = headers.get(b"authorization", "").partition(" ")
        data = given.strip(" ").encode("latin-1")  # the bytes that came
        is_right = self.key and hmac.compare_digest(data, self.key.encode())
        open_to_all = scope["path"] in ("/", "/health")
        if self.key and not open_to_all and not (is_right and scheme.lower() == "bearer"):
            return Refused("the API key is missing or wrong", status=401)
        return None


def refusal_of(error: Exception) -> Refused:
    """What a client is told of an error. Of a bug, stderr says where, without a client's text."""
    if isinstance(error, HTTPException):
        return Refused(error.detail, status=error.status_code)
    if isinstance(error, ClientDisconnect):  # in the middle of a body
        return Refused("the client has gone", status=499)
    if isinstance(error, Refused):
        return error
    where = "".join(traceback.format_tb(error.__traceback__))
    sys.stderr.write(f"{where}[a request failed: {type(error).__name__}]\n")
    return Refused("the server has made a mistake", status=500)


async def refuse(call: Call, error: Exception) -> Response:
    refused = refusal_of(error)
    headers = dict(getattr(error, "headers", None) or {})  # such as Allow
    if refused.status in (429, 503):
        headers["Retry-After"] = "1"
    return JSONResponse(refused.object, refused.status, headers)


def open_listener(args: argparse.Namespace) -> socket.socket:
    """Listens where --serve says. ValueError if that, or the API key, cannot be."""
    key_of(args)
    host, _, port = args.serve.rpartition(":")
    host, family = host.strip("[]"), socket.AF_INET6 if "[" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family, backlog=WAITING)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--serve {args.serve}: {getattr(error, 'strerror', error)}") from None


def names_of(listener: socket.socket, place: str, allowed: Sequence[str]) -> set[str]:
    """The names that a Host header may have; empty, for any, if other machines can connect."""
    host = listener.getsockname()[0]
    if not ipaddress.ip_address(host).is_loopback:
        return set()
    given = (place.rpartition(":")[0], *allowed)
    return {"localhost", "127.0.0.1", "[::1]", host, *map(str.lower, given)}


def key_of(args: argparse.Namespace) -> str | None:
    """The API key. ValueError if it is empty, as all would get in, or if no client can send it."""
    key = os.environ.get("FOLIO_API_KEY") if args.api_key is None else str(args.api_key)
    if key is not None and not (key and key.isprintable() and key == key.strip()):
        what = "be printable, and neither be empty nor have spaces around it"
        raise ValueError(f"--api-key or FOLIO_API_KEY must {what}")
    return key


def compile_programs(session: Session) -> None:
    """Answers a short prompt, and a long one twice, so that no client waits for the programs of the
    smallest chunk, of the largest one, of a copy and of a step."""
    longest = min(PROMPT_CHUNK + 1, session.capacity)
    for _ in serve(session, [Request([0] * n, 8) for n in (1, longest, longest)]):
        pass
    session.began, session.stats = 0.0, Stats(compile_s=session.stats.compile_s)


def serve_http(session: Session, args: argparse.Namespace, listener: socket.socket) -> None:
    """Serves until SIGTERM or Ctrl-C, then ends what runs within --grace seconds."""
    compile_programs(session)
    ckpt = str(args.adapter or args.ckpt or session.model.module.__package__)
    name = Path(ckpt).resolve().name if Path(ckpt).is_dir() else ckpt
    served = Served(session, name, session.slots + args.queue, args.tool_format)
    desk, names = Desk(served, args.grace), names_of(listener, args.serve, args.allow_host)
    key, origins = key_of(args), args.allow_origin
    guard = Middleware(Guard, names=names, origins=origins, key=key)
    anything: Any = dict(allow_methods=["*"], allow_headers=["*"], allow_private_network=True)
    cors = Middleware(CORSMiddleware, allow_origins=origins, **anything)
    middleware = [cors, guard] if origins else [guard]
    errors = dict.fromkeys((Refused, HTTPException, Exception), refuse)
    app = Starlette(False, desk.routes(), middleware, errors)
    quiet: Any = dict(log_level="critical", lifespan="off", timeout_graceful_shutdown=5)
    server = uvicorn.Server(uvicorn.Config(app, backlog=WAITING, timeout_keep_alive=IDLE, **quiet))
    run = partial(desk.loop.run_until_complete, server.serve([listener]))
    tell = desk.loop.call_soon_threadsafe
    thread = threading.Thread(target=run, daemon=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, desk.stop)
    thread.start()
    host, port, *_ = listener.getsockname()
    host = f"[{host}]" if ":" in host else host
    sys.stderr.write(f"[serving {name} at http://{host}:{port}; Ctrl-C ends it]\n")
    try:
        desk.run()
        tell(desk.fail, Refused("the server has stopped", status=503))
    except Exception as error:
        desk.deadline = 0.0
        tell(desk.fail, Refused("the engine has failed", status=500))
        raise RuntimeError("the engine has failed") from error
    except KeyboardInterrupt:  # a second signal
        server.force_exit = True
        raise
    finally:
        server.should_exit = True
        thread.join(10)
