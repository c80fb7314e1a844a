"""Lets several processes run one command: they find each other, compare what they have before any
long work, and end together.

Each process connects to process 0 by TCP before `jax.distributed` starts, and stays connected until
all are done. Their messages are lines of JSON: "hello" (who I am), "welcome" (I am process 0),
"report" (what I have), "go" (all have the same, and these are the prompts), "done", and "end" (stop
with this exit code and these lines). If a connection closes without "done", the process has died.
JAX itself would notice only after minutes, or abort with a page of its own messages.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

import jax
from jax._src import distributed  # its client is not public

from common.loading.files import first_line
from common.machines.cluster import Rank, find_rank
from common.machines.preflight import differences, numbered

GRACE = 1.0  # seconds for a process to find itself the mistake that another one reports
DEATH = 1  # the exit code after a process has died
REMEDY = "--join-timeout waits longer, --no-distributed runs alone"
REMEMBERED = 10_000  # messages of `share` that are kept
HELLO_S, HELLO_BYTES = 5.0, 1000  # for a process that has connected to say who it is
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Disagreement(ValueError):
    """Several processes do not fit together."""


# ---- connections


class Peer:
    """A connection to another process."""

    def __init__(self, connection: socket.socket, lines: TextIO, process: int, host: str):
        self.connection, self.lines, self.process, self.host = connection, lines, process, host
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # systems differ in the names
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it has gone, as its watcher will see
            self.connection.sendall(json.dumps(message).encode() + b"\n")


def receive(lines: TextIO) -> dict[str, Any] | None:
    """Returns the next message; None at the end, or if the line is not a message."""
    try:
        message = json.loads(lines.readline())
    except (OSError, ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def bind_address(rank: Rank) -> str:
    """Where process 0 listens: on the address of the coordinator alone, unless told otherwise."""
    return os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or rank.coordinator


def listen(rank: Rank, timeout: float) -> list[Peer]:
    """Waits for connections from all other processes. Disagreement says which are missing."""
    address = bind_address(rank)
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
        dual = host == "::" and socket.has_dualstack_ipv6()
        server = socket.create_server(
            (host, int(port)), family=family, dualstack_ipv6=dual, backlog=1024
        )
    except OSError as error:
        raise ValueError(
            f"process 0 cannot listen on {address}: {error.strerror} "
            "(JAX_COORDINATOR_BIND_ADDRESS=HOST:PORT sets where it listens)"
        ) from None
    deadline, came, wrong = time.monotonic() + timeout, list[Peer](), list[str]()
    # The server is closed before JAX listens on its port; the connections stay open.
    with server, contextlib.suppress(TimeoutError):
        while len(came) < rank.processes - 1 and not wrong:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            if (hello := greet(server.accept()[0])) is not None:
                wrong = misplaced(*hello, rank, came)
                came.append(hello[0])
    missing = sorted(set(range(1, rank.processes)) - {peer.process for peer in came})
    if missing and not wrong:
        late = f"{numbered(missing)} of {rank.processes} did not come within {timeout:g} s"
        wrong = [f"{late} ({REMEDY})"]
    if wrong:
        for peer in came:
            peer.send(end=2, lines=wrong)
        raise Disagreement("\n".join(wrong))
    return came


def greet(connection: socket.socket) -> tuple[Peer, int] | None:
    """Returns the process that connected, and how many it says there are; None for a stranger."""
    deadline, line = time.monotonic() + HELLO_S, b""
    with contextlib.suppress(OSError):
        while not line.endswith(b"\n") and len(line) < HELLO_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 0.01))
            line += connection.recv(1) or b"\n"
    match receive(io.StringIO(line.decode(errors="replace"))):
        case {"hello": [int(process), int(count), str(host)]}:
            connection.settimeout(None)
            peer = Peer(connection, connection.makefile("r", encoding="utf-8"), process, host)
            peer.send(welcome=True)
            return peer, count
    connection.close()
    return None


def misplaced(peer: Peer, count: int, rank: Rank, came: list[Peer]) -> list[str]:
    """Says why a process is not one of those that are awaited; empty if it is."""
    if count != rank.processes:
        return [f"{peer} is one of {count} processes, but process 0 is one of {rank.processes}"]
    taken = {0: socket.gethostname(), **{other.process: other.host for other in came}}
    if (also := taken.get(peer.process)) is not None:
        return [f"two processes are process {peer.process} of {count}: on {also} and {peer.host}"]
    return []


def connect(rank: Rank, timeout: float) -> Peer:
    """Connects to process 0, which may start later."""
    host, _, port = rank.coordinator.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            address = host.strip("[]"), int(port)
            connection = socket.create_connection(address, max(deadline - time.monotonic(), 0.1))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise Disagreement(
                    f"process 0 of {rank.processes} did not answer at {rank.coordinator} within "
                    f"{timeout:g} s ({error.strerror or error}; {REMEDY})"
                ) from None
            time.sleep(0.1)
    peer = Peer(connection, connection.makefile("r", encoding="utf-8"), 0, host)
    peer.send(hello=[rank.process, rank.processes, socket.gethostname()])
    if receive(peer.lines) is None:
        raise Disagreement(
            f"what listens at {rank.coordinator} does not answer as process 0 of "
            f"{rank.processes} would ({REMEDY})"
        )
    connection.settimeout(None)
    return peer


# ---- the group of processes


def quieten(process: int) -> TextIO:
    """Lets only process 0 write from now on, and only what Python writes. Otherwise Gloo greets on
    stdout, and XLA prints its stack when another process dies. Returns stderr, for error lines.

    With TF_CPP_MIN_LOG_LEVEL=0, what the libraries write goes to stderr.
    """
    sys.stdout.flush()
    stdout, stderr = (
        os.fdopen(os.dup(fd), "w", buffering=1, encoding=stream.encoding, errors=stream.errors)
        for fd, stream in ((1, sys.stdout), (2, sys.stderr))
    )
    nothing = open(os.devnull, "w")  # noqa: SIM115
    os.dup2(2, 1)
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0":
        for fd in (1, 2):
            os.dup2(nothing.fileno(), fd)
    sys.stdout, sys.stderr = (stdout, stderr) if process == 0 else (nothing, nothing)
    return stderr


class Group:
    """This process and its connections to the others."""

    def __init__(self, rank: Rank, timeout: float):
        self.rank, self.timeout = rank, timeout
        self.stderr = quieten(rank.process)
        self.peers: list[Peer] = []  # process 0 has all others here, and they have process 0
        self.inbox: queue.Queue[tuple[Peer, str, Any]] = queue.Queue()
        self.leaving = threading.Event()  # set if the main thread ends by itself
        self.ending = threading.Lock()  # held by the thread that ends the process
        self.started = False

    def join(self) -> None:
        rank, timeout = self.rank, self.timeout
        self.peers = [connect(rank, timeout)] if rank.process else listen(rank, timeout)
        for peer in self.peers:
            threading.Thread(target=self.watch, args=(peer,), daemon=True).start()

    def watch(self, peer: Peer) -> None:
        while message := receive(peer.lines):
            for kind in {"report", "go", "done"} & set(message):
                self.inbox.put((peer, kind, message[kind]))
            if "end" in message:
                if message["end"] != DEATH:
                    self.leaving.wait(GRACE)  # it may see the same mistake, or Ctrl-C, itself
                return self.end(message["end"], message["lines"])
        self.end(DEATH, [f"{peer} has died"])

    def end(self, code: int, lines: list[str]) -> None:
        """Ends this process, and from process 0 all others, unless the main thread does so."""
        with self.ending:
            if not self.leaving.is_set():
                self.tell_all(code, lines)
                self.write(lines)
                self.wait_for_others()
                os._exit(code)

    def write(self, lines: list[str]) -> None:
        with contextlib.suppress(OSError):
            self.stderr.write("".join(f"error: {line}\n" for line in lines))

    def tell_all(self, code: int, lines: list[str]) -> None:
        for peer in self.peers:
            peer.send(end=code, lines=lines)

    def wait_for_others(self) -> None:
        """Keeps process 0 alive until the others have ended: without it, JAX aborts them with a
        page of its own messages."""
        if self.rank.process == 0:
            deadline = time.monotonic() + 3
            for peer in self.peers:
                peer.connection.settimeout(max(deadline - time.monotonic(), 0.01))
                with contextlib.suppress(OSError):
                    while peer.connection.recv(1 << 16):
                        pass

    def agree(self, report: dict[str, Any], prompts: list[str]) -> list[str]:
        """Returns the prompts of process 0, once all processes have reported the same."""
        if self.rank.process:
            self.peers[0].send(report=report)
            return self.inbox.get()[2]
        reports = {0: report}
        while len(reports) < self.rank.processes:
            peer, _, theirs = self.inbox.get()
            reports[peer.process] = theirs
        if wrong := differences(reports):
            raise Disagreement("\n".join(wrong))
        for peer in self.peers:
            peer.send(go=prompts)
        return prompts

    def start(self) -> None:
        """Starts `jax.distributed` and the devices of all processes."""
        self.started = True
        if jax.config.jax_platforms == "cpu":  # type: ignore[attr-defined]
            check_name(self.peers)
        jax.config.update("jax_enable_preemption_service", False)  # which would ignore SIGTERM
        try:
            jax.distributed.initialize(
                self.rank.coordinator,
                self.rank.processes,
                self.rank.process,
                self.rank.devices,
                cluster_detection_method="deactivate",  # `find_rank` did that
                coordinator_bind_address=bind_address(self.rank),
                initialization_timeout=max(int(self.timeout), 10),
            )
            jax.devices()
        except RuntimeError as error:
            raise ValueError(f"jax.distributed does not start: {first_line(error)}") from None

    def leave(self) -> None:
        """Waits until all processes are done, and stops `jax.distributed`."""
        if self.rank.process:
            self.peers[0].send(done=True)
            self.inbox.get()
        else:
            for _ in self.peers:
                self.inbox.get()
            for peer in self.peers:
                peer.send(done=True)
        self.leaving.set()
        if self.started:
            jax.distributed.shutdown()

    def fail(self, error: BaseException) -> NoReturn:
        """Ends all processes because of an error in this one."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        code, lines = verdict(error)
        if self.started and lines:
            time.sleep(3 * GRACE)  # if another process caused it, `watch` says so first
        with self.ending:
            self.leaving.set()
        if code == DEATH:
            traceback.print_exception(error, file=self.stderr)
        else:
            self.write(lines)
        me = f"process {self.rank.process} on {socket.gethostname()}"
        told = lines if isinstance(error, Disagreement) else [f"{me}: {line}" for line in lines]
        self.tell_all(code, [f"{me} was interrupted"] if code == 130 else told)
        self.wait_for_others()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)  # at a regular exit, JAX would wait for the others


