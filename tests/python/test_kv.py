"""saccade.kv: pages of sequences, and attention over what they hold."""

import copy
import pickle

import pytest
from saccade.c.abi import SaccadeError
from saccade.kv import Cache

torch = pytest.importorskip("torch")

from saccade.torch import cached_attention  # noqa: E402

PAGE, HKV, D = 4, 2, 8


def step(cache, pools, whole, sequences, counts):
    slots, copies = cache.grow(sequences, counts)
    new = [torch.randn(len(slots), HKV, D) for _ in pools]
    for pool, k in zip(pools, new):
        for source, target in copies:
            pool[target] = pool[source]
        pool.view(-1, HKV, D)[slots] = k
    at = 0
    for s, n in zip(sequences, counts):
        for i, k in enumerate(new):
            whole[s][i] = torch.cat([whole[s][i], k[at : at + n]])
        at += n


def test_forks_attend_to_their_own_keys():
    torch.manual_seed(0)
    cache = Cache(pages=16, page=PAGE, sequences=4)
    pools = [torch.zeros(16, PAGE, HKV, D) for _ in range(2)]
    a = cache.add()
    whole = {a: [torch.zeros(0, HKV, D) for _ in range(2)]}
    step(cache, pools, whole, [a], [10])
    b = cache.fork(a)
    whole[b] = list(whole[a])
    step(cache, pools, whole, [a, b], [3, 7])
    assert cache.free_pages == 16 - 2 - 2 - 3
    table, lengths = cache.table([a, b])
    assert lengths == [13, 17] and table[0][4] == -1 and table[0][:2] == table[1][:2]
    q = torch.randn(2, 4, 1, D)
    out = cached_attention(
        q,
        *(p.transpose(1, 2) for p in pools),
        block_table=torch.tensor(table, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
    )
    for i, s in enumerate((a, b)):
        k, v = (x.transpose(0, 1)[None] for x in whole[s])
        want = cached_attention(q[i : i + 1], k.contiguous(), v.contiguous())
        torch.testing.assert_close(out[i : i + 1], want)


def test_errors_change_nothing():
    cache = Cache(pages=2, page=PAGE, sequences=1)
    s = cache.add()
    with pytest.raises(SaccadeError, match="got one more, expected at most 1"):
        cache.fork(s)
    with pytest.raises(SaccadeError, match="got 2 free, expected 3 or more|expected 0 to 8"):
        cache.grow([s], [9])
    with pytest.raises(ValueError, match="one for each sequence"):
        cache.grow([s], [])
    assert cache.length(s) == 0 and cache.length(5) == -1 and cache.free_pages == 2
    cache.grow([s], [8])
    cache.drop(s, 5)
    assert cache.table([s])[0][0][0] == -1 and cache.free_pages == 1
    cache.free(s)
    assert cache.free_pages == 2


def test_numbers_are_not_cut():
    cache = Cache(pages=4, page=PAGE, sequences=1)
    s = cache.add()
    cache.grow([s], [6])
    for call in (
        lambda: cache.truncate(s + 2**32, 1),
        lambda: cache.truncate(s, 2**64 + 1),
        lambda: cache.drop(s + 2**32, 4),
        lambda: cache.length(s + 2**32),
        lambda: Cache(pages=2**64 + 2, page=PAGE, sequences=1),
    ):
        with pytest.raises(ValueError, match="expected a number of (32|64) bits"):
            call()
    assert cache.length(s) == 6


def test_copies_are_refused():
    """Two objects would count, and free, the same pages."""
    cache = Cache(4, 4, 2)
    for copy_of in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="expected one object"):
            copy_of(cache)
    assert cache.add() == 0


def test_windows_longer_than_the_pool():
    """Pages that no query sees any more are used again, for as many keys as were asked for."""
    from saccade.torch import PagedCache

    cache = PagedCache(1, pages=4, page=4, sequences=1, heads=1, head_dim=8, most_keys=100)
    whole, s, window = torch.randn(1, 100, 8), cache.add(), "q >= kv && q - kv < 4"
    for t in range(100):
        cache.step([s], [1])
        cache.append(0, *[whole[:, t : t + 1]] * 2)
        cache.drop(s, max(0, cache.length(s) - 4))
        if t % 33 == 0:
            q, keys = torch.randn(1, 2, 1, 8), whole[None, :, : t + 1]
            want = cached_attention(q, keys, keys, window)
            torch.testing.assert_close(cache.attend(0, q, window), want)
