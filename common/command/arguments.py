"""The options of every model's command line."""

import argparse
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from common.loading.generation import SETTINGS
from common.serving.session import DRAFT_TOKENS
from common.text.tools import FORMATS

MOST_DRAFTS = 32  # a step samples each of them by code of its own, which takes long to compile
# An option of ONLY_WITH needs the option that leads its row; one of NOT_WITH does not go with it.
ONLY_WITH = dict(
    serve=("api_key", "queue", "grace", "allow_origin", "allow_host", "tool_format"),
    dry_run=("layers", "prompt_tokens"),
    ckpt=("revision",),
    draft=("draft_tokens",),
)
SAMPLING = (*SETTINGS, "sampling", "json_schema", "max_new_tokens")
PROMPTS = ("chat", "prompt", "prompts", "system", "think", "stop", "show_analysis")
RUNS = ("serve", "profile", "distributed", "adapter", "keep", "keep_host", "allow_nonfinite")
NOT_WITH = dict(
    chat=("json", "raw", "prompt", "prompts", "slots"),
    serve=(*PROMPTS, *SAMPLING, "raw", "json", "seed"),  # requests say this
    dry_run=(*PROMPTS, *SAMPLING, *RUNS, "seed"),
)


class Parser(argparse.ArgumentParser):
    """Raises mistakes as ValueError, so that they are reported like all others."""

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if wrong and (near := get_close_matches(wrong[1], self._option_string_actions, 1)):
            message = f"{wrong[1]} is no option; did you mean {near[0]}?"
        raise ValueError(f"{message} (see --help)")


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_options(args: argparse.Namespace) -> None:
    """ValueError if options do not go together."""
    defaults = vars(parser("").parse_args([]))
    given = {name for name, value in vars(args).items() if value != defaults[name]}
    for other, names in ONLY_WITH.items():
        if other not in given and (wrong := sorted(given.intersection(names))):
            raise ValueError(f"{option(wrong[0])} goes with {option(other)} only")
    for other, names in NOT_WITH.items():
        if other in given and (wrong := sorted(given.intersection(names))):
            raise ValueError(f"{option(wrong[0])} does not go with {option(other)}")
    if "draft_tokens" in given and args.draft == "mtp":
        raise ValueError("--draft-tokens does not go with --draft mtp, which drafts one token")
    if args.dry_run and args.draft not in (None, "mtp"):
        raise ValueError(f"--draft {args.draft} does not go with --dry-run: it takes mtp alone")
    try:
        Path(args.profile or ".").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--profile {args.profile}: {error.strerror}; give a directory") from None
    if len(args.mesh) > 1 and not args.dry_run:
        raise ValueError(f"--mesh {' '.join(args.mesh)}: only --dry-run takes several meshes")


def within(kind: type, least: float, most: float = 10**12) -> Callable[[str], Any]:
    """Returns a function that reads a number from `least` to `most`."""

    def number(text: str) -> Any:  # argparse's message about a text that `kind` refuses names this
        value = kind(text)
        if not least <= value <= most:
            what = f"at most {most}" if value > most else f"at least {least}"
            raise argparse.ArgumentTypeError(f"must be {what}, got {value}")
        return value

    return number


def like(pattern: str, what: str, text: str) -> str:
    """Returns the text if it fits the pattern; else the error says what to give."""
    if not re.fullmatch(pattern, text):
        raise argparse.ArgumentTypeError(f"{text!r}: give {what}")
    return text


# Without a host it would be open to all. IPv6 has brackets.
place = partial(like, r"([^][:]+|\[[^][]+\]):[0-9]+", "HOST:PORT, such as 127.0.0.1:8000")
origin = partial(like, r"\*|null|[\w.+-]+://[^/]+", "an origin, such as https://example.com")
host = partial(like, r"[^/:]+", "the name of a host alone, such as example.com")


def process(text: str) -> tuple[int, int]:
    """Reads I/N; returns N, then I."""
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and int(i) < int(n)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N, from 0/N to N-1/N")
    return int(n), int(i)


