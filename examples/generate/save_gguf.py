"""Writes a Llama of Transformers as the GGUF file that examples/generate reads, in f32.

usage: python save_gguf.py FOLDER OUT.gguf     (a model's folder, with its tokenizer.json)
       python save_gguf.py --random OUT.gguf   (a tiny one with random weights, its tokenizer
                                                trained on this file)

The tokenizer is a byte-level BPE as GPT-2 has it. Heads' elements are reordered: GGUF turns
neighbouring pairs, Transformers an element and the one half a head further.
"""
import json
import struct
import sys
from pathlib import Path

U32, F32, BOOL, TEXT, ARRAY, I32 = 4, 6, 7, 8, 9, 5
ALIGNMENT = 32


def text(x):
    data = x.encode()
    return struct.pack("<Q", len(data)) + data


def value(key, kind, x):
    forms = {U32: "<I", F32: "<f", BOOL: "<?"}
    packed = text(x) if kind == TEXT else struct.pack(forms[kind], x)
    return text(key) + struct.pack("<I", kind) + packed


def array(key, kind, xs):
    packed = b"".join(map(text, xs)) if kind == TEXT else struct.pack(f"<{len(xs)}i", *xs)
    return text(key) + struct.pack("<IIQ", ARRAY, kind, len(xs)) + packed


def shape_values(config):
    d = config.head_dim or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    return [
        value("general.architecture", TEXT, "llama"),
        value("llama.block_count", U32, config.num_hidden_layers),
        value("llama.embedding_length", U32, config.hidden_size),
        value("llama.feed_forward_length", U32, config.intermediate_size),
        value("llama.attention.head_count", U32, config.num_attention_heads),
        value("llama.attention.head_count_kv", U32, config.num_key_value_heads),
        value("llama.attention.key_length", U32, d),
        value("llama.rope.dimension_count", U32, d),
        value("llama.rope.freq_base", F32, rope["rope_theta"]),
        value("llama.attention.layer_norm_rms_epsilon", F32, config.rms_norm_eps),
        value("llama.context_length", U32, config.max_position_embeddings),
    ]


def token_values(tokenizer, vocab, eos):
    """tokenizer: a tokenizers.Tokenizer; vocab: rows of the embedding, which may be more."""
    made = json.loads(tokenizer.to_str())
    by_id = {i: word for word, i in tokenizer.get_vocab().items()}
    special = {t["id"] for t in made["added_tokens"] if t["special"]}
    digits = "Digits" in json.dumps(made["pre_tokenizer"])
    merges = [m if isinstance(m, str) else " ".join(m) for m in made["model"]["merges"]]
    found = [
        value("tokenizer.ggml.model", TEXT, "gpt2"),
        value("tokenizer.ggml.pre", TEXT, "smollm" if digits else "gpt-2"),
        array("tokenizer.ggml.tokens", TEXT, [by_id.get(i, f"[{i}]") for i in range(vocab)]),
        array("tokenizer.ggml.token_type", I32,
              [3 if i in special else 1 for i in range(vocab)]),
        array("tokenizer.ggml.merges", TEXT, merges),
        value("tokenizer.ggml.add_bos_token", BOOL, False),
    ]
    if eos is not None:
        found.append(value("tokenizer.ggml.eos_token_id", U32, eos))
    return found


def in_pairs(weight, heads):
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tensors(model):
    config, state = model.config, model.state_dict()
    yield "token_embd.weight", state["model.embed_tokens.weight"]
    yield "output_norm.weight", state["model.norm.weight"]
    if not config.tie_word_embeddings:
        yield "output.weight", state["lm_head.weight"]
    for i in range(config.num_hidden_layers):
        for theirs, name in NAMES.items():
            x = state[f"model.layers.{i}.{theirs}.weight"]
            if name == "attn_q":
                x = in_pairs(x, config.num_attention_heads)
            elif name == "attn_k":
                x = in_pairs(x, config.num_key_value_heads)
            yield f"blk.{i}.{name}.weight", x


def save(model, tokenizer, path):
    vocab, eos = model.config.vocab_size, model.config.eos_token_id
    values = shape_values(model.config) + token_values(tokenizer, vocab, eos)
    heads, data = [], bytearray()
    for name, x in tensors(model):
        shape = struct.pack(f"<{x.dim()}Q", *reversed(x.shape))
        kind_and_place = struct.pack("<IQ", 0, len(data))
        heads.append(text(name) + struct.pack("<I", x.dim()) + shape + kind_and_place)
        data += x.detach().float().contiguous().numpy().tobytes()
        data += bytes(-len(data) % ALIGNMENT)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(heads), len(values))
    head += b"".join(values) + b"".join(heads)
    Path(path).write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)


def random_model(seed=0, tied=True, digits=True):
    """(model, tokenizer): a tiny one."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    each = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*each, bytes_of])
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=48, intermediate_size=80,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=512, initializer_range=0.2, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return transformers.LlamaForCausalLM(config).eval(), tokenizer


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if sys.argv[1] == "--random":
        model, tokenizer = random_model()
    else:
        import transformers
        from tokenizers import Tokenizer

        model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
        tokenizer = Tokenizer.from_file(str(Path(sys.argv[1]) / "tokenizer.json"))
    save(model, tokenizer, sys.argv[2])


if __name__ == "__main__":
    main()
