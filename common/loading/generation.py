"""generation_config.json: how the authors of a checkpoint sample from it."""

from pathlib import Path
from typing import Any

from common.loading.files import read_json_if_there
from common.sampling import check

SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Not noted: what is read elsewhere, lengths, and what concerns the program that wrote the file.
IGNORED = """
    _from_model_config bos_token_id cache_implementation do_sample eos_token_id max_length
    max_new_tokens min_length num_return_sequences output_attentions output_hidden_states
    output_scores pad_token_id return_dict_in_generate transformers_version use_cache
""".split()
NEUTRAL: dict[str, Any] = dict(num_beams=1, length_penalty=1, typical_p=1)


def read_generation(directory: Path) -> tuple[dict[str, float], list[str]]:
    """Returns the recommended settings of `Request`, and notes about keys that are not applied."""
    file = directory / "generation_config.json"
    given = {key: x for key, x in read_json_if_there(file).items() if x is not None}
    settings = {name: given[name] for name in SETTINGS if name in given}
    if given.get("do_sample"):
        settings = {"temperature": 1.0, **settings}
    elif "do_sample" in given:
        settings["temperature"] = 0.0  # a request that sets another one is sampled with the rest
    if settings.get("repetition_penalty") == 1:
        del settings["repetition_penalty"]
    for name, value in settings.items():
        try:
            check(name, value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}: {error}") from None
    read = {*SETTINGS, *IGNORED}
    rest = {k: x for k, x in given.items() if k not in read and x not in (False, NEUTRAL.get(k), 0)}
    notes = [f"{file.name}: {key}={x!r} is not applied"[:200] for key, x in sorted(rest.items())]
    return settings, notes
