"""A configuration of a few thousand parameters from one of billions: numbers become small by what their names say."""

from __future__ import annotations

import re
from typing import Any

VOCABULARY, LAYERS, HEADS, HEAD_SIZE = 128, 2, 4, 8
WIDTH = HEADS * HEAD_SIZE
IMAGE, PATCH, POSITIONS = 32, 8, 128

# The first pattern that a name matches decides; a number that is smaller already stays.
_RULES: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size|num_channels|in_channels|in_chans|num_labels|out_chans", 0),
    (r"n_group|topk_group|num_expert_group|groups_per", 1),
    (r"vocab_size", VOCABULARY),
    (r"(experts_per_tok|top_k|topk|num_selected|moe_top_k|num_experts_per_token|moe_k)", 2),
    (r"(num|n)_.*experts$|^num_experts|moe_num_experts", 4),
    (r"lora_rank|(q|kv|o)_rank|_rank$", 16),
    (r"conv_kernel|kernel_size|stride|groups|num_conv|dilation|window|reduction", 0),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads?|num_key_value|kv_heads|multi_query_group_num)", 2),
    (r"head_dim|d_head|kv_channels|d_kv$|head_size|qk_.*dim|v_head|dim_head|key_size|value_size|rotary_dim", HEAD_SIZE),
    (r"heads?$|n_head|num_head|attention_heads", HEADS),
    (r"layers?$|n_layer|num_.*_layers?$|depth$|num_blocks|n_block|layers_block_type_count", LAYERS),
    (r"inner|intermediate|ffn|d_ff|mlp_dim|feed_forward|mlp_hidden", 2 * WIDTH),
    (r"image_size|img_size|spatial_size|input_size", IMAGE),
    (r"patch_size", PATCH),
    (r"max_.*position|n_positions|max_seq|n_ctx|context_length|max_position|max_sequence", POSITIONS),
    (r"num_queries|n_quer|num_latents|query_tokens", 8),
    (r"num_mel|mel_bins|feature_size", 16),
    (r"state_size|d_state|ssm_state", 8),
    (r"chunk|time_step|dt_rank", 16),
    (r"(size|dim|channels|width|hidden|d_model|n_embd|d_embed|dims|features|filters)$|^d_|_size|_dim", WIDTH),
)
_SPECIAL = re.compile(r"(image|video|audio|vision|speech|boi|eoi|img|mask|start|end|newline).*(token|index|_id)")
_TOKEN = re.compile(r"(token_id|token_index|_id|_ids|_token)$")


# Where small widths do not fit each other: fewer layers and words alone.
_MILD_RULES: tuple[tuple[str, int], ...] = tuple(
    rule
    for rule in _RULES
    if rule[1] in (0, 1, VOCABULARY, LAYERS) and "top_k" not in rule[0] and "kv_heads" not in rule[0]
)


def shrunk(config: Any, depth: int = 0, mildly: bool = False) -> Any:
    """A small configuration of the same class, its parts included; `mildly` keeps all widths."""
    rules = _MILD_RULES if mildly else _RULES
    base = next(one for one in type(config).__mro__ if one.__name__ in ("PreTrainedConfig", "PretrainedConfig"))
    small: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name in ("transformers_version", "architectures", "torch_dtype", "dtype"):
            continue
        if isinstance(value, base):
            small[name] = shrunk(value, depth + 1, mildly) if depth < 3 else value
        elif (found := _number(name, value, rules)) is not value:
            small[name] = found
    heads = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    if heads[0] == heads[1] and "num_key_value_heads" in small:  # some need as many of both
        small["num_key_value_heads"] = small["num_attention_heads"]
    count = next((small[n] for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if n in small), LAYERS)
    many = next((vars(config)[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if n in vars(config)), None)
    for name, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == many and not isinstance(value[0], (list, tuple)):
            small[name] = _kinds(small.get(name, value), count)
    for name in () if mildly else ("rope_parameters", "rope_scaling"):
        if isinstance(getattr(config, name, None), dict):
            small[name] = _rope(getattr(config, name))
    return _built(config, small)


def _built(config: Any, small: dict[str, Any]) -> Any:
    try:
        made = type(config)(**small)  # so that what is derived from the numbers is derived again
    except Exception:  # it takes other names, or a check of its own says no: the numbers are set on the default
        made = type(config)()
    for name, value in small.items():
        try:
            if getattr(made, name, None) != value:
                setattr(made, name, value)
        except Exception:  # a property without a setter follows from another number
            continue
    return made


def _number(name: str, value: Any, rules: tuple[tuple[str, int], ...]) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, (str, float)):
        return value
    if isinstance(value, int):
        return _integer(name, value, rules)
    if isinstance(value, (list, tuple)) and value and all(type(one) is int for one in value):
        if _TOKEN.search(name):
            return value
        return type(value)(_integer(name, one, rules, listed=True) for one in value)
    return value


def _integer(name: str, value: int, rules: tuple[tuple[str, int], ...], listed: bool = False) -> int:
    name = name.lower()
    if _SPECIAL.search(name) and value >= VOCABULARY:
        return 100 + sum(map(ord, name)) % 28
    if _TOKEN.search(name):
        return value if value < VOCABULARY else value % 8 + 1
    for pattern, most in rules:
        if re.search(pattern, name):
            if most == 0 or value <= most:
                return value
            if listed and most == WIDTH:  # sizes of stages differ: they keep their ratios
                return max(value // 4 // 16 * 16, 16) if value > WIDTH else value
            return most
    return value


def _kinds(values: Any, count: int) -> Any:
    """`count` entries, of as many kinds as there are."""
    kinds = list(dict.fromkeys(values))[:count]
    return type(values)([*kinds, *([values[0]] * count)][:count])


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    made = {key: _rope(one) if isinstance(one, dict) else one for key, one in value.items()}
    if not any(isinstance(one, dict) for one in made.values()):
        made["mrope_section"] = [2, 1, 1]  # of half a head; models without sections pass it by
    return made
