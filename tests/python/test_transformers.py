"""attn_implementation="saccade" against "sdpa" on small models with random weights."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import saccade.torch as st  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def registered():
    st.register_transformers()


def small_llama(**options):
    return transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **options,
    )


def both(make, *inputs, **options):
    found = []
    for name in ("sdpa", "saccade"):
        torch.manual_seed(0)
        model = make(name).eval()
        with torch.no_grad():
            found.append(model(*inputs, **options))
    return found


def test_decoder():
    config = small_llama()
    ids = torch.randint(0, 97, (2, 33))
    live = torch.ones_like(ids)
    live[1, :5] = 0
    a, b = both(
        lambda n: transformers.LlamaForCausalLM._from_config(config, attn_implementation=n),
        ids,
        attention_mask=live,
    )
    keep = live.bool()
    torch.testing.assert_close(a.logits[keep], b.logits[keep], rtol=1e-4, atol=1e-4)


def test_weights_that_are_not_kept(monkeypatch):
    """output_attentions gives none, as of "sdpa", and is told so once."""
    from transformers.utils import logging

    told = []
    logger = logging.get_logger("transformers.saccade.torch.transformers")
    monkeypatch.setattr(logger, "warning", lambda text, *_, **__: told.append(text))
    type(logger).warning_once.cache_clear()
    ids = torch.randint(0, 97, (1, 9))
    config = small_llama()
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="saccade")
    for _ in range(2):
        with torch.no_grad():
            assert not model(ids, output_attentions=True).attentions
    assert len(told) == 1 and "output_attentions=True" in told[0] and "eager" in told[0]


def test_generation():
    config = small_llama(
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids = torch.randint(2, 97, (1, 9))
    texts = []
    for name in ("sdpa", "saccade"):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=name)
        texts.append(model.eval().generate(ids, max_new_tokens=12, do_sample=False))
    assert torch.equal(*texts)


def test_encoder():
    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
    )
    ids = torch.randint(0, 97, (2, 21))
    live = torch.ones_like(ids)
    live[0, 15:] = 0
    a, b = both(
        lambda n: transformers.BertModel._from_config(config, attn_implementation=n),
        ids,
        attention_mask=live,
    )
    keep = live.bool()
    torch.testing.assert_close(
        a.last_hidden_state[keep], b.last_hidden_state[keep], rtol=1e-4, atol=1e-4
    )


def test_dense_bool_masks_select():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    live = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    from saccade.torch.transformers import _attention

    out, _ = _attention(torch.nn.Module(), q, k, v, live)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=live)
    assert torch.allclose(out.transpose(1, 2), want, atol=1e-5)


@pytest.mark.parametrize("shape", [(6, 6), (1, 6), (2, 6, 6), (1, 1, 6)])
def test_tensors_of_fewer_dimensions(shape):
    """They are broadcast from the last dimension on, as torch does, and so is a bias."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 6, 8) for _ in range(3))
    added = torch.randn(shape)
    from saccade.torch.transformers import _attention

    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added)
    module = torch.nn.Module()
    out, _ = _attention(module, q, k, v, added)
    torch.testing.assert_close(out.transpose(1, 2), want)
    out, _ = _attention(module, q, k, v, None, position_bias=added, is_causal=False)
    torch.testing.assert_close(out.transpose(1, 2), want)


