"""The command line of every model: a published checkpoint and a prompt in, text out.

stdout carries the text (or, with --json, one record per prompt) and nothing else; progress, the
summary and errors go to stderr. A user's mistake gets one line and exit code 2.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

EXAMPLES = """
examples:
  python -m {name}.main                             the small model that the repository ships
  python -m {name}.main --ckpt DIR_OR_HUB_ID --prompt "Hello"
  python -m {name}.main --ckpt DIR_OR_HUB_ID --chat --system "Answer in verse."
  python -m {name}.main --ckpt DIR_OR_HUB_ID --prompts questions.txt --json > answers.jsonl
  python -m {name}.main --ckpt DIR_OR_HUB_ID --quant int8 --kv-quant int8 --mesh expert=4,tensor=2
"""


def parser(name: str) -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(
        prog=f"python -m {name}.main",
        description=f"Generate text with a {name} checkpoint on CPU, GPU or TPU.",
        epilog=EXAMPLES.format(name=name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = ap.add_argument_group("model")
    model.add_argument(
        "--ckpt", help="directory or hub id of a published checkpoint (default: the embedded model)"
    )
    model.add_argument("--revision", help="branch, tag or commit of a hub repository")
    model.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: the checkpoint's own"
    )
    model.add_argument(
        "--quant", choices=["int8"], help="weights as int8 with a scale per output channel"
    )
    model.add_argument(
        "--kv-quant", choices=["int8"], help="cache as int8 with a scale per token and head"
    )
    model.add_argument(
        "--random",
        action="store_true",
        help="random weights; --ckpt may then be a lone config.json or a named shape",
    )
    model.add_argument(
        "--mesh",
        default="",
        metavar="AXES",
        help="e.g. data=1,expert=1,tensor=8 (default: all devices on tensor)",
    )
    text = ap.add_argument_group("prompts (default: standard input, whole)")
    text.add_argument("--prompt", action="append", metavar="P", help="may be given several times")
    text.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line")
    text.add_argument(
        "--chat", action="store_true", help="a conversation; the cache is kept between turns"
    )
    text.add_argument("--system", metavar="S", help="system message")
    text.add_argument(
        "--raw",
        action="store_true",
        help="the prompt as it is, without the checkpoint's chat template",
    )
    text.add_argument(
        "--show-analysis",
        action="store_true",
        help="also what a model that answers in channels (GPT-OSS) thinks before it answers",
    )
    sampling = ap.add_argument_group("sampling (default: greedy)")
    sampling.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P")
    sampling.add_argument(
        "--seed", type=int, default=0, metavar="S", help="prompt i (from 0) uses seed S + i"
    )
    run = ap.add_argument_group("running")
    run.add_argument(
        "--max-len",
        type=int,
        metavar="N",
        help="cache positions a slot (default: what the prompts need)",
    )
    run.add_argument(
        "--slots", type=int, metavar="N", help="prompts decoded together (default: up to 8)"
    )
    run.add_argument(
        "--json", action="store_true", help="one JSON record per prompt instead of text"
    )
    run.add_argument("--profile", metavar="DIR", help="write a profiler trace of the generation")
    run.add_argument(
        "--no-compile-cache", action="store_true", help="do not keep compiled programs between runs"
    )
    run.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes (a TPU pod): run it on each",
    )
    return ap


def parse_mesh(text: str) -> dict[str, int]:
    """{"tensor": 8} of "tensor=8"; ValueError names what is wrong."""
    axes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if (
            name not in ("data", "expert", "tensor")
            or not size.isdigit()
            or int(size) < 1
            or name in axes
        ):
            raise ValueError(
                f"--mesh {text!r}: expected data=N,expert=N,tensor=N, each at most once"
            )
        axes[name] = int(size)
    return axes


def has_accelerator() -> bool:
    """Whether this machine may have a device besides its CPU; only asked where libtpu, which comes
    with the tests, would go looking for a TPU."""
    if importlib.util.find_spec("libtpu") is None:
        return True
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    google = any(file.read_text().strip() == "0x1ae0" for file in vendors)
    return google or any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))


def configure_jax(axes: dict[str, int], compile_cache: bool, distributed: bool) -> None:
    """Settings that must come before the first device is touched."""
    import jax

    if not os.environ.get("JAX_PLATFORMS") and not has_accelerator():
        # A libtpu that finds no TPU complains at length, and crashes the profiler.
        jax.config.update("jax_platforms", "cpu")
    need = 1
    for size in axes.values():
        need *= size
    if need > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # A mesh can be tried on a laptop; other platforms ignore this.
        jax.config.update("jax_num_cpu_devices", need)
    if compile_cache:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "folio" / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    if distributed:
        jax.distributed.initialize()


def default_mesh(axes: dict[str, int], config: Any) -> Any:
    """The mesh asked for, or all devices on `tensor` as far as the model has heads."""
    import jax

    from common.sharding import make_mesh

    devices = jax.devices()
    if axes:
        return make_mesh(**axes, devices=devices)
    return make_mesh(tensor=min(len(devices), config.num_attention_heads), devices=devices)


class Source(NamedTuple):
    """A checkpoint whose small files are read and whose weights are not."""

    model: ModuleType
    config: Any
    mesh: Any
    dtype: Any
    directory: Path | None  # None: --random runs a shape alone, without a tokenizer
    tokenizer: Any


def read_shape(name: str, args: argparse.Namespace) -> tuple[dict[str, Any], Path | None]:
    """The parsed config.json and the directory it lies in, or None for a shape alone."""
    from common.checkpoint import locate, read_config

    if args.ckpt is None:
        directory = Path(__file__).parent.parent / name / "embedded"
        return read_config(directory), directory
    if args.random:
        shapes = importlib.import_module(f"{name}.shapes").SHAPES
        if args.ckpt in shapes:
            return shapes[args.ckpt], None
        if Path(args.ckpt).is_file():
            return json.loads(Path(args.ckpt).read_text(encoding="utf-8")), None
    directory = locate(args.ckpt, args.revision)
    return read_config(directory), directory


def stored_dtype(directory: Path | None, args: argparse.Namespace) -> str:
    """float32 if the largest tensor is; for a config.json that does not say, as the oldest do."""
    from common.checkpoint import open_tensors

    if directory is None or args.random:
        return "bfloat16"
    tensors = open_tensors(directory).values()
    largest = max(tensors, key=lambda tensor: math.prod(tensor.shape), default=None)
    return "float32" if largest is not None and largest.dtype == "F32" else "bfloat16"


def open_source(name: str, args: argparse.Namespace, axes: dict[str, int]) -> Source:
    """Reads config and tokenizer; ValueError or OSError for a user's mistake."""
    import jax.numpy as jnp

    from common.sharding import model_shards
    from common.tokenizer import load_tokenizer

    model = importlib.import_module(f"{name}.model")
    hf, directory = read_shape(name, args)
    try:
        config = model.config_from_hf(hf)
    except KeyError as missing:
        raise ValueError(f"config.json has no {missing}: is this a {name} checkpoint?") from None
    stored = hf.get("torch_dtype") or hf.get("dtype") or stored_dtype(directory, args)
    dtype = jnp.dtype(args.dtype or ("float32" if stored == "float32" else "bfloat16"))
    mesh = default_mesh(axes, config)
    model.weight_shapes(config, model_shards(mesh))  # refuses what the mesh cannot split
    tokenizer = None if directory is None else load_tokenizer(directory)
    return Source(model, config, mesh, dtype, directory, tokenizer)


