"""A published config.json, read strictly: what it says is computed, or refused by name.

A model file declares each field of its `Config` with the range that the field may have, and lists
the settings of which it implements one value. Every key of the file is then read, or known to
change nothing, or refused; nothing is passed over. Where Hugging Face transformers gives a missing
key a default, `Config` has it as the default of the field. A null is not a missing key: as in
transformers it is an error, unless it has a meaning of its own.
"""

import reprlib
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from common.quant import FP8_BLOCK
from common.ranges import Above1

# Keys that change nothing in any model: who made the file and how, training, what transformers
# returns, and settings of generation that older files keep here.
INERT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled
    _name_or_path architectures attention_dropout attn_implementation
    auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id finetuning_task
    gradient_checkpointing id2label initializer_range is_decoder label2id name_or_path num_labels
    _num_labels output_attentions output_hidden_states output_router_logits pad_token_id
    pretraining_tp prefix problem_type return_dict router_aux_loss_coef sep_token_id
    task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype torchscript
    transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version
    use_bfloat16 use_cache

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
NOTHING: Mapping[str, Any] = types.MappingProxyType({})
# Settings of which every model file implements one value.
ONLY: dict[str, Any] = dict(
    is_causal=True, is_encoder_decoder=False, add_cross_attention=False, pruned_heads=({}, None)
)
MOST = 10_000  # layers, heads or experts: each is an entry of some list
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # the names of their number
SILU = ("silu", "swish")  # two names of one function
Derive = Callable[[Mapping[str, Any]], Any]  # a field from those before it


def head_dim(fields: Mapping[str, Any]) -> int:
    """The width of a head where config.json does not say it: that of the model, shared out."""
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    if width % heads:
        raise ValueError(
            f"config.json: hidden_size={width} is not a multiple of num_attention_heads={heads}"
        )
    return width // heads


def all_heads(fields: Mapping[str, Any]) -> int:
    """The number of key/value heads where config.json does not say it: that of the query heads."""
    return fields["num_attention_heads"]


def read_config(
    kind: type,
    hf: Mapping[str, Any],
    *,
    model_types: Collection[str],
    given: Mapping[str, Any] = NOTHING,
    derived: Mapping[str, Derive] = NOTHING,
    null: Mapping[str, Derive] = NOTHING,
    only: Mapping[str, Any] = NOTHING,
    repeats: Mapping[str, str] = NOTHING,
    read: Collection[str] = (),
    inert: Collection[str] = (),
) -> Any:
    """A `kind`, a NamedTuple of fields of a config.json. ValueError names what is refused.

    Args:
      hf: the parsed config.json.
      model_types: the values of `model_type` that the model file computes.
      given: fields that the caller has found already.
      derived: how to compute a field that is missing or null.
      null: how to compute a field that is null; missing, it is an error.
      only: settings of which the model file implements one value, or a tuple of them, by key.
      repeats: keys that transformers does not read, and the field that each of them must equal.
      read: keys in which the caller found what is `given`; those of `read_rope` are known.
      inert: keys of this family that change nothing.
    """
    if hf.get("model_type") is None:
        raise missing("model_type")
    only = ONLY | {"model_type": tuple(model_types)} | dict(only)
    check_only(hf, only)
    null = {name: derive for name, derive in null.items() if name in hf}
    values = read_fields(kind, hf, "", given, {**derived, **null})
    for key, field in repeats.items():
        spelling(hf, field, key)
    fields = [name for name in annotations(kind) if name not in given]
    others = [second_name(kind, name) for name in fields]
    known = {*only, *repeats, *read, *inert, *INERT, *fields, *others}
    refuse_unknown(hf, known | (ROPE_KEYS if "rope_theta" in given else set()))
    config = kind(**values)
    for problem in inconsistencies(config):
        raise ValueError(f"config.json: {problem}")
    return config


def read_fields(
    kind: type,
    values: Mapping[str, Any],
    where: str = "",
    given: Mapping[str, Any] = NOTHING,
    derived: Mapping[str, Derive] = NOTHING,
) -> dict[str, Any]:
    """The fields of `kind`, from an object that is config.json or its part `where`."""
    fields = dict(given)
    for name, annotation in annotations(kind).items():
        if name in given:
            continue
        other = second_name(kind, name)
        key = spelling(values, name, other)
        if values.get(key) is not None:
            fields[name] = checked(values[key], annotation, where + key)
        elif name in derived:
            fields[name] = derived[name](fields)
        elif key in values:  # null
            fields[name] = checked(None, annotation, where + key)
        elif name in kind._field_defaults:  # type: ignore[attr-defined]
            fields[name] = kind._field_defaults[name]  # type: ignore[attr-defined]
        else:
            raise missing(where + (name if name == other else f"{name} (or {other})"))
    return fields


