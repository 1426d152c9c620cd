"""attn_implementation="saccade" in generation: the tokens of "eager", f32, random weights."""

import importlib.util

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import saccade.torch as st  # noqa: E402

SMALL = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    initializer_range=0.5, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)
WINDOWED = dict(SMALL, sliding_window=7)
ALTERNATING = dict(WINDOWED, layer_types=["sliding_attention", "full_attention"])
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**WINDOWED),
    "qwen3": lambda: transformers.Qwen3Config(
        **ALTERNATING, use_sliding_window=True, max_window_layers=1
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **ALTERNATING, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **ALTERNATING, num_local_experts=2, num_experts_per_tok=1
    ),
}
if hasattr(transformers, "Gemma4TextConfig"):  # whose last layers see the last queries alone
    CONFIGS["gemma4"] = lambda: transformers.Gemma4TextConfig(
        **dict(WINDOWED, num_hidden_layers=4),
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        global_head_dim=16,
        vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=8,
    )


@pytest.fixture(scope="module", autouse=True)
def registered():
    st.register_transformers()


def made(config, kind=None):
    torch.manual_seed(5)
    model = (kind or transformers.AutoModelForCausalLM).from_config(config).eval()
    for name, p in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(p)
    return model


def padded(side):
    torch.manual_seed(6)
    ids = torch.randint(1, 97, (3, 13))
    live = torch.ones_like(ids)
    for row, n in ((0, 5), (2, 1)):
        dead = slice(None, n) if side == "left" else slice(13 - n, None)
        ids[row, dead], live[row, dead] = 0, 0
    return dict(input_ids=ids, attention_mask=live)


def tokens(model, name, given, **options):
    model.set_attn_implementation(name)
    return model.generate(**given, do_sample=False, **{"max_new_tokens": 6, **options})


def same(model, given, **options):
    want = tokens(model, "eager", given, **options)
    assert want.unique().numel() > 5  # not one token for ever
    assert torch.equal(tokens(model, "saccade", given, **options), want)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens(name):
    model = made(CONFIGS[name]())
    same(model, padded("left"))
    same(model, padded("left"), cache_implementation="static", disable_compile=True)


def test_several_tokens_at_a_time():
    given = {k: v[1:2] for k, v in padded("left").items()}
    same(made(CONFIGS["mistral"]()), given, max_new_tokens=12, prompt_lookup_num_tokens=3)


OF_ALL = ["llama", "gemma2", "gpt_oss"]  # what the others have they have too


@pytest.mark.parametrize("name", OF_ALL)
def test_right_padding(name):
    model, given = made(CONFIGS[name]()), padded("right")
    found = []
    for kind in ("eager", "saccade"):
        model.set_attn_implementation(kind)
        with torch.no_grad():
            found.append(model(**given).logits[given["attention_mask"].bool()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_encoder_and_decoder():
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0, eos_token_id=None, pad_token_id=0, initializer_factor=8.0,
    )
    model = made(config, transformers.AutoModelForSeq2SeqLM)
    for side in ("left", "right"):
        same(model, padded(side))


@pytest.mark.parametrize("name", OF_ALL)
def test_continuous_batching(name):
    """generate_batch: prompts and new tokens of several sequences packed in one call."""
    model = made(CONFIGS[name]())
    if not hasattr(model, "generate_batch"):
        pytest.skip("this Transformers has no generate_batch")
    if not importlib.util.find_spec("psutil") and transformers.__version__ < "5.23":
        pytest.skip("generate_batch of this Transformers takes psutil to see the host's memory")
    torch.manual_seed(7)
    prompts = [torch.randint(1, 97, (n,)).tolist() for n in (5, 17, 1, 9)]
    options = transformers.GenerationConfig(
        max_new_tokens=7, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    model.set_attn_implementation("saccade")
    found = model.generate_batch(prompts, generation_config=options, progress_bar=False)
    for prompt, result in zip(prompts, found.values()):
        given = dict(input_ids=torch.tensor([prompt]))
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        want = tokens(model, "eager", given, max_new_tokens=7)[0, len(prompt) :].tolist()
        assert result.generated_tokens == want


@pytest.mark.parametrize("window", [None, 3])
def test_packed_by_captures_is_ragged(window):
    """What GPUs run beside what CPUs run, here both on the CPU; two rows belong to nobody."""
    from saccade.torch.transformers import _of_one_sequence, _packed

    torch.manual_seed(8)
    of_q, of_k = torch.tensor([0, 3, 4, 9]), torch.tensor([0, 7, 8, 17])
    q, k, v = (torch.randn(1, h, n, 16) for h, n in ((4, 11), (2, 17), (2, 17)))
    live = _of_one_sequence(of_q, of_k, 11, 17, window)
    want = st.cached_attention(q, k, v, live, q_offset=0).transpose(1, 2)
    out, _ = _packed(
        None, q, k, v, None, cu_seq_lens_q=of_q, cu_seq_lens_k=of_k, sliding_window=window
    )
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    assert not out[:, 9:].any() and out[:, :9].any()


def test_options_of_all_calls(monkeypatch):
    """kernel_options reach every call, of generation and of continuous batching."""
    from saccade.torch import transformers as ours

    seen = []

    def spy(call):
        def watched(*given, **options):
            seen.append((call.__name__, options["kernel_options"]))
            return call(*given, **options)

        return watched

    for name in ("flex_attention", "cached_attention"):
        monkeypatch.setattr(ours, name, spy(getattr(ours, name)))
    options = {"BATCH_INVARIANT": True}
    st.register_transformers("saccade_invariant", kernel_options=options)
    model = made(CONFIGS["gpt_oss"]())
    assert torch.equal(
        tokens(model, "saccade_invariant", padded("left")),
        tokens(model, "eager", padded("left")),
    )
    rows = torch.randn(1, 4, 5, 16)
    starts = torch.tensor([0, 5])
    packed = transformers.AttentionInterface()["saccade_invariant_packed"]
    packed(None, rows, rows, rows, None, cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    assert {name for name, _ in seen} == {"flex_attention", "cached_attention"}
    assert all(given == options for _, given in seen)
    with pytest.raises(ValueError, match="kernel_options"):
        st.register_transformers(kernel_options={"BATCH_INVARIANT": "often"})