def weight_form(source: Source, args: argparse.Namespace) -> Any:
    """How the matrices are stored (common.quant)."""
    from common.quant import INT8, TRANSPOSED

    if args.quant:
        return INT8
    on_cpu = source.mesh.devices.flat[0].platform == "cpu"
    return TRANSPOSED if on_cpu and source.dtype == "float32" else None


def load(source: Source, args: argparse.Namespace) -> tuple[Any, float]:
    """The weights on the mesh, and the seconds that took."""
    import jax

    from common.checkpoint import load_weights, progress_bar, random_weights, rows_together
    from common.sharding import model_shards

    began, model, config, mesh = time.perf_counter(), source.model, source.config, source.mesh
    shards, form = model_shards(mesh), weight_form(source, args)
    padded, specs = model.weight_shapes(config, shards), model.weight_specs(config)
    if args.random or source.directory is None:
        weights = random_weights(padded, specs, mesh, source.dtype, args.seed, form=form)
        weights = rows_together(weights)
    else:
        weights = load_weights(
            source.directory,
            model.checkpoint_table(config, shards),
            model.weight_shapes(config),
            padded,
            specs,
            mesh,
            source.dtype,
            form=form,
            progress=progress_bar(sys.stderr),
        )
    return jax.block_until_ready(weights), time.perf_counter() - began


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The texts to answer, from --prompt, --prompts or standard input."""
    prompts = list(args.prompt or [])
    if args.prompts:
        prompts += [
            line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    if not prompts and not args.prompts and not sys.stdin.isatty():
        prompts = [text] if (text := sys.stdin.read()).strip() else []
    if not prompts and not args.prompts and args.ckpt is None:
        prompts = ["ACT I.\n\n"]
    if not prompts:
        raise ValueError(
            "no prompt: give --prompt, --prompts FILE, --chat, or text on standard input"
        )
    return prompts


def encode_prompt(source: Source, args: argparse.Namespace, text: str) -> list[int]:
    """Token ids of one prompt, through the chat template where the checkpoint has one."""
    from common.tokenizer import encode, encode_chat

    tok = source.tokenizer
    if tok is None:  # random weights of a lone config: any ids will do
        return [byte % source.config.vocab_size for byte in text.encode()]
    if args.raw or tok.chat_template is None:
        if args.system:
            raise ValueError(
                "--system needs a chat template: this checkpoint has none, or --raw was given"
            )
        ids = encode(tok, text)
    else:
        ids = encode_chat(tok, messages(args, [("user", text)]))
    if max(ids, default=0) >= source.config.vocab_size:
        raise ValueError(
            f"the tokenizer made id {max(ids)}, but the model has {source.config.vocab_size}"
        )
    return ids


def messages(args: argparse.Namespace, turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    system = [("system", args.system)] if args.system else []
    return [{"role": role, "content": content} for role, content in (*system, *turns)]


def capacity_for(config: Any, need: int, max_len: int | None) -> int:
    """Cache positions a slot: --max-len, or the power of two that `need` fits in; never beyond the
    model's context."""
    limit = config.max_position_embeddings
    if max_len is not None and not 1 <= max_len <= limit:
        raise ValueError(
            f"--max-len {max_len} is not between 1 and the model's max_position_embeddings, {limit}"
        )
    return max_len or min(limit, max(512, 1 << (need - 1).bit_length()))