messages = itertools.count()  # that process 0 has shared


def share(message: str) -> str:
    """Returns the message of process 0 on every process. It goes through JAX's coordination service
    and not through the devices, so that whoever waits for one costs nothing. All processes must
    call this equally often."""
    client: Any = distributed.global_state.client
    number = next(messages)
    if jax.process_index() == 0:
        client.key_value_set(f"folio/{number}", message)
        if number >= REMEMBERED:  # no process is so far behind
            client.key_value_delete(f"folio/{number - REMEMBERED}")
        return message
    while True:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # it did not come yet
            return str(client.blocking_key_value_get(f"folio/{number}", 10_000))


def check_name(peers: list[Peer]) -> None:
    """ValueError if the CPUs of other hosts could not reach this one. They talk through Gloo, which
    gives them the address to which the host resolves its own name."""
    name, address = socket.gethostname(), "no address"
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
    pairs = [(peer.connection.getsockname()[0], peer.connection.getpeername()[0]) for peer in peers]
    elsewhere = any(here != there for here, there in pairs)
    if address == "no address" or (elsewhere and address.startswith("127.")):
        raise ValueError(
            f"this host's name, {name}, resolves to {address}; in /etc/hosts, give it the address "
            "by which other hosts reach it"
        )


def verdict(error: BaseException) -> tuple[int, list[str]]:
    """Returns the exit code for the error that ended a command, and the lines to print."""
    if isinstance(error, BrokenPipeError):
        return 0, []
    if isinstance(error, KeyboardInterrupt):
        return 130, []
    if isinstance(error, SystemExit):
        return int(error.code or 0), []
    if isinstance(error, (ValueError, OSError)):
        return 2, str(error).splitlines()
    if isinstance(error, jax.errors.JaxRuntimeError):
        return 2, [first_line(error)]
    return DEATH, traceback.format_exception_only(error)[-1].splitlines()


@contextlib.contextmanager
def joined(args: argparse.Namespace) -> Iterator[Group | None]:
    """Joins the processes that run the same command, and yields their group; None if this process
    runs alone. Whatever ends the body ends all of them."""
    if (rank := find_rank(args)) is None:
        yield None
        return
    group = Group(rank, args.join_timeout)
    try:
        group.join()
        yield group
        group.leave()
    except BaseException as error:
        group.fail(error)


def tell(args: argparse.Namespace, mistake: ValueError) -> None:
    """Says why this process does not take part: here at once, and to the others after they have
    connected. Then ends the process; but returns if it runs alone."""
    if (rank := find_rank(args)) is not None:
        group = Group(rank, args.join_timeout)
        group.write(verdict(mistake)[1])
        with contextlib.suppress(ValueError):
            group.join()
        group.stderr = open(os.devnull, "w")  # noqa: SIM115
        group.fail(mistake)