def test_sinks_of_each_row():
    """As Inkling 2 makes them, by another name than the sinks of each head."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    sinks = torch.randn(2, 4, 6, 1)
    from saccade.torch.transformers import _attention

    weights = torch.cat([q @ k.mT * 8**-0.5, sinks], -1).softmax(-1)[..., :-1]
    out, _ = _attention(torch.nn.Module(), q, k, v, None, sinks=sinks, is_causal=False)
    torch.testing.assert_close(out.transpose(1, 2), weights @ v)


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_selected_keys_are_refused(name):
    """They say what a query sees beside the mask, which alone would be another model."""
    from saccade.torch.transformers import _attention, _packed

    rows = torch.randn(1, 2, 6, 8)
    for call in (_attention, _packed):
        with pytest.raises(NotImplementedError, match=f"got {name}"):
            call(torch.nn.Module(), rows, rows, rows, None, **{name: torch.zeros(1, 6, 2)})


@pytest.mark.parametrize("name", ["position_bias", "sinks"])
def test_packed_batches_have_no_biases(name):
    from saccade.torch.transformers import _packed

    rows = torch.randn(1, 2, 6, 8)
    with pytest.raises(NotImplementedError, match=f"got {name}"):
        _packed(None, rows, rows, rows, None, **{name: torch.zeros(1, 2, 6, 6)})


def test_masks_that_are_broadcast():
    """As T5's and LayoutLM's kin make them: one row for all queries, added."""
    config = small_llama()
    ids = torch.randint(0, 97, (2, 7))
    added = torch.zeros(2, 1, 1, 7)
    added[1, ..., :2] = torch.finfo(torch.float32).min
    make = lambda name: transformers.LlamaForCausalLM._from_config(  # noqa: E731
        config, attn_implementation=name
    )
    a, b = both(make, ids, attention_mask=added)
    torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-4)


def test_generate_with_a_static_cache():
    torch.manual_seed(0)
    st.register_transformers()
    made = {}
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (2, 9))
    for name in ("sdpa", "saccade"):
        model.set_attn_implementation(name)
        made[name] = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            cache_implementation="static",
            disable_compile=True,
            pad_token_id=0,
        )
    assert torch.equal(made["sdpa"], made["saccade"])


@pytest.mark.parametrize("kind", ["Bloom", "MPNet", "Mpt", "Falcon"])
def test_models_with_attention_of_their_own_are_refused(kind):
    """They would run it with a BlockMask in the place of a tensor."""
    config = getattr(transformers, kind + "Config")(vocab_size=97)
    config.num_hidden_layers = 1
    model = getattr(transformers, "MPNetModel" if kind == "MPNet" else f"{kind}ForCausalLM")
    with pytest.raises(ValueError, match="attention by its own code"):
        with torch.device("meta"):
            model._from_config(config, attn_implementation="saccade")
    with torch.device("meta"):
        model._from_config(config, attn_implementation="eager")


@pytest.mark.parametrize(
    "kind",
    ["Doge", "NllbMoe", "BigBirdPegasus", "Data2VecVision", "DeepseekV32", "DeepseekV4"],
)
def test_models_that_compute_with_masks_are_refused(kind):
    if not hasattr(transformers, kind + "Config"):
        pytest.skip("not in this version of Transformers")
    config = getattr(transformers, kind + "Config")()
    with pytest.raises(ValueError, match="attention by its own code"):
        with torch.device("meta"):
            transformers.AutoModel.from_config(config, attn_implementation="saccade")


def test_models_that_ask_for_tensors():
    """SigLIP 2 repeats its mask for the head that pools."""
    if not hasattr(transformers, "Siglip2VisionConfig"):
        pytest.skip("not in this version of Transformers")
    config = transformers.Siglip2VisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_patches=16,
        patch_size=4,
    )
    torch.manual_seed(1)
    pixels, live = torch.randn(2, 16, 48), torch.ones(2, 16, dtype=torch.long)
    live[1, 8:] = 0
    a, b = both(
        lambda n: transformers.Siglip2VisionModel._from_config(config, attn_implementation=n),
        pixels,
        pixel_attention_mask=live,
        spatial_shapes=torch.tensor([[4, 4], [2, 4]]),
    )
    torch.testing.assert_close(a.pooler_output, b.pooler_output, rtol=1e-4, atol=1e-4)


def test_a_padded_mask_in_a_full_graph():
    """Other padding and lengths compile nothing beyond what torch's own do."""
    config = small_llama()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="saccade")
    graphs = []
    count = lambda graph, _: graphs.append(graph) or graph  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(model.eval(), fullgraph=True, backend=count)
    with torch.no_grad():
        for n, padded in ((33, 5), (33, 9), (27, 0), (30, 4)):
            ids, live = torch.randint(0, 97, (2, n)), torch.ones(2, n, dtype=torch.long)
            live[1, :padded] = 0
            a, b = (f(ids, attention_mask=live).logits for f in (model, compiled))
            torch.testing.assert_close(a[live.bool()], b[live.bool()])
    assert len(graphs) <= 2
