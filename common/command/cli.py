"""The command line of every model: a published checkpoint and a prompt in, text out.

stdout carries the text, or with --json one record per prompt, and nothing else; progress, the
summary and errors go to stderr. A user's mistake gets one line and exit code 2.
"""

import contextlib
import importlib
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
from jax.typing import DTypeLike

from common.command.arguments import check_options, parser, read_host_options
from common.command.converse import Prompt, answer_prompts, converse, plan_prompts, read_prompts
from common.command.environment import configure_jax, handled
from common.loading.checkpoint import progress_bar
from common.loading.files import first_line
from common.loading.shape import folder
from common.machines.bandwidth import experts_read, read_bandwidth, step_bytes
from common.machines.hosts import Facts, Rank, agree, facts_of, find_rank, join
from common.machines.mesh_choice import Plan, load_of
from common.serving.load import Model, cache_dtype, check_fits, open_model, read_weights
from common.serving.serve import close, step
from common.serving.session import PROMPT_CHUNK, Session, start_session
from common.sharding import DATA, axes_of, make_mesh, parse_mesh
from common.text.reply import has_channels
from common.text.tokenizer import load_tokenizer


def open_from(module: ModuleType, args: Namespace, prompts: int) -> Model:
    """Opens the model that the options name, without its weights."""
    names = ("revision", "dtype", "quant", "kv_quant", "random", "adapter")
    options: Any = {name: getattr(args, name) for name in names}
    axes: Any = parse_mesh(",".join(args.mesh))
    options["mesh"] = make_mesh(**axes) if axes else None
    slots, capacity = args.slots or min(prompts, 8), args.max_len or 2048
    model = open_model(module, args.ckpt, slots=slots, capacity=capacity, **options)
    if model.tokenizer is None and model.directory is not None:
        load_tokenizer(model.directory)  # says which files are missing
    return model


def open_draft(module: ModuleType, args: Namespace, model: Model) -> Model | str | None:
    """Opens the model that drafts, without its weights; or returns the name of another source."""
    if args.draft in (None, "lookup", "mtp"):
        return None if args.draft == "mtp" else args.draft
    family, _, ckpt = args.draft.rpartition(":")
    try:
        if family:
            if not (folder(module).parent / family / "model.py").exists():
                raise ValueError(f"there is no {family}/model.py")
            module = importlib.import_module(f"{family}.model")
        draft = open_model(module, ckpt, mesh=model.mesh, dtype=args.dtype, quant=args.quant)
        check_fits(model, draft)
    except (ValueError, OSError) as error:
        raise ValueError(f"--draft {args.draft}: {error}") from None
    return draft


def memory_of(device: jax.Device) -> int | None:
    """Returns the bytes of a device's memory; None if that is not known."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    known = hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None


def check_memory(
    models: Sequence[Model], slots: int, capacity: int, dtype: DTypeLike, keep: int = 0
) -> None:
    """ValueError if the weights and the caches of models that share a mesh need more memory than
    the devices have. `keep` slots are beside the others."""
    mesh, on_cpu = models[0].mesh, models[0].on_cpu
    device, rows = mesh.local_devices[0], mesh.shape[DATA]
    if (have := memory_of(device)) is None:
        return
    sharing = min(jax.local_device_count(), mesh.size) if on_cpu else 1
    weights = cache = 0
    for m in models:
        kept: Any = dict(dtype=m.dtype, cache_dtype=dtype, storage=m.storage, on_cpu=on_cpu)
        load = load_of(Plan(m.module, m.config, rows, capacity, **kept), mesh.shape)
        weights += sharing * load.weights
        # Beside the slots, each data shard has a place where prompts are read.
        cache += sharing * load.cache * (slots + keep + rows) // rows
    if weights + cache > have:
        need, room, all_ = (f"{x / 1e9:,.1f} GB" for x in (weights, cache, have))
        kept = f" and {keep} kept ones" if keep else ""
        raise ValueError(
            f"the weights take {need} and {slots} slots{kept} of {capacity} positions {room} with "
            f"those where prompts are read, but a device has {all_}: use fewer --slots, a smaller "
            "--max-len, --quant, or a larger --mesh"
        )


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
        # A host's virtual CPU devices share one memory.
        readers = jax.process_count() if model.on_cpu else model.mesh.size
        bandwidth = read_bandwidth() * readers
        share = experts_read(model.config, s.decode_tokens / s.decode_steps)
        read = step_bytes(model.weights, session.states[0].cache, s.filled / s.decode_steps, share)
        if s.drafts:
            parts.append(f"{100 * s.drafts_right / s.drafts:.0f}% of {s.drafts} drafts were right")
        reached = read * s.decode_steps / s.decode_s / bandwidth
        parts.append(f"{100 * reached:.0f}% of the {bandwidth / 1e9:.0f} GB/s read floor")
    return "; ".join(parts)


def answer_calls(session: Session, args: Namespace, listener: Any) -> None:
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


def abandon_stdout() -> None:
    """Nothing is written to stdout any more, so that nothing can fail at the exit."""
    with contextlib.suppress(OSError):  # a test's stdout is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def cut(line: str) -> str:
    """Cuts the middle out of a line that is too long for a terminal, whatever it quotes."""
    return line if len(line) <= 800 else f"{line[:500]} [...] {line[-250:]}"


@contextlib.contextmanager
def mistakes_on_one_line() -> Iterator[None]:
    """Exit code 2 and a line for each mistake of the user; 130 on Ctrl-C or SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    streams = sys.stdout, sys.stderr  # which `join` replaces
    try:
        yield
    except BrokenPipeError:  # the reader has gone: nothing more to say
        abandon_stdout()
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
        is_page = isinstance(error, jax.errors.JaxRuntimeError)
        lines = [first_line(error)] if is_page else str(error).splitlines()
        streams[1].write("".join(f"error: {cut(line)}\n" for line in lines))
        abandon_stdout()  # which may have been the mistake
        sys.exit(2)
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.stdout, sys.stderr = streams


