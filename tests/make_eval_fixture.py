"""Writes what transformers says of the embedded Llama model, as a task for lm-eval:
tests/fixtures/eval/lines.jsonl.

    python tests/make_eval_fixture.py

Needs torch and transformers; the tests do not need torch. Each line of the file has a `text` and
two `choices` of what may follow. `loglikelihoods` are those of the choices in float32, and
`continuation` is what greedy decoding writes up to the next line break.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TESTS = Path(__file__).parent
NEW = 24  # tokens of a continuation, at most
LINES = [
    ("ACT I.\n\nSCENE I. A room in the", [" castle.", " telephone."]),
    ("Enter HAMLET and", [" HORATIO.", " engines."]),
    ("To be, or not to be, that is the", [" question", " king"]),
    ("KING.\nMy lord, I will", [" not be so", " computer the"]),
    ("O Romeo, Romeo, wherefore art", [" thou", " the"]),
    ("Friends, Romans, countrymen, lend me your", [" ears", " lord"]),
    ("Exeunt all but", [" the Duke", " and"]),
    ("What, ho! Is there no", [" man here", " of to"]),
]


def main() -> None:
    source = TESTS.parent / "llama3" / "embedded"
    tok = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    )

    def encode(text: str) -> list[int]:
        return tok.encode(text, add_special_tokens=False)

    @torch.no_grad()
    def loglikelihood(text: str, choice: str) -> float:
        context, ids = encode(text), encode(text + choice)
        assert ids[: len(context)] == context
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(scores[t - 1, ids[t]]) for t in range(len(context), len(ids)))

    def continuation(text: str) -> str:
        ids = torch.tensor([encode(text)])
        made = model.generate(ids, do_sample=False, max_new_tokens=NEW)[0, ids.shape[1] :]
        return tok.decode(made, skip_special_tokens=True).partition("\n")[0]

    with open(TESTS / "fixtures" / "eval" / "lines.jsonl", "w") as file:
        for text, choices in LINES:
            known = dict(text=text, choices=choices, continuation=continuation(text))
            known["loglikelihoods"] = [loglikelihood(text, choice) for choice in choices]
            file.write(json.dumps(known) + "\n")


if __name__ == "__main__":
    main()