def annotations(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def second_name(kind: type, field: str) -> str:
    """The other key under which an annotated field may stand, or its name."""
    extras = getattr(annotations(kind)[field], "__metadata__", ())
    return next((extra for extra in extras if isinstance(extra, str)), field)


def spelling(values: Mapping[str, Any], field: str, other: str) -> str:
    """Under which of its two keys a field stands; ValueError if under both, and differently."""
    if values.get(other) is None:
        return field
    if values.get(field) is not None and not same(values[field], values[other]):
        raise ValueError(
            f"config.json: {field}={show(values[field])} and {other}={show(values[other])} are one "
            "setting under two names; which one is meant?"
        )
    return other


def check_only(values: Mapping[str, Any], only: Mapping[str, Any], where: str = "") -> None:
    """ValueError for a setting of config.json, or of its part `where`, with another value than the
    one, or the tuple of them, that a model file implements."""
    for key, accepted in only.items():
        accepted = accepted if isinstance(accepted, tuple) else (accepted,)
        if key in values and not any(same(values[key], x) for x in accepted):
            raise refusal(where + key, values[key], accepted)


def refuse_unknown(values: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    """ValueError names a key of config.json, or of its part `where`, that is not known. In
    config.json itself null says nothing; in a part it may: of `rope_parameters`, that the layers of
    one type rotate nothing."""
    for key, value in values.items():
        if key not in known and (where or value is not None):
            name = where + show(key)[1:-1]  # one short line, whatever the key is
            raise ValueError(
                f"config.json: {name}={show(value)} is not implemented by this model file"
            )


SHORT = reprlib.Repr()  # which follows lists within lists only so far
SHORT.maxstring = SHORT.maxother = 60


def show(value: Any) -> str:
    return SHORT.repr(value)


def missing(key: str) -> ValueError:
    return ValueError(f"config.json has no {key}, which this model needs")


def refusal(key: str, value: Any, accepted: Collection[Any]) -> ValueError:
    names = " and ".join(map(repr, accepted))
    return ValueError(f"config.json: {key}={show(value)} is not implemented, only {names}")


def same(a: Any, b: Any) -> bool:
    """Equal and of one type: to Python, True is 1."""
    return type(a) is type(b) and a == b


def checked(value: Any, annotation: Any, where: str) -> Any:
    """`value` as a field's annotation wants it; ValueError if it cannot be."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind, rule = args[:2]
        if not rule.accepts(value):
            raise ValueError(f"config.json: {where}={show(value)} must be {rule.must_be}")
        return kind(value)
    if origin in (Union, types.UnionType):  # of one kind and None
        kind = next(a for a in args if a is not type(None))
        return None if value is None else checked(value, kind, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"config.json: {where}={show(value)} must be a list")
        return tuple(checked(x, args[0], f"{where}[{i}]") for i, x in enumerate(value))
    if origin is Literal:
        if not any(same(value, x) for x in args):
            raise refusal(where, value, args)
        return value
    if annotation is bool:
        if type(value) is not bool:
            raise ValueError(f"config.json: {where}={show(value)} must be true or false")
        return value
    raise TypeError(f"no rule for {annotation}")


def inconsistencies(config: Any) -> Iterator[str]:
    """The conditions between fields, in one place."""
    get: Callable[[str], Any] = lambda name: getattr(config, name, None)
    heads, kv_heads = get("num_attention_heads"), get("num_key_value_heads")
    if kv_heads and heads % kv_heads:
        yield f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
    for name in ("num_hidden_layers", "num_attention_heads", *EXPERTS):
        if (get(name) or 0) > MOST:
            yield f"{name}={get(name)} is more than {MOST}"
    layers, kinds = get("num_hidden_layers"), get("layer_types")
    if kinds is not None and len(kinds) != layers:
        yield f"{len(kinds)} layer_types, but num_hidden_layers is {layers}"
    experts, chosen = next(filter(None, map(get, EXPERTS)), 0), get("num_experts_per_tok")
    if experts and chosen > experts:
        yield f"num_experts_per_tok={chosen} of only {experts} experts"
    groups, kept = get("n_group"), get("topk_group")
    if groups and (experts % groups or experts < 2 * groups):
        yield f"{experts} experts are not n_group={groups} equal groups of 2 or more"
    elif groups and (kept > groups or chosen > kept * (experts // groups)):
        yield f"topk_group={kept} of n_group={groups} groups have fewer than {chosen} experts"


# ---- parts of config.json that several families have


def text_config(hf: Mapping[str, Any], inert: Collection[str]) -> dict[str, Any]:
    """The part of a multimodal config.json that says how text is computed. Beside it may stand the
    `inert` keys, and nothing that changes how text is computed."""
    only = ONLY | dict(tie_word_embeddings=False)
    check_only(hf, only)
    refuse_unknown(hf, {"model_type", "text_config", "vision_config", *inert, *only, *INERT})
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: text_config={show(text)} must be an object")
    return {"model_type": f"{hf['model_type']}_text", **text}


def is_fp8(hf: Mapping[str, Any], projections: Collection[str]) -> bool:
    """Whether the `projections` are published in fp8: all of them, or none."""
    needed = dict(weight_block_size=[FP8_BLOCK] * 2, activation_scheme="dynamic")
    # Published files say fmt besides, of DeepSeek V3.1 scale_fmt (of its scales, which are powers
    # of two, stored as float32), those that transformers 5 saved the others.
    only = dict(
        fmt="e4m3", scale_fmt=("float", "ue8m0"), expert_dtype="fp8", modules_to_convert=None
    )
    kept = "modules_to_not_convert"
    if not is_published_in("fp8", hf, needed, only, inert=(kept,)):
        return False
    names = hf["quantization_config"].get(kept)
    names = [] if names is None else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config.json: {kept}={show(names)} must be a list of names")
    if wrong := [name for name in names if name.split(".")[-1] in projections]:
        raise ValueError(
            f"config.json: {kept} has {show(wrong[0])}: only all projections or none is fp8"
        )
    return True


def is_published_in(
    method: str,
    hf: Mapping[str, Any],
    needed: Mapping[str, Any] = NOTHING,
    only: Mapping[str, Any] = NOTHING,
    inert: Collection[str] = (),
) -> bool:
    """Whether `quantization_config` says that the weights are quantised by `method`; ValueError for
    any other, and for other settings of it than `needed`, which it must all have, and `only`."""
    values, where = hf.get("quantization_config"), "quantization_config."
    if values is None:
        return False
    if not isinstance(values, Mapping):
        raise ValueError(f"config.json: {where[:-1]}={show(values)} must be an object")
    needed = {"quant_method": method} | dict(needed)
    only = needed | dict(dequantize=False) | dict(only)
    check_only(values, only, where)
    for key in needed:
        if key not in values:
            raise missing(where + key)
    refuse_unknown(values, {*only, *inert}, where)
    return True


ROPE_KEYS = {"rope_theta", "rope_scaling", "rope_parameters"}


def read_rope(
    hf: Mapping[str, Any],
    scalings: Mapping[str, type],
    theta: float,
    default: Mapping[str, Any] = NOTHING,
) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` (None, or a NamedTuple of its fields) in either spelling:
    beside each other, or both in `rope_parameters`, which a `rope_scaling` overrides.

    `scalings` are the NamedTuples by type of scaling. `theta` and `default` are what the family
    means where the file says nothing.
    """
    where = "rope_parameters" if hf.get("rope_scaling") in (None, {}) else "rope_scaling"
    settings = default if hf.get(where) is None else hf[where]
    if not isinstance(settings, Mapping):
        raise ValueError(f"config.json: {where}={show(settings)} must be an object")
    where += "."
    part, at = (settings, where) if "rope_theta" in settings else (hf, "")
    base = checked(part.get("rope_theta", theta), Above1, at + "rope_theta")
    kind = settings.get("rope_type", settings.get("type", "default"))
    known = {"rope_type", "type", "rope_theta"}
    if kind == "default":
        refuse_unknown(settings, known, where)
        return dict(rope_theta=base, rope_scaling=None)
    if not isinstance(kind, str) or kind not in scalings:
        raise refusal(f"{where}rope_type", kind, ("default", *scalings))
    if "max_position_embeddings" in hf:
        original = hf["max_position_embeddings"]
        settings = {"original_max_position_embeddings": original, **settings}
    refuse_unknown(settings, known | annotations(scalings[kind]).keys(), where)
    scaling = scalings[kind](**read_fields(scalings[kind], settings, where))
    return dict(rope_theta=base, rope_scaling=scaling)
