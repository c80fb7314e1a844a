"""Compares what a checkpoint computes here with what it computes in Hugging Face transformers, in
float32: logits at every position of a text, and greedy tokens after it.

    pip install torch transformers
    python -m folio.compare --ckpt DIR_OR_HUB_ID [--text TEXT] [--tokens 32]
"""

import importlib
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from common.command.arguments import Parser, within
from common.command.cli import mistakes_on_one_line
from common.serving.load import init_state, load
from common.serving.score import logits
from common.serving.serve import serve
from common.serving.session import Request, start_session
from common.sharding import DATA
from common.text.tokenizer import encode
from folio.__main__ import family_of

TEXT = "The sun had set, and a cold wind came down from the hills. She closed the door and said:"


def ours(ckpt: str, text: str, tokens: int) -> tuple[list[int], np.ndarray, list[int]]:
    """Returns the ids of the text, their logits [T, V], and the greedy tokens after them."""
    model = load(importlib.import_module(f"{family_of(ckpt)}.model"), ckpt, dtype="float32")
    if model.tokenizer is None:
        raise ValueError(f"{ckpt} has no tokenizer, which the text needs")
    ids = encode(model.tokenizer, text)
    rows = model.mesh.shape[DATA]  # a slot for each data shard
    cache = init_state(model.module, model.config, rows, len(ids), "float32", model.mesh).cache
    tokens_BT, end_B = jnp.tile(jnp.array(ids), (rows, 1)), jnp.full(rows, len(ids))
    given = model.module, model.weights, cache, tokens_BT, end_B
    logits_TV = np.asarray(logits(*given, **model.static)[0][0])
    session = start_session(model, rows, len(ids) + tokens, dtype="float32")
    return ids, logits_TV, [e.token for e in serve(session, [Request(ids, tokens)])]


def theirs(ckpt: str, ids: Sequence[int], tokens: int) -> tuple[np.ndarray, list[int]]:
    """Returns the logits of the ids, and the greedy tokens after them."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(ckpt, dtype=torch.float32).eval()
    with torch.no_grad():
        given: Any = torch.tensor([ids])
        text = model.generate(given, do_sample=False, max_new_tokens=tokens, repetition_penalty=1.0)
        return model(given).logits[0].numpy(), text[0, len(ids) :].tolist()


@mistakes_on_one_line()
def main(argv: Sequence[str] | None = None) -> None:
    ap = Parser(prog="python -m folio.compare", description=__doc__)
    ap.formatter_class = RawDescriptionHelpFormatter
    ap.add_argument("--ckpt", required=True)
    ap.add_argument("--text", default=TEXT)
    ap.add_argument("--tokens", type=within(int, 1), default=32)
    args = ap.parse_args(argv)
    try:
        for name in ("torch", "transformers"):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}: pip install torch transformers") from None
    ids, got, mine = ours(args.ckpt, args.text, args.tokens)
    want, others = theirs(args.ckpt, ids, args.tokens)
    largest, deviation = np.abs(got - want[:, : got.shape[1]]).max(), want.std()
    n = min(len(mine), len(others))  # transformers may end at a stop token
    same = next((i for i in range(n) if mine[i] != others[i]), n)
    print(
        f"{args.ckpt}: logits of {len(ids)} tokens differ by at most {largest:.2g} (their standard "
        f"deviation is {deviation:.2g}); the first {same} of {n} greedy tokens are equal"
    )


if __name__ == "__main__":
    main()
