"""Makes requests of prompts, and shows replies as they come, also in conversations."""

import contextlib
import json
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from io import TextIOWrapper
from typing import Any, NamedTuple

from common.command.arguments import option
from common.command.environment import handled
from common.loading.files import first_line, parse_json
from common.loading.generation import SETTINGS
from common.sampling import WHY_INVALID
from common.server.fields import Refused, fits, plain
from common.serving.load import Model
from common.serving.rules import check_grammar
from common.serving.serve import serve
from common.serving.session import Event, Request, Session, Stats, capacity_for, check_request
from common.sharding import DATA, round_up
from common.text.chat import encode_chat, end_of_turn, thinking_options
from common.text.grammar import behind_thoughts, json_grammar
from common.text.reply import ANALYSIS, FINAL
from common.text.tokenizer import Tokenizer, encode

Prompt = str | list[dict[str, Any]]  # a text, or the messages of a conversation
write = partial(print, end="", flush=True)


def read_line(line: str, where: str) -> Prompt:
    """Reads a line of a .jsonl file: an object with a text as `prompt`, or with `messages`."""
    try:
        content = parse_json(line)
        if fits(content, {"prompt": str}):
            return content["prompt"]
        if fits(content, {"messages": [dict]}):
            return [plain(message) for message in content["messages"]]
    except Refused as error:
        raise ValueError(f"{where}: {error}") from None
    except (ValueError, RecursionError):
        pass
    raise ValueError(f'{where}: expected {{"prompt": "a text"}} or {{"messages": [...]}} alone')


def read_prompts(args: Namespace) -> list[Prompt]:
    """Returns what to answer, from --prompt, --prompts or standard input."""
    prompts, file = list[Prompt](args.prompt or []), "standard input"
    try:
        for file in args.prompts:
            text = file.read_text("utf-8-sig")  # without a byte-order mark
            # Not splitlines, which also cuts at form feeds and at separators such as U+2028.
            lines = [(i, x) for i, x in enumerate(text.split("\n"), 1) if x.strip()]
            is_json = file.suffix.lower() in (".jsonl", ".json")
            prompts += [read_line(x, f"{file}:{i}") if is_json else x for i, x in lines]
        if not prompts and not args.prompts and sys.stdin and not sys.stdin.isatty():
            text = sys.stdin.read().removeprefix("\ufeff")
            prompts = [text] if text.strip() else []
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not UTF-8 text") from None
    if not prompts and not args.prompts and args.ckpt is args.adapter is None:
        sys.stderr.write("[without a prompt, the demo model continues ACT I.]\n")
        prompts = ["ACT I.\n\n"]
    if not prompts:
        raise ValueError("no prompt: give --prompt, --prompts FILE, --chat, or text on stdin")
    return prompts


