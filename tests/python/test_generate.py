"""examples/generate beside Transformers' eager attention: the same tokens of a tiny random
Llama in f32, the same perplexity, and one line for what is wrong."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(os.environ.get("SACCADE_LIBRARY", ROOT / "build" / "libsaccade.so"))
PROGRAM = LIBRARY.parent / "examples" / "generate"
sys.path.insert(0, str(ROOT / "examples" / "generate"))

if not PROGRAM.is_file():
    pytest.skip("no examples/generate: built where a BLAS is", allow_module_level=True)

import save_gguf  # noqa: E402


def run(*options, status=0):
    command = [str(PROGRAM), *map(str, options)]
    environment = dict(os.environ, OPENBLAS_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


@pytest.fixture(scope="module", params=[(True, True), (False, False)], ids=["tied", "untied"])
def made(request, tmp_path_factory):
    tied, digits = request.param
    model, tokenizer = save_gguf.random_model(3, tied, digits)
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    save_gguf.save(model, tokenizer, path)
    return model, tokenizer, path


PROMPTS = ["def f(x1):\n    return  12", "it's 3 \u00e9t\u00e9s\t\U0001f600!",
           "x" * 7 + " y\n\n"]


def test_tokens_of_text_and_eager_tokens(made):
    """A prompt of more than one chunk too."""
    model, tokenizer, path = made
    for prompt in [*PROMPTS, (ROOT / "CONTRIBUTING.md").read_text()[:500]]:
        given = torch.tensor([tokenizer.encode(prompt).ids])
        with torch.no_grad():
            expected = model.generate(given, max_new_tokens=20, do_sample=False,
                                      attention_mask=torch.ones_like(given))
        expected = expected[0, given.shape[1]:].tolist()
        by_text = run(path, "-p", prompt, "-n", 20, "--print-tokens")
        numbers = ",".join(map(str, given[0].tolist()))
        by_number = run(path, "--tokens", numbers, "-n", 20, "--threads", 1)
        in_pages = run(path, "-p", prompt, "-n", 20, "--print-tokens", "--page", 7)
        in_one = run(path, "-p", prompt, "-n", 20, "--print-tokens", "--page", 5000)
        assert [int(x) for x in by_text.split()] == expected
        assert by_number == by_text == in_pages == in_one


def test_perplexity(made, tmp_path):
    model, tokenizer, path = made
    text = (ROOT / "NEWS").read_text()[:600]
    (tmp_path / "text").write_text(text)
    given = torch.tensor([tokenizer.encode(text).ids])
    with torch.no_grad():
        loss = model(given, labels=given).loss.item()
    found = run(path, "--perplexity", tmp_path / "text").split()
    assert int(found[3]) == given.shape[1] - 1
    assert math.isclose(float(found[1]), math.exp(loss), rel_tol=1e-4)
    assert found == run(path, "--perplexity", tmp_path / "text", "--page", 16).split()
    for cache, bound in (("i8", 0.02), ("e4m3", 0.1), ("i4", 0.5)):  # more than rounding, too
        options = ["--perplexity", tmp_path / "text", "--cache", cache, "--group", 8]
        other = float(run(path, *options).split()[1])
        assert run(path, *options, "--page", 5).split()[1] == f"{other:.6f}"
        assert 1e-5 < abs(math.log(other) - loss) < bound


def test_sampling_repeats_and_keeps_to_the_top(made):
    model, tokenizer, path = made
    prompt = PROMPTS[0]
    options = [path, "-p", prompt, "-n", 12, "--print-tokens", "--temperature", 1.5]
    first = run(*options, "--seed", 7)
    assert first == run(*options, "--seed", 7)
    assert len({first, run(*options, "--seed", 8), run(*options, "--seed", 9)}) > 1
    greedy = run(path, "-p", prompt, "-n", 12, "--print-tokens")
    assert run(*options, "--top-k", 1) == greedy
    assert run(*options, "--top-p", 0) == greedy
    given = tokenizer.encode(prompt).ids
    top = run(*options, "--top-k", 3, "--seed", 5).split()
    with torch.no_grad():
        all_tokens = torch.tensor([given + [int(x) for x in top]])
        best = model(all_tokens).logits[0, len(given) - 1 : -1].topk(3).indices.tolist()
    assert all(int(x) in row for x, row in zip(top, best))


def test_one_line_for_what_is_wrong(made, tmp_path):
    path = made[2]
    (tmp_path / "short").write_bytes(path.read_bytes()[:5000])
    (tmp_path / "none").write_bytes(b"")
    whole = path.read_bytes()
    (tmp_path / "shape").write_bytes(whole.replace(b"llama.embedding_length\4\0\0\0\x30",
                                                   b"llama.embedding_length\4\0\0\0\x40"))
    (tmp_path / "name").write_bytes(whole.replace(b"blk.1.ffn_up", b"blk.9.ffn_up"))
    for options, words in [
        ([tmp_path / "short"], "up to the end, expected"),
        ([tmp_path / "none"], "expected a file that can be read and is not empty"),
        ([tmp_path / "absent"], "expected a file that can be read and is not empty"),
        ([tmp_path / "shape"], "token_embd.weight: got [1, 400, 48], expected [400, 64]"),
        ([tmp_path / "name"], "blk.1.ffn_up.weight: got nothing, expected [80, 48]"),
        ([path, "--tokens", "1,400"], "got token 400, expected 0 to 399"),
        ([path, "--tokens", "1,x"], '--tokens: got "x", expected numbers and commas'),
        ([path, "--top-p", "2"], '--top-p: got "2", expected a number from 0 to 1'),
        ([path, "--cache", "f64"], '--cache: got "f64", expected f32, e4m3, e5m2, i8 or i4'),
        ([path, "--cache", "i8", "--group", "5"], "--group: got 5, expected a divisor of"),
        ([path, "--count"], "--count: got nothing behind it, or it is not an option"),
        ([path, "-n", "600"], "llama.context_length: got 512, expected the"),
        ([path, "--chat", "--tokens", "1"], "--chat: goes with --prompt and --file alone"),
        ([], "MODEL.gguf: got nothing, expected a file"),
    ]:
        error = run(*options, status=2)
        assert words in error and error.count("\n") == 1, error