def make_engine(source: Source, args: argparse.Namespace, need: int, prompts: int) -> Any:
    """The engine's shapes, with no weights yet."""
    import jax.numpy as jnp

    from common.serve import Engine
    from common.sharding import DATA, round_up

    rows = source.mesh.shape[DATA]
    slots = round_up(min(prompts, 8), rows) if args.slots is None else args.slots
    if slots < 1 or slots % rows:
        raise ValueError(f"--slots {slots} cannot be split evenly over data={rows}")
    if args.kv_quant:
        cache_dtype: Any = jnp.dtype("int8")
    else:  # XLA's CPU compiler rewrites all of a bfloat16 cache at every update of it
        on_cpu = source.mesh.devices.flat[0].platform == "cpu"
        cache_dtype = jnp.dtype("float32") if on_cpu else source.dtype
    capacity = capacity_for(source.config, need, args.max_len)
    return Engine(source.model, source.config, source.mesh, None, slots, capacity, cache_dtype)


def make_request(args: argparse.Namespace, ids: Sequence[int], index: int) -> Any:
    from common.serve import Request

    knobs = (args.temperature, args.top_k, args.top_p, args.min_p, args.seed + index)
    return Request(ids, args.max_new_tokens, *knobs)


class Reply(NamedTuple):
    """What one prompt got so far."""

    tokens: list[int]
    text: list[str]  # what is shown
    answer: list[str]  # without what the model thought before
    stream: Any
    finish: str | None = None
    seconds: float = 0.0  # from the start of the run to its newest token
    place: Any = None  # in the channels of a reply that has some
    shown: str | None = None  # the channel of the newest text


def start_reply(tok: Any, args: argparse.Namespace, context: Sequence[int] = ()) -> Reply:
    """An empty reply; `context` is the prompt that its text continues, if it does."""
    from common.harmony import Place, speaks_harmony
    from common.tokenizer import stream_start

    if tok is None:
        return Reply([], [], [], None)
    chat = tok.chat_template is not None and not args.raw
    place = Place() if chat and speaks_harmony(tok) else None
    return Reply([], [], [], stream_start(tok, context), place=place)