def encode_prompt(model: Model, args: Namespace, prompt: Prompt) -> list[int]:
    """Encodes one prompt, through the chat template if the checkpoint has one."""
    tok = model.tokenizer
    if tok is not None and tok.chat_template is not None and not args.raw:
        messages = [dict(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        return encode_messages(tok, args, messages)
    if (args.system, args.think) != (None, None) or not isinstance(prompt, str):
        what = "--think or --no-think" if args.system is None else "--system"
        what = what if isinstance(prompt, str) else "a line with messages"
        raise ValueError(f"{what} needs a chat template, and there is none, or --raw was given")
    if tok is None:  # random weights of a lone config: any ids will do
        return [byte % model.config.vocab_size for byte in prompt.encode()]
    return encode(tok, prompt)


def encode_messages(tok: Tokenizer, args: Namespace, messages: list[dict[str, Any]]) -> list[int]:
    if args.system is not None:
        if messages[0]["role"] == "system":
            raise ValueError("--system does not go with messages that begin with one")
        messages = [dict(role="system", content=args.system), *messages]
    return encode_chat(tok, messages, **thinking_options(tok, args.think, None))


def make_request(model: Model, args: Namespace, ids: Sequence[int], index: int) -> Request:
    """The request of the prompt of this index. A schema holds for what follows the thoughts."""
    tok, settings = model.tokenizer, dict[str, Any](model.sampling if args.sampling else {})
    asked = {name: getattr(args, name) for name in SETTINGS}
    settings |= {name: value for name, value in asked.items() if value is not None}
    request = Request(ids, args.max_new_tokens, seed=(args.seed + index) % 2**32, **settings)
    if tok is None and (args.stop or args.json_schema):
        raise ValueError("--stop and --json-schema need a tokenizer, and this model has none")
    if tok is None:
        return request
    is_chat = tok.chat_template is not None and not args.raw
    ends = tok.stop_ids | (end_of_turn(tok) if is_chat else set())
    request = request._replace(stop_ids=ends, stop=args.stop, is_chat=is_chat)
    if args.json_schema is None:
        return request
    try:
        grammar = json_grammar(parse_json(args.json_schema.read_text("utf-8")))
        check_grammar(model, grammar)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--json-schema {args.json_schema}: {first_line(error)}") from None
    return request._replace(grammar=behind_thoughts(tok, ids, grammar) if is_chat else grammar)


def plan_prompts(
    model: Model, args: Namespace, texts: list[Prompt]
) -> tuple[list[Request], tuple[int, int]]:
    """Encodes and checks all prompts before any weight is loaded. Without a prompt, checks what a
    conversation or a server needs. Returns the requests, and the slots of the session with the
    positions of each: by default, as many as the longest prompt and its reply need."""
    tok, limit, rows = model.tokenizer, model.config.max_position_embeddings, model.mesh.shape[DATA]
    if args.chat and (tok is None or tok.chat_template is None):
        raise ValueError("--chat needs a checkpoint with a chat template, and this one has none")
    if args.serve and tok is None:
        raise ValueError("--serve needs a checkpoint with a tokenizer, and this one has none")
    ids = [encode_prompt(model, args, text) for text in texts]
    requests = [make_request(model, args, x, i) for i, x in enumerate(ids)]
    if args.max_len is not None and args.max_len > limit:
        raise ValueError(f"--max-len {args.max_len} is above max_position_embeddings, {limit}")
    slots = args.slots or round_up(1 if args.chat else min(len(texts) or 8, 8), rows)
    if slots % rows:
        raise ValueError(f"--slots {slots} cannot be split evenly over data={rows}")
    need = max(map(len, ids)) + args.max_new_tokens if texts else 4096
    capacity = args.max_len or capacity_for(need, limit)
    for i, request in enumerate(requests or [make_request(model, args, [0], 0)]):
        name = f"prompt {i + 1}" if texts else "the prompt"
        check_request(request, capacity, model.config, name)
        names = "top_k", "top_p", "min_p", *(() if args.random else ("seed",))
        given = [option(name) for name in names if getattr(args, name)]
        if given and not request.temperature:
            raise ValueError(f"{given[0]} needs a --temperature above 0")
    return requests, (slots, capacity)


class Reply(NamedTuple):
    """The reply to one prompt so far."""

    tokens: list[int]
    text: list[str]  # all that is shown
    answer: list[str]  # the text without the analysis before it
    finish: str | None = None
    seconds: float = 0.0  # from the start of the run to its newest token
    channel: str = FINAL  # of the newest token
    shown: str | None = None  # of the newest text


def extend(
    reply: Reply, event: Event, seconds: float, args: Namespace, tok: Tokenizer | None
) -> tuple[Reply, str]:
    """Adds a token to a reply; returns the reply, and the text to show for the token."""
    text = event.text if tok else f"{event.token} " if event.finish != "invalid" else ""
    if event.channel == FINAL:
        reply.answer.append(text)
    elif not (event.channel == ANALYSIS and args.show_analysis):
        text = ""
    shown = event.channel if text else reply.shown
    if reply.shown not in (None, shown):
        text = f"\n\n{text}"
    if event.finish != "invalid":
        reply.tokens.append(event.token)
    reply.text.append(text)
    new: Any = dict(finish=event.finish, seconds=seconds, channel=event.channel, shown=shown)
    return reply._replace(**new), text


def tell_rate(stats: Stats) -> None:
    """Shows the speed so far on a line that the next one overwrites, unless text goes there too."""
    if stats.decode_s and sys.stderr.isatty() and not sys.stdout.isatty():
        rate = stats.decode_tokens / stats.decode_s
        write(f"{stats.decode_tokens} tokens at {rate:.1f}/s\r", file=sys.stderr)


def note_end(reply: Reply, args: Namespace) -> None:
    """Says on stderr why a reply ended, unless it ended by itself or at --max-new-tokens."""
    if reply.finish == "invalid":
        sys.stderr.write(f"[the reply ends here: {WHY_INVALID}]\n")
    if reply.finish == "length" and args.json_schema:
        sys.stderr.write("[the JSON ends here, cut off: see --max-new-tokens]\n")
    if reply.finish == "length" and len(reply.tokens) < args.max_new_tokens:
        sys.stderr.write("[the reply ends here: its slot is full (see --max-len)]\n")
    if reply.finish == "length" and reply.channel != FINAL:
        sys.stderr.write("[no answer: the analysis before it took all of --max-new-tokens]\n")


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Yields a list that gets the signal on Ctrl-C or SIGTERM. A second one interrupts at once."""
    pressed: list[int] = []

    def handler(number: int, *_: Any) -> None:
        pressed.append(number)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)

    with handled(handler):
        yield pressed


def answer_prompts(
    session: Session, args: Namespace, prompts: list[Prompt], requests: list[Request]
) -> tuple[list[Reply], list[int]]:
    """Writes the answers to all prompts in order. Returns them, and signals that interrupted."""
    tok, replies = session.model.tokenizer, [Reply([], [], []) for _ in requests]
    shown, began = 0, time.perf_counter()

    def record(i: int) -> str:
        """Returns one line of JSON about prompt i."""
        reply = replies[i]
        fields: Any = dict(index=i, prompt=prompts[i], text="".join(reply.text))
        fields |= dict(prompt_tokens=len(requests[i].prompt), tokens=reply.tokens)
        fields |= dict(finish_reason=reply.finish or "interrupted", seconds=round(reply.seconds, 4))
        return json.dumps(fields, ensure_ascii=False) + "\n"

    events = serve(session, requests)
    with interruptible() as pressed, contextlib.closing(events):
        for event in events:
            i, seconds = event.request, time.perf_counter() - began
            replies[i], text = extend(replies[i], event, seconds, args, tok)
            tell_rate(session.stats)
            if i == shown and not args.json:
                write(text)
            while shown < len(replies) and replies[shown].finish:
                write(record(shown) if args.json else "\n")
                note_end(replies[shown], args)
                shown += 1
                if shown < len(replies) and not args.json:
                    # An empty line between answers; then the text of the next one so far.
                    write("\n" + "".join(replies[shown].text))
            if pressed:
                break
    for i in range(shown, len(replies)):  # interrupted
        if args.json:
            write(record(i))
        elif i == shown or replies[i].tokens:
            write("\n" if i == shown else "\n" + "".join(replies[i].text) + "\n")
    return replies, pressed


def converse(session: Session, args: Namespace) -> bool:
    """Holds a conversation on one slot; every turn reads only what is not cached yet. Ctrl-C ends a
    turn. Returns True if SIGTERM ended the conversation."""
    tok, messages = session.model.tokenizer, list[dict[str, Any]]()
    assert tok is not None
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is not UTF-8 is refused below
    while True:
        if sys.stdin.isatty():
            write("> ", file=sys.stderr)
        line = sys.stdin.readline()
        if not line:
            return False
        if not line.strip():
            continue
        asked = [*messages, dict(role="user", content=line.strip())]
        try:
            ids = encode_messages(tok, args, asked)
            request = make_request(session.model, args, ids, len(messages) // 2)
            check_request(request, session.capacity, session.model.config, "the conversation")
        except ValueError as error:
            sys.stderr.write(f"[{error}; this line is left out]\n")
            continue
        (reply,), pressed = answer_prompts(session, args, [line], [request])
        messages = [*asked, dict(role="assistant", content="".join(reply.answer))]
        if signal.SIGTERM in pressed:
            return True
