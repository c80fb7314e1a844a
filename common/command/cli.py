"""The command line of every model: a published checkpoint and a prompt in, text out.

stdout carries the text and nothing else; progress, the summary and errors go to stderr. A user's
mistake gets one line and exit code 2.
"""

import argparse
import contextlib
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax

from common.command.arguments import parser, read_host_options
from common.command.converse import (
    Job,
    answer_prompts,
    converse,
    encode_prompt,
    make_request,
    read_prompts,
)
from common.command.environment import check_xla_flags, configure_jax, open_streams
from common.command.memory import check_memory
from common.loading.checkpoint import progress_bar
from common.machines.bandwidth import experts_read, parallel_readers, read_bandwidth, step_bytes
from common.machines.hosts import Group, joined, tell, verdict
from common.machines.preflight import check_all_used, report
from common.serving.drafts import check_fits
from common.serving.load import Model, open_model, read_weights
from common.serving.serve import close, step
from common.serving.session import (
    DRAFT_TOKENS,
    PROMPT_CHUNK,
    Session,
    cache_dtype,
    capacity_for,
    check_request,
    start_session,
)
from common.sharding import DATA, axes_of, make_mesh, parse_mesh, round_up
from common.text.harmony import speaks_harmony


def parse(name: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options. If they have a mistake, tells it to the other processes, if any."""
    try:
        return parser(name).parse_args(argv)
    except ValueError as mistake:
        with contextlib.suppress(ValueError):
            tell(read_host_options(argv), mistake)
        raise


def agree(group: Group, module: ModuleType, args: argparse.Namespace) -> None:
    """Waits until all processes report the same, and takes over the prompts of process 0."""
    if args.chat:
        raise ValueError("--chat talks to one process, and here are several")
    prompts = read_prompts(args) if group.rank.process == 0 and not args.serve else []
    args.prompt, args.prompts = group.agree(report(module, args), prompts), None


def open_from(module: ModuleType, args: argparse.Namespace, prompts: int) -> Model:
    """Opens the model that the options name, without its weights."""
    axes: Any = parse_mesh(",".join(args.mesh))
    return open_model(
        module,
        args.ckpt,
        revision=args.revision,
        mesh=make_mesh(**axes) if axes else None,
        dtype=args.dtype,
        quant=args.quant,
        random=args.random,
        slots=args.slots or min(prompts, 8),
        capacity=args.max_len or 2048,
    )


def open_draft(module: ModuleType, args: argparse.Namespace, model: Model) -> Model | str | None:
    """Opens the model that drafts, without its weights; or returns the name of another source."""
    if args.draft in (None, "lookup", "auto", "mtp"):
        return None if args.draft == "mtp" else args.draft
    family, _, ckpt = args.draft.rpartition(":")
    try:
        if family and not family.isidentifier():  # such as "."
            raise ModuleNotFoundError
        if family:
            module = importlib.import_module(f"{family}.model")
        draft = open_model(module, ckpt, mesh=model.mesh, dtype=args.dtype, quant=args.quant)
        check_fits(model, draft)
    except ModuleNotFoundError:
        raise ValueError(f"--draft {args.draft}: there is no {family}/model.py") from None
    except (ValueError, OSError) as error:
        raise ValueError(f"--draft {args.draft}: {error}") from None
    return draft


MOST_DRAFTS = 32  # a step samples each of them by code of its own, which takes long to compile


class Sizes(NamedTuple):
    """The slots of a session, and the positions per slot."""

    slots: int
    capacity: int


def sizes_for(model: Model, args: argparse.Namespace, need: int, prompts: int) -> Sizes:
    """Returns the sizes for `prompts` prompts. A slot gets --max-len positions; by default, as many
    as the longest prompt and its reply `need`. It never gets more than the model has."""
    limit, rows = model.config.max_position_embeddings, model.mesh.shape[DATA]
    if args.max_len is not None and not 1 <= args.max_len <= limit:
        raise ValueError(
            f"--max-len {args.max_len} is not between 1 and the model's max_position_embeddings, "
            f"{limit}"
        )
    slots = round_up(min(prompts, 8), rows) if args.slots is None else args.slots
    if slots < 1:
        raise ValueError(f"--slots {slots}: must be at least 1")
    if slots % rows:
        raise ValueError(f"--slots {slots} cannot be split evenly over data={rows}")
    return Sizes(slots, args.max_len or capacity_for(need, limit))


def note_slots(sizes: Sizes, prompts: int, rows: int) -> None:
    """Says if --slots asks for more than the prompts, split over `rows` data shards, can use."""
    if sizes.slots > round_up(prompts, rows):
        what = f"{sizes.slots} slots for {prompts} prompt{'s' * (prompts > 1)}"
        sys.stderr.write(f"[{what}: empty slots are computed too, fewer are faster]\n")


def plan_prompts(model: Model, args: argparse.Namespace, texts: list[str]) -> tuple[Job, Sizes]:
    """Encodes and checks all prompts before any weight is loaded."""
    ids = [encode_prompt(model, args, text) for text in texts]
    requests = [make_request(args, model.tokenizer, x, i) for i, x in enumerate(ids)]
    sizes = sizes_for(model, args, max(map(len, ids)) + args.max_new_tokens, len(texts))
    for i, request in enumerate(requests):
        check_request(request, sizes.capacity, model.config, f"prompt {i + 1}")
    return Job(texts, requests), sizes


def plan_later(model: Model, args: argparse.Namespace) -> tuple[Job, Sizes]:
    """Checks what a conversation or a server needs; its prompts come later."""
    tok = model.tokenizer
    if args.chat and (tok is None or tok.chat_template is None):
        raise ValueError("--chat needs a checkpoint with a chat template, and this one has none")
    if tok is None:
        raise ValueError("--serve needs a checkpoint with a tokenizer, and this one has none")
    need, rows = min(model.config.max_position_embeddings, 4096), model.mesh.shape[DATA]
    sizes = sizes_for(model, args, need, rows if args.chat else 8)
    request = make_request(args, tok, [0], 0)
    check_request(request, sizes.capacity, model.config)
    return Job([], []), sizes


def summary(session: Session, load_s: float) -> str:
    """Returns one line: seconds, rates, and how much of the measured bandwidth decoding used."""
    s, model = session.stats, session.model
    parts = [f"mesh {axes_of(model.mesh)}"] if model.mesh.size > 1 else []
    parts += [f"load {load_s:.1f} s", f"first token after {s.first_token_s:.2f} s"]
    parts.append(f"compile {s.compile_s:.1f} s in all")
    if s.prefill_timed and s.prefill_s:
        parts.append(f"prefill {s.prefill_tokens} tokens at {s.prefill_timed / s.prefill_s:.0f}/s")
    if s.cached_tokens:
        parts.append(f"{s.cached_tokens} prompt tokens already cached")
    if s.decode_tokens and s.decode_s:
        parts.append(f"decode {s.decode_tokens} tokens at {s.decode_tokens / s.decode_s:.1f}/s")
        bandwidth = read_bandwidth() * parallel_readers(model.mesh)
        steps = max(s.decode_steps, 1)
        share = experts_read(model.config, s.decode_tokens / steps)
        read = step_bytes(model.weights, session.states[0].cache, s.filled / steps, share)
        if s.drafts:
            parts.append(f"{100 * s.drafts_right / s.drafts:.0f}% of {s.drafts} drafts were right")
        reached = read * s.decode_steps / s.decode_s
        parts.append(
            f"{100 * reached / bandwidth:.0f}% of the {bandwidth / 1e9:.0f} GB/s read floor"
        )
    return "; ".join(parts)


UNUSED_IN_DRY_RUN = (
    *("chat", "prompt", "prompts", "system", "profile", "distributed"),
    *("keep", "keep_host", "stop", "serve"),
)
UNUSED_WHEN_SERVING = (
    *("chat", "prompt", "prompts", "system", "stop", "raw", "json", "show_analysis"),
    *("temperature", "top_k", "top_p", "min_p", "max_new_tokens"),  # which the requests say
)
OF_SERVE = ("api_key", "queue", "grace", "allow_origin")
OF_DRY_RUN = ("layers", "implementation", "hlo")


def refuse(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """ValueError if one of these options was given, and not its default."""
    defaults = parser("").parse_args([])
    for name in names:
        if getattr(args, name) != getattr(defaults, name):
            raise ValueError(f"--{name.replace('_', '-')} {why}")


def check_options(args: argparse.Namespace) -> None:
    """ValueError if options contradict each other."""
    if args.chat and (args.json or args.raw or args.prompt or args.prompts):
        raise ValueError(
            "--chat reads standard input, so give no --json, --raw, --prompt or --prompts"
        )
    if args.serve == "":
        raise ValueError("--serve: give HOST:PORT, such as 127.0.0.1:8000")
    if args.serve:
        refuse(args, UNUSED_WHEN_SERVING, "does not go with --serve")
    else:
        refuse(args, OF_SERVE, "goes with --serve only")
    if args.dry_run:
        refuse(args, UNUSED_IN_DRY_RUN, "does not go with --dry-run, which generates nothing")
    else:
        refuse(args, OF_DRY_RUN, "goes with --dry-run only")
    if len(args.mesh) > 1 and not args.dry_run:
        raise ValueError(f"--mesh {' '.join(args.mesh)}: only --dry-run takes several meshes")
    if args.revision is not None and args.ckpt is None:
        raise ValueError("--revision goes with a --ckpt of the hub only")
    limits = dict.fromkeys(("keep", "keep_host", "queue", "grace"), (0, 10**9))
    limits["draft_tokens"] = 1, MOST_DRAFTS
    for name, (least, most) in limits.items():
        if (value := getattr(args, name)) is not None and not least <= value <= most:
            what = f"at least {least}" if not value > most else f"at most {most}"
            raise ValueError(f"--{name.replace('_', '-')} must be {what}, got {value}")
    if args.draft_tokens is not None and args.draft in (None, "mtp"):
        raise ValueError("--draft-tokens goes with --draft lookup, auto, or a model")
    if args.dry_run and args.draft not in (None, "mtp"):
        raise ValueError(f"--draft {args.draft} does not go with --dry-run: it takes mtp alone")
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed {args.seed} is not in [0, 2**32)")


def open_listener(args: argparse.Namespace) -> socket.socket:
    """Listens where --serve says. ValueError if that cannot be."""
    try:
        from common.server.http import key_of, listen  # an extra, and only this needs it
    except ModuleNotFoundError as error:
        raise ValueError(f"--serve needs pip install 'folio-jax[serve]' ({error})") from None
    key_of(args)
    return listen(args.serve)


def answer_calls(
    session: Session, args: argparse.Namespace, listener: socket.socket | None
) -> bool:
    """Serves until it is told to end. Process 0 listens, and the others follow."""
    if listener is not None:
        from common.server.http import serve_http

        serve_http(session, args, listener)
        close(session)
        step(session)
    else:  # a first signal is for process 0, which ends the replies and then all processes
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, _: signal.signal(n, signal.default_int_handler))
    while not session.closed:
        step(session)
    return False


def check_profile(args: argparse.Namespace) -> None:
    """OSError if a profile could not be written: it comes before the run, not after it."""
    if args.profile is not None:
        if Path(args.profile).is_file():
            raise NotADirectoryError(f"--profile {args.profile} is a file, not a directory")
        Path(args.profile).mkdir(parents=True, exist_ok=True)
        if not os.access(args.profile, os.W_OK | os.X_OK):
            raise PermissionError(f"--profile {args.profile}: cannot be written")


def note_profile(directory: str) -> None:
    """Prints which file of a profile to open, and where."""
    traces = sorted(
        Path(directory).glob("**/*.trace.json.gz"), key=lambda file: file.stat().st_mtime
    )
    if traces:
        sys.stderr.write(f"[profile: open {traces[-1]} at https://ui.perfetto.dev]\n")


def check_analysis(model: Model, args: argparse.Namespace) -> None:
    tok = model.tokenizer
    chat = tok is not None and tok.chat_template is not None and not args.raw
    if args.show_analysis and not (tok and chat and speaks_harmony(tok)):
        raise ValueError(
            "--show-analysis: this model does not answer in channels, or --raw was given"
        )


def abandon_stdout() -> None:
    """Redirects stdout to the null device: later writes, and the flush on exit, must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def cut(line: str) -> str:
    """Cuts the middle out of a line that is too long for a terminal, whatever it quotes."""
    return line if len(line) <= 800 else f"{line[:500]} [...] {line[-250:]}"


@contextlib.contextmanager
def mistakes_on_one_line() -> Iterator[None]:
    """Ends the program with exit code 2 and one line for each mistake of the user, and with 130 on
    Ctrl-C or SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except BrokenPipeError:  # the reader has gone: nothing more to say
        abandon_stdout()
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        _, lines = verdict(error)
        sys.stderr.write("".join(f"error: {cut(line)}\n" for line in lines))
        try:
            sys.stdout.flush()
        except OSError:  # this may have been the mistake
            abandon_stdout()
        sys.exit(2)
    finally:
        signal.signal(signal.SIGTERM, before)


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@mistakes_on_one_line()
def main(
    module: ModuleType, argv: Sequence[str] | None = None, drafting: ModuleType | None = None
) -> None:
    """Runs the command line of a model file: checks everything, then loads, then generates.
    With --draft, the module `drafting` takes its place."""
    open_streams()
    args = parse(str(module.__package__), argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with contextlib.nullcontext() if args.dry_run else joined(args) as group:
        run(module, args, drafting, group)


def run(
    module: ModuleType, args: argparse.Namespace, drafting: ModuleType | None, group: Group | None
) -> None:
    """Checks the options, agrees with the other processes, opens the model without its weights,
    encodes and checks the prompts, checks the memory, loads the weights, and then generates."""
    if args.draft == "mtp":
        if drafting is None:
            raise ValueError(
                f"--draft mtp: files of {module.__package__} hold no layer that drafts"
            )
        module = drafting
    check_options(args)
    check_profile(args)
    check_xla_flags()
    if args.dry_run:
        from common.command.dryrun import print_dry_runs  # a run need not wait for this import

        jax.config.update("jax_platforms", "cpu")
        return print_dry_runs(module, args)
    axes = parse_mesh(",".join(args.mesh))
    if group:
        agree(group, module, args)
    configure_jax(axes, not args.no_compile_cache, group)
    listener = open_listener(args) if args.serve and jax.process_index() == 0 else None
    texts = [] if args.chat or args.serve else read_prompts(args)
    model = open_from(module, args, len(texts) or (8 if args.serve else 1))
    check_all_used(model.mesh)
    check_analysis(model, args)
    job, sizes = plan_prompts(model, args, texts) if texts else plan_later(model, args)
    cache = cache_dtype(model.dtype, model.on_cpu, args.kv_quant)
    smaller = open_draft(module, args, model)
    models = [x for x in (model, smaller) if isinstance(x, Model)]
    check_memory(models, sizes.slots + args.keep, sizes.capacity, dtype=cache)
    if args.slots is not None and not args.serve:
        note_slots(sizes, max(1, len(texts)), model.mesh.shape[DATA])
    began = time.perf_counter()
    model = read_weights(model, progress_bar(sys.stderr), args.seed, args.allow_nonfinite)
    if isinstance(smaller, Model):
        smaller = read_weights(smaller, progress_bar(sys.stderr), args.seed, args.allow_nonfinite)
    load_s = time.perf_counter() - began
    session = start_session(
        model,
        *sizes,
        dtype=cache,
        keep=args.keep,
        keep_host=args.keep_host,
        reuse_multiple=1 if args.chat else PROMPT_CHUNK,
        draft=smaller,
        draft_tokens=args.draft_tokens or DRAFT_TOKENS,
        logprobs=bool(args.serve) and args.draft != "mtp",
    )
    with jax.profiler.trace(args.profile) if args.profile else contextlib.nullcontext():
        if args.serve:
            interrupted = answer_calls(session, args, listener)
        else:
            interrupted = (converse if args.chat else answer_prompts)(session, args, job, write)
    if args.profile:
        note_profile(args.profile)
    sys.stderr.write(f"[{summary(session, load_s)}]\n")
    if interrupted:
        sys.exit(130)
