"""attn_implementation="saccade" for Hugging Face Transformers.

Transformers describes a model's mask as a function of positions, which is what a mod is: it is
traced, proven and kept, so neither a Q x KV mask nor its evaluation exists.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, Optional

import torch

from .block_mask import BlockMask
from .checks import backend_of
from .flex import flex_attention
from .masks import and_masks, create_block_mask
from .mods import mask, score
from .serving import cached_attention


def _mask(
    batch_size,
    q_length=None,
    kv_length=None,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    device="cpu",
    cache_position=None,
    config=None,
    **others,
) -> Any:
    """A mask in transformers' interface to a BlockMask; None where everything is live."""
    if isinstance(attention_mask, BlockMask):  # generate made it beforehand, by this function
        return attention_mask
    if getattr(config, "model_type", None) in _WITH_TENSORS:
        from transformers.masking_utils import sdpa_mask

        queries = dict(q_length=q_length, q_offset=q_offset)
        if cache_position is not None and q_length is None:
            queries = dict(cache_position=cache_position)
        given = dict(mask_function=mask_function, attention_mask=attention_mask, **queries)
        given.update(kv_length=kv_length, kv_offset=kv_offset, device=device, **others)
        return sdpa_mask(batch_size, **given)
    if cache_position is not None and q_length is None:
        q_length, q_offset = cache_position.shape[0], int(cache_position[0])
    if torch.is_tensor(q_length):
        q_length, q_offset = q_length.shape[0], int(q_length[0])
    if mask_function is None:
        from transformers.masking_utils import causal_mask_function

        mask_function = causal_mask_function
    is_in_graph = torch.compiler.is_compiling()  # where no value can be asked for
    if not is_in_graph:
        q_offset, kv_offset = int(q_offset), int(kv_offset)
    if attention_mask is not None and (is_in_graph or not bool(attention_mask.all())):
        live = attention_mask.to(torch.bool)
        short = kv_length + kv_offset - live.shape[-1]
        if short > 0:
            live = torch.nn.functional.pad(live, (0, short))
        mask_function = and_masks(mask_function, lambda b, h, q, kv: live[b, kv])
    inner = mask_function

    def moved(b, h, q_idx, kv_idx):
        return inner(b, h, q_idx + q_offset, kv_idx + kv_offset)

    return create_block_mask(moved, batch_size, None, q_length, kv_length, device=device)


# Models that compute with their masks, and leave the rest to the function that they are given.
_WITH_TENSORS = (
    "lasr_encoder",
    "nemotron_asr_streaming_encoder",
    "qwen4_exp_text",
    "siglip2_vision_model",
    "t5gemma2_decoder",
)

_NO_WEIGHTS = (
    "saccade: got output_attentions=True, which gives no attention weights as none are kept, "
    'expected attn_implementation="eager" for them'
)


def _logger():
    from transformers.utils import logging

    return logging.get_logger("transformers." + __name__)  # with its verbosity


def _attention(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    softcap=None,
    s_aux=None,
    position_bias=None,
    is_causal=None,
    output_attentions=False,
    kernel_options=None,
    sinks=None,
    **others,
):
    """transformers' attention interface; query [B, H, Q, D] -> [B, Q, H, D]. s_aux: sinks [H];
    sinks: those of each row, [B, H, Q, 1]."""
    _check_selections(others)
    if output_attentions:
        _logger().warning_once(_NO_WEIGHTS)
    if sinks is not None:
        s_aux = sinks.squeeze(-1) if sinks.dim() == 4 else sinks
    dense = attention_mask if torch.is_tensor(attention_mask) else None
    block_mask = attention_mask if isinstance(attention_mask, BlockMask) else None
    if (
        attention_mask is None
        and query.shape[2] > 1
        and (is_causal if is_causal is not None else getattr(module, "is_causal", True))
    ):
        past = key.shape[2] - query.shape[2]
        block_mask = create_block_mask(
            lambda b, h, q, kv: q + past >= kv,
            None,
            None,
            query.shape[2],
            key.shape[2],
            device=query.device,
        )

    def score(s, b, h, q_idx, kv_idx):
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if dense is not None:
            x = _of_all(dense, b, h, q_idx, kv_idx)
            # where bool, True is live; else it is added
            s = torch.where(x, s, -float("inf")) if dense.dtype is torch.bool else s + x
        if position_bias is not None:
            s = s + _of_all(position_bias, b, h, q_idx, kv_idx)
        return s

    plain = softcap is None and dense is None and position_bias is None
    out = flex_attention(
        query,
        key,
        value,
        None if plain else score,
        block_mask,
        scaling,
        enable_gqa=True,
        kernel_options=kernel_options,
        sinks=s_aux,
        dropout_p=dropout if module.training else 0.0,
    )
    return out.transpose(1, 2).contiguous(), None


