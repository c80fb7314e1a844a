"""Reads a published config.json strictly: what it says is computed, or refused by name.

A model file declares each field of its `Config` with its type, and lists the settings of which it
implements one value. So every key of config.json is read, or known to change nothing, or refused;
none is passed over. If a key is missing, the field's default counts, which is that of Hugging Face
transformers. A null is an error, as in transformers, unless it has a meaning of its own.

`common.fields` says how a field is declared.
"""

import re
import reprlib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from common.fields import Relation, annotations
from common.quant import FP8_BLOCK

# Of layers, heads or experts (fields called num_ or n_): lists get an entry for each.
MOST = 10_000

# Keys that change nothing in any model: who made the file and how, training, what transformers
# returns, and generation settings that older files keep here.
INERT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled
    _name_or_path architectures attention_dropout attn_implementation auto_map bos_token_id
    chunk_size_feed_forward dtype eos_token_id finetuning_task gradient_checkpointing id2label
    initializer_range is_decoder label2id name_or_path num_labels _num_labels output_attentions
    output_hidden_states output_router_logits pad_token_id pretraining_tp prefix problem_type
    return_dict router_aux_loss_coef sep_token_id task_specific_params tf_legacy_loss
    tie_encoder_decoder tokenizer_class torch_dtype torchscript transformers.js_config
    transformers_version unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache

    attn_pdrop embd_pdrop n_special output_past predict_special_tokens resid_pdrop
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj

    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature
    top_k top_p typical_p
    """.split()
)
# How keys next to text_config begin that are about images and videos.
IMAGES = re.compile(
    "boi_|eoi_|ignore_index|image_|language_model_only|media_|projection_|use_unified|video_|vision_"
)
NOTHING: Mapping[str, Any] = types.MappingProxyType({})
# Settings of which every model file implements one value.
ONLY: dict[str, Any] = dict(
    is_causal=True, is_encoder_decoder=False, add_cross_attention=False, pruned_heads=({}, None)
)
SILU = ("silu", "swish")  # two names of one function
Derive = Callable[[Mapping[str, Any]], Any]  # computes a field from those before it


def head_dim(fields: Mapping[str, Any]) -> int:
    """The width of a head if config.json does not say it: hidden_size / num_attention_heads."""
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    if width % heads:
        raise wrong(f"hidden_size={width} is not a multiple of num_attention_heads={heads}")
    return width // heads


def all_heads(fields: Mapping[str, Any]) -> int:
    """The number of key/value heads if config.json does not say it: one for each query head."""
    return fields["num_attention_heads"]


def read_config(
    kind: type,
    hf: Mapping[str, Any],
    *,
    model_types: Collection[str],
    fields_read: Mapping[str, Any] = NOTHING,
    if_missing: Mapping[str, Derive] = NOTHING,
    if_null: Mapping[str, Derive] = NOTHING,
    accepted: Mapping[str, Any] = NOTHING,
    ignored: Collection[str] = (),
) -> Any:
    """A `kind`, which is a NamedTuple of fields of config.json. ValueError names what is refused.

    Args:
      hf: the parsed config.json.
      model_types: the values of `model_type` that the model file computes.
      fields_read: fields that the caller has read already, also by `read_rope`, `read_packing` and
        `is_published_in`, whose keys are then known.
      if_missing: how to compute a field whose key is missing or null.
      if_null: how to compute a field whose key is null. If the key is missing, that is an error.
      accepted: keys of which one value, or a tuple of values, is implemented. Others are refused.
      ignored: other keys that the caller has read, and those of this family that change nothing.
    """
    if hf.get("model_type") is None:
        raise missing("model_type")
    check_accepted(hf, {"model_type": tuple(model_types)})
    if_null = {name: derive for name, derive in if_null.items() if name in hf}
    fields = read_fields(kind, hf, "", fields_read, {**if_missing, **if_null})
    names = {x for name, hint in annotations(kind).items() for x in (name, second_name(hint, name))}
    known = {"model_type", *ignored, *INERT, *names.difference(fields_read)}
    if rope := {"rope_theta", "partial_rotary_factor"} & fields_read.keys():
        known |= {"rope_scaling", "rope_parameters", *rope}
    known |= {"quantization_config"} if {"packing", "mxfp4"} & {*fields_read} else set()
    check_settings(hf, "", accepted=ONLY | dict(accepted), ignored=known)
    return kind(**fields)


def read_fields(
    kind: type,
    values: Mapping[str, Any],
    where: str = "",
    fields_read: Mapping[str, Any] = NOTHING,
    if_missing: Mapping[str, Derive] = NOTHING,
) -> dict[str, Any]:
    """The fields of `kind`, from config.json or from the object in it that is called `where`."""
    defaults: dict[str, Any] = kind._field_defaults  # type: ignore[attr-defined]
    fields, keys = {**defaults, **fields_read}, dict[str, str]()
    for name, annotation in annotations(kind).items():
        if name in fields_read:
            continue
        other = second_name(annotation, name)
        key = keys[name] = spelling(values, name, other)
        if values.get(key) is None and name in if_missing:
            fields[name] = if_missing[name](fields)
        elif key in values:
            fields[name] = checked(values[key], annotation, where + key)
            if name.startswith(("num_", "n_")) and (fields[name] or 0) > MOST:
                raise wrong(f"{key}={fields[name]} is above {MOST}")
        elif name not in defaults:
            raise missing(where + (name if name == other else f"{name} (or {other})"))
    for name, annotation in annotations(kind).items():
        for rule in getattr(annotation, "__metadata__", ()):
            if isinstance(rule, Relation) and not rule.holds(fields[name], fields[rule.other]):
                key, other = (keys.get(x, x) for x in (name, rule.other))
                what = f"{show(values.get(key))} {rule.must} {other}={fields[rule.other]}"
                raise wrong(f"{where}{key}={what}")
    return fields


def second_name(annotation: Any, field: str) -> str:
    """The other key that an annotated field may have, or else the field's own name."""
    return next((x for x in getattr(annotation, "__metadata__", ()) if isinstance(x, str)), field)