def extend(
    tok: Any, reply: Reply, event: Any, seconds: float, args: argparse.Namespace
) -> tuple[Reply, str]:
    """A reply with one more token, and the text that is to be shown for it."""
    from common.harmony import ANALYSIS, FINAL, follow
    from common.tokenizer import stream_flush, stream_push

    stream, place, text = reply.stream, reply.place, ""
    channel: str | None = FINAL if place is None else place.channel
    if tok is None:
        text = f"{event.token} "
    elif event.token not in tok.stop_ids:
        if place is not None:
            place, channel = follow(tok, place, event.token)
        if channel == FINAL or (channel == ANALYSIS and args.show_analysis):
            stream, text = stream_push(tok, stream, event.token)
    if event.finish and tok is not None:
        text += stream_flush(tok, stream)
    shown = channel if text else reply.shown
    if channel == FINAL:
        reply.answer.append(text)
    if reply.shown not in (None, shown):
        text = f"\n\n{text}"
    reply.tokens.append(event.token)
    reply.text.append(text)
    new = dict(stream=stream, finish=event.finish, seconds=seconds, place=place, shown=shown)
    return reply._replace(**new), text


def note_silence(reply: Reply) -> None:
    if reply.place is not None and reply.finish == "length" and not any(reply.answer):
        sys.stderr.write("[no answer: --max-new-tokens ended the analysis before it]\n")


@contextlib.contextmanager
def interruptible() -> Iterator[list[bool]]:
    """A list that becomes non-empty on Ctrl-C; a second Ctrl-C interrupts as usual."""
    pressed: list[bool] = []

    def handler(*_: Any) -> None:
        pressed.append(True)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Job(NamedTuple):
    """Prompts that were read and found servable."""

    texts: list[str]
    requests: list[Any]
    engine: Any


def plan_prompts(source: Source, args: argparse.Namespace) -> Job:
    """Reads, encodes and checks all prompts before any weight is loaded."""
    from common.serve import check_request

    texts = read_prompts(args)
    ids = [encode_prompt(source, args, text) for text in texts]
    requests = [make_request(args, x, i) for i, x in enumerate(ids)]
    engine = make_engine(source, args, max(map(len, ids)) + args.max_new_tokens, len(texts))
    for i, request in enumerate(requests):
        check_request(request, engine.capacity, f"prompt {i + 1}")
    return Job(texts, requests, engine)


def plan_chat(source: Source, args: argparse.Namespace) -> Job:
    """Checks what a conversation needs; its prompts come later."""
    from common.serve import check_request

    if source.tokenizer is None or source.tokenizer.chat_template is None:
        raise ValueError("--chat needs a checkpoint with a chat template, and this one has none")
    rows = source.mesh.shape["data"]
    engine = make_engine(source, args, min(source.config.max_position_embeddings, 4096), rows)
    check_request(make_request(args, [0], 0), engine.capacity)
    return Job([], [], engine)