def _of_all(t, *places):
    """The element there of a tensor that is broadcast along dimensions of 1, and those before
    its first."""
    places = places[len(places) - t.dim() :]
    return t[tuple(at if n > 1 else 0 for n, at in zip(t.shape, places))]


def _check_selections(given) -> None:
    """Keys that a model selects for each query come beside its mask; to leave them out would be
    another model."""
    for name in ("indices", "block_indices"):
        if given.get(name) is not None:
            raise NotImplementedError(
                f"saccade: got {name}, by which the model selects keys, expected a model that "
                'says what it sees by a mask, or attn_implementation="eager"'
            )


def _packed(
    module,
    query,
    key,
    value,
    attention_mask,
    cache=None,
    scaling=None,
    softcap=None,
    s_aux=None,
    sliding_window=None,
    kernel_options=None,
    **kwargs,
):
    """The same for continuous batching: rows and keys of all sequences lie side by side, query
    [1, H, T, D], and the last row of each stands at its last key."""
    _check_selections(kwargs)
    for name in ("position_bias", "sinks"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"saccade: got {name} in a batch of packed sequences, expected generate, not "
                "generate_batch"
            )
    if cache is not None:  # keys so far beside the new ones; chooses the layer's own lengths
        key, value = _updated(cache, module, key, value, sliding_window, kwargs)
    cu_q, cu_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"saccade: got cu_seq_lens of {cu_q.shape[0]} and {cu_k.shape[0]}, expected as many"
        )
    change = None if softcap is None else score("softcap(c)", c=float(softcap))
    options = dict(scale=scaling, sinks=s_aux, kernel_options=kernel_options)
    if query.is_cuda:
        live = _of_one_sequence(cu_q, cu_k, query.shape[2], key.shape[2], sliding_window)
        out = cached_attention(query, key, value, live, change, q_offset=0, **options)
        return out.transpose(1, 2).contiguous(), None
    rows, keys, values = (t[0].transpose(0, 1) for t in (query, key, value))
    live = "causal()" if sliding_window is None else f"last_keys({int(sliding_window)})"
    out = torch.zeros(*rows.shape[:2], values.shape[2], dtype=rows.dtype)
    cached_attention(
        rows,
        keys,
        values,
        live,
        change,
        cu_seqlens_q=cu_q.int(),
        cu_seqlens_k=cu_k.int(),
        out=out,
        **options,
    )
    return out.unsqueeze(0), None


def _updated(cache, module, key, value, window, kwargs):
    """All keys and values of the batch [1, Hkv, T, D]; kwargs' lengths become the layer's."""
    new = dict(key_states=key, value_states=value, layer_idx=module.layer_idx)
    if "kwargs" in inspect.signature(cache.update).parameters:
        return cache.update(**new, kwargs=kwargs)
    pair = cache.update(  # Transformers up to 5.17
        **new, read_index=kwargs["read_index"], write_index=kwargs["write_index"]
    )
    if isinstance(kwargs["cu_seq_lens_k"], dict):
        kind = "full_attention" if window is None else "sliding_attention"
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][kind]
    return (t.transpose(0, 1).unsqueeze(0) for t in pair)


def _of_one_sequence(cu_q, cu_k, rows, keys, window):
    """The mask that keeps sequences apart where one batch is all of them, by captures."""
    row, q_at = _places(cu_q, rows)
    of_key, k_at = _places(cu_k, keys)
    past = (cu_k.diff() - cu_q.diff()).int()
    n = past.shape[0]  # rows of none, by which a batch may be padded
    q_at = q_at + torch.nn.functional.pad(past, (0, 1))[row]
    text, captures = "s[q] == t[kv] && i[q] >= j[kv]", dict(s=row, t=of_key, i=q_at, j=k_at)
    if window is not None:
        text, captures["W"] = text + " && i[q] - j[kv] < W", int(window)
    return mask(f"{text} && s[q] < n", **captures, n=n)