@mistakes_on_one_line()
def main(
    module: ModuleType, argv: Sequence[str] | None = None, drafting: ModuleType | None = None
) -> None:
    """Runs the command line of a model file: checks everything, then loads, then generates.
    With --draft mtp, the module `drafting` takes its place."""
    name, mistake = str(module.__package__), None
    try:
        args = parser(name).parse_args(argv)
    except ValueError as error:
        args, mistake = read_host_options(argv), error
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    rank = None if args.dry_run else find_rank(args)

    def prepare() -> tuple[list[Prompt], Facts]:
        """Checks what needs no device. Returns prompts (of process 0), and what all must share."""
        if mistake is not None:
            raise mistake
        check_options(args)
        if args.draft == "mtp" and drafting is None:
            raise ValueError(f"--draft mtp: files of {name} hold no layer that drafts")
        if args.chat and rank is not None:
            raise ValueError("--chat talks to one process, and here are several")
        facts = Facts() if rank is None else facts_of(module, args)
        later = args.chat or args.serve or args.dry_run or (rank and rank.process)
        return [] if later else read_prompts(args), facts

    if rank is not None:
        with handled(signal.SIG_DFL):  # Python's own do not run while JAX waits
            join(rank)
    prompts = prepare()[0] if rank is None else agree(prepare)
    module = drafting if args.draft == "mtp" and drafting is not None else module
    if args.dry_run:
        from common.command.dryrun import print_dry_runs  # a run need not wait for this import

        jax.config.update("jax_platforms", "cpu")
        with handled(signal.SIG_DFL):  # Python's own would wait for the compiler
            return print_dry_runs(module, args)
    run(module, args, prompts, rank)


def run(module: ModuleType, args: Namespace, prompts: list[Prompt], rank: Rank | None) -> None:
    """Opens the model without weights, checks prompts and memory, loads the weights, generates."""
    configure_jax(parse_mesh(",".join(args.mesh)), rank.processes if rank else 1)
    listener = None
    if args.serve and not (rank and rank.process):
        try:
            from common.server.http import open_listener  # an extra, and only this needs it
        except ModuleNotFoundError as error:
            raise ValueError(f"--serve needs pip install -e '.[serve]' ({error})") from None
        listener = open_listener(args)
    model = open_from(module, args, len(prompts) or (8 if args.serve else 1))
    if args.sampling and not model.sampling:
        sys.stderr.write("[generation_config.json recommends nothing for --sampling]\n")
    for note in model.notes:
        sys.stderr.write(f"[{note}]\n")
    tok = None if args.raw else model.tokenizer
    if prompts and args.ckpt and tok and tok.chat_template is None:
        sys.stderr.write("[no chat template: the text of a prompt is continued as it is]\n")
    if args.show_analysis and not (tok and tok.chat_template and has_channels(tok)):
        raise ValueError("--show-analysis: no channels in this model's answers, or --raw was given")
    requests, sizes = plan_prompts(model, args, prompts)
    cache = cache_dtype(model.dtype, model.on_cpu, args.kv_quant)
    smaller = open_draft(module, args, model)
    models = [x for x in (model, smaller) if isinstance(x, Model)]
    check_memory(models, *sizes, dtype=cache, keep=args.keep)
    began = time.perf_counter()
    model, *rest = [
        read_weights(x, progress_bar(sys.stderr), args.seed, args.allow_nonfinite) for x in models
    ]
    load_s = time.perf_counter() - began
    draft, logprobs = rest[0] if rest else smaller, bool(args.serve) and args.draft != "mtp"
    picked: Any = {name: getattr(args, name) for name in ("keep", "keep_host", "draft_tokens")}
    picked |= dict(dtype=cache, draft=draft, reuse_multiple=1 if args.chat else PROMPT_CHUNK)
    session = start_session(model, *sizes, logprobs=logprobs, **picked)
    code = 0
    with jax.profiler.trace(args.profile) if args.profile else contextlib.nullcontext():
        if args.serve:
            answer_calls(session, args, listener)
        elif args.chat:
            code = 130 * converse(session, args)
        else:
            replies, pressed = answer_prompts(session, args, prompts, requests)
            code = 130 if pressed else int(any(x.finish == "invalid" for x in replies))
    sys.stderr.write(f"[{summary(session, load_s)}]\n")
    if code:
        sys.exit(code)