def record(job: Job, i: int, reply: Reply) -> str:
    """One line of JSON about prompt i."""
    fields = {
        "index": i,
        "prompt": job.texts[i],
        "text": "".join(reply.text),
        "prompt_tokens": len(job.requests[i].prompt),
        "tokens": reply.tokens,
        "finish_reason": reply.finish or "interrupted",
        "seconds": round(reply.seconds, 4),
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"


def run_prompts(
    source: Source, args: argparse.Namespace, job: Job, session: Any, write: Any
) -> bool:
    """Answers all prompts, in their order on stdout; True if interrupted."""
    from common.serve import serve

    tok, requests = source.tokenizer, job.requests
    stop_ids = tok.stop_ids if tok else frozenset()
    raw = tok is not None and (args.raw or tok.chat_template is None)
    replies = [start_reply(tok, args, r.prompt if raw else ()) for r in requests]
    shown, began = 0, time.perf_counter()
    with (
        interruptible() as pressed,
        contextlib.closing(serve(job.engine, requests, stop_ids, session)) as events,
    ):
        for event in events:
            i, seconds = event.request, time.perf_counter() - began
            replies[i], text = extend(tok, replies[i], event, seconds, args)
            if i == shown and not args.json:
                write(text)
            while shown < len(replies) and replies[shown].finish:
                write(record(job, shown, replies[shown]) if args.json else "\n")
                note_silence(replies[shown])
                shown += 1
                if shown < len(replies) and not args.json:
                    write("".join(replies[shown].text))  # what the next in order has so far
            if pressed:
                break
    for i in range(shown, len(replies)):  # interrupted
        if args.json:
            write(record(job, i, replies[i]))
        elif replies[i].tokens:
            write(("" if i == shown else "".join(replies[i].text)) + "\n")
    return bool(pressed)


def run_chat(source: Source, args: argparse.Namespace, job: Job, session: Any, write: Any) -> bool:
    """A conversation on one slot; every turn reads only what the cache does not hold yet. False."""
    from common.serve import serve
    from common.tokenizer import encode_chat

    tok, turns = source.tokenizer, list[tuple[str, str]]()
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return False
        if not line.strip():
            continue
        turns.append(("user", line.strip()))
        ids = encode_chat(tok, messages(args, turns))
        if len(ids) > job.engine.capacity:
            have = f"the conversation has {len(ids)} tokens"
            raise ValueError(f"{have}, more than the cache's {job.engine.capacity} (see --max-len)")
        reply = start_reply(tok, args)
        request = make_request(args, ids, len(turns) // 2)
        with (
            interruptible() as pressed,
            contextlib.closing(
                serve(job.engine, [request], tok.stop_ids, session, reuse_multiple=1)
            ) as events,
        ):
            for event in events:
                reply, text = extend(tok, reply, event, 0.0, args)
                write(text)
                if pressed:
                    break
        write("\n")
        note_silence(reply)
        turns.append(("assistant", "".join(reply.answer)))


def summary(source: Source, engine: Any, session: Any, load_s: float) -> str:
    """One line: seconds, rates, and the fraction of the bandwidth floor that decoding reached."""
    from common.bandwidth import experts_read, parallel_readers, read_bandwidth, step_bytes

    s = session.stats
    parts = [f"load {load_s:.1f} s", f"compile {s.compile_s:.1f} s"]
    parts.append(f"first token {s.first_token_s:.2f} s")
    if s.prefill_s:
        parts.append(f"prefill {s.prefill_tokens} tokens at {s.prefill_tokens / s.prefill_s:.0f}/s")
    if s.cached_tokens:
        parts.append(f"{s.cached_tokens} prompt tokens already cached")
    if s.decode_tokens and s.decode_s:
        parts.append(f"decode {s.decode_tokens} tokens at {s.decode_tokens / s.decode_s:.1f}/s")
        bandwidth = read_bandwidth() * parallel_readers(source.mesh)
        steps = max(s.decode_steps, 1)
        share = experts_read(source.config, s.decode_tokens / steps)
        read = step_bytes(engine.weights, session.state.cache, s.filled / steps, share)
        reached = read * s.decode_steps / s.decode_s
        parts.append(
            f"{100 * reached / bandwidth:.0f}% of the {bandwidth / 1e9:.0f} GB/s read floor"
        )
    return "; ".join(parts)


def main(name: str, argv: Sequence[str] | None = None) -> None:
    """Runs the command line of the model in package `name`; exits with 2 on a user's mistake, 130
    on Ctrl-C."""
    args = parser(name).parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        axes = parse_mesh(args.mesh)
        if args.chat and (args.json or args.raw or args.prompt or args.prompts):
            raise ValueError(
                "--chat reads standard input: not with --json, --raw, --prompt or --prompts"
            )
        if args.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
        configure_jax(axes, not args.no_compile_cache, args.distributed)
        run(name, args, axes)
    except BrokenPipeError:
        # The reader has gone: nothing more to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.exit(_fail(str(error)))


def _fail(message: str) -> int:
    sys.stderr.write("".join(f"error: {line}\n" for line in message.splitlines()))
    return 2


def run(name: str, args: argparse.Namespace, axes: dict[str, int]) -> None:
    """Checks everything, then loads, then generates."""
    import jax

    from common.serve import start_session

    source = open_source(name, args, axes)
    job = (plan_chat if args.chat else plan_prompts)(source, args)
    weights, load_s = load(source, args)
    job = job._replace(engine=job.engine._replace(weights=weights))

    def write(text: str) -> None:
        if jax.process_index() == 0:
            sys.stdout.write(text)
            sys.stdout.flush()

    session = start_session(job.engine)
    answer = run_chat if args.chat else run_prompts
    with jax.profiler.trace(args.profile) if args.profile else contextlib.nullcontext():
        interrupted = answer(source, args, job, session, write)
    if jax.process_index() == 0:
        sys.stderr.write(f"[{summary(source, job.engine, session, load_s)}]\n")
    if interrupted:
        sys.exit(130)