def _places(cumulative, n):
    """Of n rows side by side: the sequence of each, and its place there."""
    at = torch.arange(n, dtype=torch.int32, device=cumulative.device)
    ends = cumulative[1:].contiguous().int()
    sequence = torch.searchsorted(ends, at, right=True).int()
    return sequence, at - torch.nn.functional.pad(ends, (1, 0))[sequence]


def _admit(name: str) -> None:
    """Continuous batching takes attention by names that it knows: this one too."""
    try:
        from transformers.generation.continuous_batching import ContinuousBatchingManager
    except ImportError:  # a Transformers without
        return
    theirs = ContinuousBatchingManager.switch_to_cb_friendly_attn

    def switch(self, model, *arguments, **options):
        if model.config._attn_implementation != name:
            return theirs(self, model, *arguments, **options)
        model.set_attn_implementation(name + "_packed")
        self._original_attn_impl = name  # which it goes back to

    setattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn", switch)  # noqa: B010


def _refuse_own_attention(name: str) -> None:
    """A model that calls its own attention, whatever it is asked for, is an error from the
    start: it would take a BlockMask for a tensor."""
    from transformers import PreTrainedModel

    check = "get_correct_attn_implementation"
    if not hasattr(PreTrainedModel, check):  # Transformers up to 4.55
        check = "_check_and_adjust_attn_implementation"
    theirs = getattr(PreTrainedModel, check)

    def checked(self, asked, *arguments, **options):
        if asked == name and (_has_own_attention(type(self)) or _has_own_code(self.config)):
            raise ValueError(
                f'attn_implementation: got "{name}" for {type(self).__name__}, which computes '
                "attention by its own code and not by Transformers' attention interface; "
                'expected "eager", or a model that uses the interface'
            )
        return theirs(self, asked, *arguments, **options)

    setattr(PreTrainedModel, check, checked)


_MASKS = (
    "create_causal_mask",
    "create_bidirectional_mask",
    "create_sliding_window_causal_mask",
)


def _has_own_attention(kind: type) -> bool:
    """Whether a model's code asks for masks and knows no table of attention functions. One made
    of other models does neither, or says that they do."""
    places = {c.__module__ for c in kind.__mro__}
    places -= {"transformers.modeling_utils", "builtins"}
    code = [vars(sys.modules[place]) for place in places]
    if any("ALL_ATTENTION_FUNCTIONS" in names for names in code):
        return False
    is_told = getattr(kind, "_supports_attention_backend", False)
    return not is_told and any(name in names for names in code for name in _MASKS)


# These know the table, and yet compute with the mask, take none of the table's functions, or
# select keys by a mask for "eager" and "sdpa" alone.
_OWN_CODE = (
    "axk2",
    "bigbird_pegasus",
    "data2vec-vision",
    "deepseek_v32",
    "deepseek_v4",
    "doge",
    "dots3_note_text",
    "glm_moe_dsa",
    "hy_v4",
    "hy_v4_vl_text",
    "mistral_large4_text",
    "nllb-moe",
    "sam_vision_model",
)


def _has_own_code(config) -> bool:
    kind = getattr(config, "model_type", None)
    names = ("use_relative_position_bias", "use_shared_relative_position_bias")
    is_biased = any(getattr(config, n, False) for n in names)
    return kind in _OWN_CODE or (kind == "beit" and is_biased)


_registered: set[str] = set()


def register_transformers(
    name: str = "saccade", *, kernel_options: Optional[dict[str, Any]] = None
) -> None:
    """Makes attn_implementation=name work in every model that uses the attention interface; for
    others, as Bloom, Falcon, MPT and MPNet, it is a ValueError. kernel_options: of all calls,
    as flex_attention takes them."""
    backend_of(kernel_options)
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    except ImportError as reason:
        raise ImportError(
            "saccade: transformers 4.53 or newer is needed for "
            "register_transformers (pip install './python[transformers]')"
        ) from reason
    attention, packed = _attention, _packed
    if kernel_options is not None:
        attention, packed = (
            functools.partial(f, kernel_options=dict(kernel_options))
            for f in (attention, packed)
        )
    AttentionInterface.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask)
    # which no mask is made for
    AttentionInterface.register(name + "_packed", packed)
    if name not in _registered:
        _registered.add(name)
        _admit(name)
        _refuse_own_attention(name)