def spelling(values: Mapping[str, Any], field: str, other: str) -> str:
    """Which of its two keys a field has. ValueError if it has both, with different values."""
    if values.get(other) is None:
        return field
    if values.get(field) is not None and not same(values[field], values[other]):
        told = f"{field}={show(values[field])} and {other}={show(values[other])}"
        raise wrong(f"{told} are one setting under two names; which one is meant?")
    return other


def check_accepted(values: Mapping[str, Any], accepted: Mapping[str, Any], where: str = "") -> None:
    """ValueError for a setting whose value is not the one (or in the tuple) that is implemented."""
    for key, one in accepted.items():
        several = one if isinstance(one, tuple) else (one,)
        if key in values and not any(same(values[key], x) for x in several):
            raise refusal(where + key, values[key], several)


def refuse_unknown(values: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    """ValueError names a key that is not known.

    An unknown key whose value is null is ignored at the top level, but refused in a nested object,
    where it may mean something: in `rope_parameters`, that layers of one type do not rotate.
    """
    for key, value in values.items():
        if key not in known and (where or value is not None):
            name = where + show(key)[1:-1]  # one short line, whatever the key is
            raise wrong(f"{name}={show(value)} is not implemented by this model file")


SHORT = reprlib.Repr()  # follows nested lists to a limited depth
SHORT.maxstring = SHORT.maxother = 60
show = SHORT.repr


def missing(key: str) -> ValueError:
    return ValueError(f"config.json has no {key}, which this model needs")


def refusal(key: str, value: Any, accepted: Collection[Any]) -> ValueError:
    names = " and ".join(map(repr, accepted))
    return wrong(f"{key}={show(value)} is not implemented, only {names}")


def wrong(what: str) -> ValueError:
    return ValueError(f"config.json: {what}")


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same type: to Python, True equals 1."""
    return type(a) is type(b) and a == b


def checked(value: Any, annotation: Any, where: str) -> Any:
    """`value` as the field's annotation wants it. ValueError if that does not accept it."""
    kind, *extras = get_args(annotation) if get_origin(annotation) is Annotated else [annotation]
    limits = next((x for x in extras if isinstance(x, range)), range(1, 2**31))
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # of one kind and None
        kind = next(a for a in args if a is not type(None))
        return None if value is None else checked(value, kind, where)
    what = {2: "an even number", 8: "a multiple of 8"}.get(limits.step, "a whole number")
    whole = f"{what} from {limits.start} to {limits.stop - 1}"
    kinds: dict[Any, tuple[bool, str]] = {  # whether the value fits, and what it must be
        int: (type(value) is int and value in limits, whole),
        float: (type(value) in (int, float) and 0 < value < 3.4e38, "a number above 0"),
        bool: (type(value) is bool, "true or false"),
        str: (isinstance(value, str), "a text"),
        Mapping: (isinstance(value, Mapping), "an object"),
        tuple: (isinstance(value, list), "a list"),
    }
    fits, must = kinds.get(origin or kind, (True, ""))
    if not fits:
        raise wrong(f"{where}={show(value)} must be {must}")
    if origin is tuple:
        return tuple(checked(x, args[0], f"{where}[{i}]") for i, x in enumerate(value))
    if origin is Literal and not any(same(value, x) for x in args):
        raise refusal(where, value, args)
    return kind(value) if kind in (int, float) else value


# ---- parts of config.json that several families have


def text_config(hf: Mapping[str, Any], *, tied: Any = False) -> dict[str, Any]:
    """The part of a multimodal config.json that says how text is computed. Two settings may be in
    it or next to it, where nothing else changes how text is computed: quantization_config, and
    tie_word_embeddings, of which `tied` is the value, or a tuple of those, that is implemented."""
    accepted, beside = ONLY | dict(tie_word_embeddings=tied), filter(IMAGES.match, hf)
    check_accepted(hf, accepted)
    either = ("quantization_config", "tie_word_embeddings")
    refuse_unknown(hf, {"model_type", "text_config", *either, *accepted, *INERT, *beside})
    text = dict(checked(hf.get("text_config"), Mapping, "text_config"))
    check_accepted(text, accepted, "text_config.")
    for key in either:
        both = {key: hf.get(key), f"text_config.{key}": text.get(key)}
        if (value := both[spelling(both, *both)]) is not None:
            text[key] = value
    return {"model_type": f"{hf['model_type']}_text", **text}


def is_fp8(hf: Mapping[str, Any], projections: Collection[str]) -> bool:
    """Whether the `projections` are published in fp8: all of them, or none of them."""
    needed = dict(weight_block_size=[FP8_BLOCK] * 2, activation_scheme="dynamic")
    # Published files also have fmt. DeepSeek V3.1 has scale_fmt: its scales are powers of two,
    # stored as float32. Files that transformers 5 saved have the others.
    accepted = dict(
        fmt="e4m3", scale_fmt=("float", "ue8m0"), expert_dtype="fp8", modules_to_convert=None
    )
    kept = "modules_to_not_convert"
    if not is_published_in("fp8", hf, needed, accepted, ignored=(kept,)):
        return False
    names = names_in(hf["quantization_config"], kept, "quantization_config.")
    if other := [name for name in names if name.split(".")[-1] in projections]:
        raise wrong(f"{kept} has {show(other[0])}: only all projections or none is fp8")
    return True


def is_published_in(
    method: str,
    hf: Mapping[str, Any],
    needed: Mapping[str, Any] = NOTHING,
    accepted: Mapping[str, Any] = NOTHING,
    ignored: Collection[str] = (),
) -> bool:
    """Whether `quantization_config` says that the weights are quantised by `method`.

    ValueError for another method, and as in `check_settings`.
    """
    values, needed = hf.get("quantization_config"), {"quant_method": method, **needed}
    if values is not None:
        accepted = {"dequantize": False, **accepted}
        check_settings(values, "quantization_config.", needed, accepted, ignored)
    return values is not None


def check_settings(
    values: Any,
    where: str,
    needed: Mapping[str, Any] = NOTHING,
    accepted: Mapping[str, Any] = NOTHING,
    ignored: Collection[str] = (),
) -> None:
    """ValueError if a value is no object, if a setting of `needed` is missing or different, and for
    a setting that is neither there, nor `accepted`, nor `ignored`."""
    accepted = {**needed, **accepted}
    check_accepted(checked(values, Mapping, where[:-1]), accepted, where)
    for key in needed:
        if key not in values:
            raise missing(where + key)
    refuse_unknown(values, {*accepted, *ignored}, where)


def names_in(values: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """The names in a list, which may be missing or null."""
    return checked(values.get(key), tuple[str, ...] | None, where + key) or ()


def read_rope(
    kind: type,
    hf: Mapping[str, Any],
    scalings: Mapping[str, type] = NOTHING,
    *,
    theta: float,
    rotated: float = 1.0,
    default: Mapping[str, Any] = NOTHING,
    ignored: Sequence[str] = (),
) -> dict[str, Any]:
    """The fields of `kind` that say how positions rotate: `rope_theta`, and if `kind` has them
    `rope_scaling` (None, or a NamedTuple of its settings) and `partial_rotary_factor`.

    Two layouts are read: `rope_theta` beside `rope_scaling` at the top level, or all of it in
    `rope_parameters`. If both objects are there, they must say the same.

    Args:
      scalings: the NamedTuple of each type of scaling that is implemented, by name.
      theta: the family's default for `rope_theta`.
      rotated: the family's default for `partial_rotary_factor`.
      default: the family's settings if the file has neither of the two objects.
      ignored: settings that have no effect.
    """
    where = "rope_parameters" if hf.get("rope_scaling") in (None, {}) else "rope_scaling"
    settings = checked(default if hf.get(where) is None else hf[where], Mapping, where)
    newer, told = hf.get("rope_parameters") or {}, {**hf, **settings}
    if not isinstance(newer, Mapping) or any(newer[key] != told.get(key) for key in newer):
        raise wrong("rope_parameters differs from rope_scaling; which is meant?")
    where += "."
    fields: dict[str, Any] = {}
    for field, missing_value in dict(rope_theta=theta, partial_rotary_factor=rotated).items():
        if hint := annotations(kind).get(field):
            part, at = (settings, where) if field in settings else (hf, "")
            key = spelling(part, field, second_name(hint, field))
            fields[field] = checked(part.get(key, missing_value), hint, at + key)
            if part is settings and hf.get(field) is not None:  # has no effect, but must be valid
                checked(hf[field], hint, field)
    scaling = settings.get("rope_type", settings.get("type", "default"))
    known = {"rope_type", "type", *fields, *ignored}
    if scaling == "default":
        refuse_unknown(settings, known, where)
        return fields | (dict(rope_scaling=None) if "rope_scaling" in annotations(kind) else {})
    if not isinstance(scaling, str) or scaling not in scalings:
        raise refusal(f"{where}rope_type", scaling, ("default", *scalings))
    if "max_position_embeddings" in hf:
        settings = {"original_max_position_embeddings": hf["max_position_embeddings"], **settings}
    refuse_unknown(settings, known | annotations(scalings[scaling]).keys(), where)
    values = read_fields(scalings[scaling], settings, where)
    return fields | dict(rope_scaling=scalings[scaling](**values))