def parser(name: str) -> argparse.ArgumentParser:
    ap = Parser(
        prog=f"python -m {name}.main",
        description=f"Generate text with a checkpoint of {name} on CPU, GPU or TPU.",
        epilog="examples: --prompt Hello; --ckpt DIR --chat; --ckpt DIR --serve; --dry-run v5e:4x4",
    )
    flag: Any = dict(action="store_true")
    several: Any = dict(action="append", default=[])
    count = partial(within, int)
    add = ap.add_argument_group("model").add_argument
    add("--ckpt", help="directory or Hugging Face hub id (default: the bundled demo model)")
    add("--adapter", metavar="DIR_OR_HUB_ID", help="a LoRA adapter to merge into the model")
    add("--revision", metavar="R", help="branch, tag or commit of the hub repository")
    add("--dtype", choices=["float32", "bfloat16"], help="of activations and plain weights")
    told = "store matrices in 8 bits, or in 4 with a scale for GROUP neighbours in a row (64)"
    add("--quant", metavar="{int8,int4,int4:GROUP}", help=told)
    add("--kv-quant", choices=["int8"], help="store the key/value cache in 8 bits")
    add("--allow-nonfinite", **flag, help="load weights even if some are NaN or infinite")
    add("--random", **flag, help="random weights; --ckpt may be a config.json or a published size")
    told = "how devices split slots (data) and the model, as in data=2,expert=4,tensor=2"
    add("--mesh", nargs="+", default=[], metavar="AXES", help=f"{told} (default: chosen)")

    add = ap.add_argument_group("prompts (default: standard input, as one prompt)").add_argument
    add("--prompt", action="append", metavar="P", help="a prompt; may be repeated")
    told = "one prompt per line, in .jsonl as {prompt} or {messages}; may be repeated"
    add("--prompts", **several, type=Path, metavar="FILE", help=told)
    add("--chat", **flag, help="hold a conversation: each line of standard input is a turn")
    add("--system", metavar="S", help="system message for the chat template")
    add("--think", action=argparse.BooleanOptionalAction, help="whether to think before the answer")
    add("--raw", **flag, help="give the model the prompt without any chat template")
    add("--show-analysis", **flag, help="also show what the model thinks before its answer")
    add("--stop", **several, metavar="S", help="end the reply before this text; may be repeated")

    add = ap.add_argument_group("sampling (default: greedy)").add_argument
    add("--max-new-tokens", type=count(1), default=256, metavar="N", help="a reply (default: 256)")
    add("--temperature", type=float, metavar="T", help="divides the logits (default: 0, greedy)")
    add("--top-k", type=int, metavar="K", help="keep the K likeliest tokens (default: 0, all)")
    add("--top-p", type=float, metavar="P", help="keep the likeliest tokens of total probability P")
    add("--min-p", type=float, metavar="P", help="keep tokens of P times the highest probability")
    add("--repetition-penalty", type=float, metavar="P", help="weakens tokens that the text has")
    add("--json-schema", type=Path, metavar="FILE", help="make answers JSON that fits the schema")
    add("--sampling", choices=["published"], help="take what generation_config.json recommends")
    told = "prompt i, counted from 0, is sampled with seed (S + i) mod 2**32 (default: 0)"
    add("--seed", type=count(0, 2**32 - 1), default=0, metavar="S", help=told)

    add = ap.add_argument_group("serving (needs pip install -e '.[serve]')").add_argument
    told = "serve the OpenAI protocol, and a page to talk to (default: 127.0.0.1:8000)"
    add("--serve", nargs="?", type=place, const="127.0.0.1:8000", metavar="HOST:PORT", help=told)
    add("--api-key", metavar="KEY", help="that requests must have (default: FOLIO_API_KEY)")
    told = "how many requests may wait for a slot; others are refused (default: 256)"
    add("--queue", type=count(0), default=256, metavar="N", help=told)
    told = "seconds that replies may still take after SIGTERM or Ctrl-C (default: 30)"
    add("--grace", type=within(float, 0), default=30.0, metavar="S", help=told)
    add("--allow-origin", **several, type=origin, metavar="ORIGIN", help="its pages may call, too")
    add("--allow-host", **several, type=host, metavar="NAME", help="this machine's other name")
    add("--tool-format", choices=[*FORMATS], help="of tool calls (default: as the template says)")

    add = ap.add_argument_group("dry run (needs no weights and no accelerator)").add_argument
    told = "compile for v5e:4x4, v5p:2x2x4, h100:8, cpu:8, ...; print if it fits, and what it moves"
    add("--dry-run", nargs="+", metavar="TOPOLOGY", help=told)
    told = "prompt tokens that are prefilled at once (default: 512)"
    add("--prompt-tokens", type=count(1), default=512, metavar="T", help=told)
    add("--layers", type=count(1), metavar="N", help="compile only N layers (default: all)")

    add = ap.add_argument_group("running").add_argument
    add("--max-len", type=count(1), metavar="N", help="positions per slot (default: as needed)")
    add("--slots", type=count(1), metavar="N", help="prompts decoded together (default: up to 8)")
    told = "prefix cache: device memory for N ended sequences beside the slots (default: 0)"
    add("--keep", type=count(0), default=0, metavar="N", help=told)
    told = "prefix cache: host memory for further sequences (default: 0)"
    add("--keep-host", type=within(float, 0), default=0.0, metavar="GB", help=told)
    told = "speculative decoding: lookup (in the text), mtp (of the files), [FAMILY:]CKPT (smaller)"
    add("--draft", metavar="SOURCE", help=told)
    told = f"how many tokens are drafted at once (default: {DRAFT_TOKENS}; mtp: 1)"
    add("--draft-tokens", type=count(1, MOST_DRAFTS), default=DRAFT_TOKENS, metavar="K", help=told)
    add("--json", **flag, help="print JSON: one record per prompt, or the figures of a dry run")
    add("--profile", metavar="DIR", help="write a profiler trace into DIR, for ui.perfetto.dev")
    add_host_options(ap)
    return ap


def add_host_options(ap: argparse.ArgumentParser) -> None:
    """Adds the options that say which of several processes this is."""
    add = ap.add_argument_group("several processes (see docs/multi_host.md)").add_argument
    told = "this is one of several processes, such as one per host (default: detected)"
    add("--distributed", action=argparse.BooleanOptionalAction, help=told)
    add("--coordinator", type=place, metavar="HOST:PORT", help="the address of process 0")
    add("--process", type=process, metavar="I/N", help="this is process I of N, counted from 0")


def read_host_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads these options alone of a command line that has a mistake; others get defaults."""
    ap = Parser(add_help=False, allow_abbrev=False)
    add_host_options(ap)
    return ap.parse_known_args(argv, parser("").parse_args([]))[0]
