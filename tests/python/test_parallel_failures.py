"""What context_parallel refuses, and what a failure of one rank leaves behind: errors on all
ranks, never numbers of another call. Two processes (gloo, CPU), a group for each case."""

import os
import signal
import sys
import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import two_processes  # noqa: E402

N, H, D = 200, 4, 16

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch has no gloo here", allow_module_level=True)


def tensors(heads=H, batch=1):
    torch.manual_seed(3)
    return [torch.randn(batch, heads, N, D) for _ in range(3)]


def context(mode="gather", seconds=4.0, masks=(), **more):
    """Over a group of its own."""
    from saccade.torch import context_parallel

    given = {"stage_keys": 64} if mode == "staged" else {}
    return context_parallel(
        dist.new_group(), (1, H, N, D), masks, mode=mode, seconds=seconds, **given, **more
    )


def plans_are_made(rank):
    """So that no call of the other cases takes long."""
    from saccade.torch import flex_attention

    for mode in ("gather", "staged", "heads"):
        with context(mode, 60) as cp:
            own = [cp.shard(t).requires_grad_() for t in tensors()]
            flex_attention(*own, lambda s, b, h, i, j: s * 2.0).sum().backward()
            flex_attention(*own).sum().backward()


def other_heads(rank):
    """Other head counts than were declared, which would be cut at another place."""
    from saccade.torch import flex_attention

    for heads in (5, 8):
        with context("heads") as cp:
            own = [cp.shard(t) for t in tensors(heads)]
            with pytest.raises(ValueError, match=f"got {heads}, {heads} and {heads} heads, ex"):
                flex_attention(*own)
    with context("heads") as cp:
        q, k, v = [cp.shard(t) for t in tensors()]
        with pytest.raises(ValueError, match="got 4, 2 and 2 heads, expected 4, 4 and 4"):
            flex_attention(q, k[:, :2], v[:, :2], enable_gqa=True)


def caught(rank):
    """One rank catches an error of its own and goes on with the next call, while the other is
    in the first: before the library is called, in forward and in backward."""
    import saccade.torch.ranks_calls as calls
    from saccade.torch import flex_attention

    memory = calls._memory

    def none(*_):
        raise torch.OutOfMemoryError("out of memory")

    whole = tensors()
    for mode in ("gather", "staged", "heads"):
        for where in ("forward", "backward"):
            with context(mode) as cp:
                own = [cp.shard(t).requires_grad_() for t in whole]
                out = flex_attention(*own)  # and its backward
                calls._memory = none if rank == 0 else memory
                words = "out of memory" if rank == 0 else "another rank failed, or did not"
                with pytest.raises(RuntimeError, match=words):
                    flex_attention(*own) if where == "forward" else out.sum().backward()
                calls._memory = memory
                with pytest.raises(RuntimeError, match="got a call after one that failed"):
                    flex_attention(*own)


def missed(rank):
    """One rank never makes a call that the other makes, which no rank can know: what it sends
    for the next one does not meet the other's receive."""
    from saccade.torch import flex_attention

    for mode, words in (("gather", "did not answer"), ("heads", "another mask or problem")):
        with context(mode) as cp:
            own = [cp.shard(t).requires_grad_() for t in tensors()]
            made = [flex_attention(*own) for _ in range(2)]
            made[1].sum().backward(retain_graph=True)
            with pytest.raises(RuntimeError, match=words):  # of messages of one size
                made[rank].sum().backward(retain_graph=True)


def another_context(rank):
    """Of the same group, after one that failed on this rank before it sent: its first call does
    not meet the other's of that one."""
    from saccade.torch import context_parallel, flex_attention

    group = dist.new_group()
    for i in range(2):
        with context_parallel(group, (1, H, N, D), seconds=4) as cp:
            own = [cp.shard(t) for t in tensors()]
            given = own if rank or i else [t[:, :, 1:] for t in own]
            words = "did not answer" if rank or i else "this rank's rows"
            with pytest.raises((RuntimeError, ValueError), match=words):
                flex_attention(*given)


def interrupted(rank):
    """Ctrl-C in an exchange, which the other rank is in time for, or late."""
    import saccade.torch.messages as messages
    from saccade.torch import flex_attention

    exchange, handler = messages.Messages.exchange, signal.default_int_handler
    signal.signal(signal.SIGINT, handler)  # shells start what runs behind without it

    def press(*given):
        signal.raise_signal(signal.SIGINT)
        exchange(*given)

    for is_late in (False, True):
        messages.Messages.exchange = press if rank == 0 else exchange
        with context() as cp:
            own = [cp.shard(t) for t in tensors()]
            if rank == 0:
                with pytest.raises(KeyboardInterrupt):
                    flex_attention(*own)
                with pytest.raises(RuntimeError, match="failed before .KeyboardInterrupt"):
                    flex_attention(*own)
            elif not is_late:
                with pytest.raises(RuntimeError, match="did not answer"):
                    flex_attention(*own)
    messages.Messages.exchange = exchange
    assert signal.getsignal(signal.SIGINT) is handler


def own_messages(rank):
    """The caller's, with the tag that they have by default, in the same group."""
    from saccade.torch import flex_attention

    q, k, v = tensors()
    with context(seconds=20) as cp:
        sent = torch.arange(5000.0)
        work = dist.isend(sent, 1, group=cp.group) if rank == 0 else None
        flex_attention(*[cp.shard(t) for t in (q, k, v)])
        if work is not None:
            work.wait()
        else:
            got = torch.empty(5000)
            dist.recv(got, 0, group=cp.group)
            assert torch.equal(got, sent)


def freed(rank):
    """Nothing of a context that is let go waits for the garbage collector."""
    import gc
    import weakref

    from saccade.torch import flex_attention

    gc.disable()
    with context() as cp:
        flex_attention(*[cp.shard(t) for t in tensors()])
    left = weakref.ref(cp)
    del cp
    assert left() is None
    gc.enable()


def checkpointed(rank):
    """Backward after `with` calls the function again, where it would be another call; without
    checkpointing it may come there. A call that was never over ranks may be made again."""
    from torch.utils.checkpoint import CheckpointError, checkpoint

    from saccade.torch import flex_attention

    for mode in ("gather", "staged", "heads"):
        for is_reentrant in (True, False):
            with context(mode, 20) as cp:
                own = [cp.shard(t).requires_grad_() for t in tensors()]
                again = checkpoint(flex_attention, *own, use_reentrant=is_reentrant)
                once = flex_attention(*own)
            once.sum().backward()
            kind = RuntimeError if is_reentrant else CheckpointError
            words = "expected backward inside of `with`" if is_reentrant else "metadata|number"
            with pytest.raises(kind, match=words):
                again.sum().backward()
            plain = checkpoint(flex_attention, *own, use_reentrant=is_reentrant)
            plain.sum().backward()


def saved(rank):
    """All that backward reads goes through autograd's hooks for saved tensors."""
    from saccade.torch import flex_attention

    for mode in ("gather", "staged", "heads"):
        kept = []
        with context(mode, 20) as cp:
            own = [cp.shard(t).requires_grad_() for t in tensors()]
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: kept.append(t) or t, lambda t: t.clone()
            ):
                out = flex_attention(*own)
            out.sum().backward()
        assert {t.shape[1:] for t in kept if t.dim() == 4} == (
            {(H // 2, N, D)} if mode == "heads" else {(H, len(cp.positions), D)}
        )


def as_one_process(rank):
    """Autocast, keys and values in fp8, a batch of nothing: dtypes and shapes are those of a
    call without ranks."""
    from saccade.torch import flex_attention

    q, k, v = tensors()
    codes = [t.to(torch.float8_e4m3fn) for t in (k, v)]
    for mode in ("gather", "heads"):
        with context(mode, 20, dtype=torch.bfloat16) as cp:
            own = [cp.shard(t).requires_grad_() for t in (q, k, v)]
            with torch.autocast("cpu", torch.bfloat16):
                out = flex_attention(own[0], own[1], own[2].bfloat16())
            out.sum().backward()
            assert out.dtype is torch.bfloat16 and own[0].grad.dtype is torch.float32
            small = [cp.shard(t.view(torch.uint8)).view(t.dtype) for t in codes]
            got = cp.unshard(flex_attention(own[0].detach().bfloat16(), *small))
            none = flex_attention(*[t[:0] for t in own])
            assert none.shape == (0, H, len(cp.positions), D) and none.requires_grad
        assert torch.equal(got, flex_attention(q.bfloat16(), *codes))
        with context(mode) as cp:
            with pytest.raises(ValueError, match="to have the same dtype"):
                flex_attention(own[0], own[1], own[2].bfloat16())


def causal_masks():
    from torch.nn.attention import bias

    both = bias.causal_upper_left(N, N), bias.causal_lower_right(N, N)
    return [{"is_causal": True}, *({"attn_mask": x} for x in both)]


def dense_masks(rank):
    """Masks as tensors, and tensors that scores capture, are the whole sequence's."""
    from saccade.torch import flex_attention
    from saccade.torch import scaled_dot_product_attention as attention

    whole, mask = tensors(), torch.randn(N, N)
    with context(seconds=20) as cp:
        own = [cp.shard(t) for t in whole]
        got = cp.unshard(attention(*own, attn_mask=mask))
        local = cp.shard(cp.shard(mask, 0), 1)
        for wrong in (local, cp.shard(mask, 1), cp.shard(mask, 0)):
            with pytest.raises(ValueError, match=f"expected one that is .* {N}, {N}"):
                attention(*own, attn_mask=wrong)
        causal = [cp.unshard(attention(*own, **given)) for given in causal_masks()]
    assert torch.equal(got, attention(*whole, attn_mask=mask))
    for got in causal:
        torch.testing.assert_close(got, attention(*whole, is_causal=True))
    for mode in ("gather", "heads"):
        with context(mode) as cp:
            own = [cp.shard(t) for t in whole]
            with pytest.raises(IndexError, match="score_mod"):
                flex_attention(*own, lambda s, b, h, i, j: s + local[i, j])


def other_numbers(rank):
    """A number that a score captures, and that one rank has another of: at first, and later."""
    from saccade.torch import flex_attention

    for mode, words in (
        ("gather", ("another score", "did not answer")),
        ("heads", ("another mask or problem",) * 2),
    ):
        for when in range(2):
            with context(mode) as cp:
                own = [cp.shard(t) for t in tensors()]
                for i in range(when + 1):
                    x = 2.0 + (i == when and rank)
                    if i < when:
                        flex_attention(*own, lambda s, b, h, i, j: s * x)
                        continue
                    with pytest.raises(RuntimeError, match=words[when]):
                        flex_attention(*own, lambda s, b, h, i, j: s * x)


def rows(rank):
    """shard and unshard of any dtype, each the gradient of the other; positions are a copy."""
    kinds = "bool uint8 int16 int64 bfloat16 float64 complex64 float8_e4m3fn".split()

    def bits(t):
        return t.contiguous().view(torch.uint8)

    with context() as cp:
        cp.positions.zero_()
        for dtype in (getattr(torch, name) for name in kinds):
            for dim in (0, -1):
                shape = [2, 3]
                shape.insert(dim % 3, N)
                x = torch.arange(6 * N).view(shape).remainder(2).to(dtype)
                at = cp.positions
                got = cp.unshard(x[at] if dim == 0 else x[..., at], dim)
                assert got.dtype is dtype and torch.equal(bits(got), bits(x))
        for move in (cp.shard, cp.unshard):
            with pytest.raises(IndexError, match="^dim: got 2, expected one of the tensor's 1"):
                move(torch.ones(N))
        whole = torch.randn(2, N, requires_grad=True)
        weight = torch.randn(2, N)
        own = cp.shard(whole.detach(), 1).requires_grad_()
        (cp.unshard(own, 1).square() * weight).sum().backward()
        (whole.square() * weight).sum().backward()
        assert torch.equal(own.grad, cp.shard(whole.grad, 1))


def under_modes(rank):
    """Floating point operations are counted, of this rank's rows; calls without values are
    refused."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    from saccade.torch import flex_attention

    def counted(given):
        with FlopCounterMode(display=False) as counter:
            flex_attention(*given).sum().backward()
        return counter.get_total_flops()

    whole = [t.requires_grad_() for t in tensors()]
    want = counted(whole)
    for mode in ("gather", "heads"):
        with context(mode, 20) as cp:
            own = [cp.shard(t.detach()).requires_grad_() for t in whole]
            share = len(cp.positions) / N if mode == "gather" else 0.5  # nearly, of heads
            assert abs(counted(own) / want - share) < 0.02, (mode, counted(own), want, share)
            own = [t.detach() for t in own]
            with pytest.raises(NotImplementedError, match="traced, or of fake tensors"):
                make_fx(lambda *x: flex_attention(*x))(*own)
            with FakeTensorMode() as fake:
                with pytest.raises(NotImplementedError, match="traced, or of fake tensors"):
                    flex_attention(*map(fake.from_tensor, own))


CASES = [
    plans_are_made,
    rows,
    under_modes,
    dense_masks,
    as_one_process,
    other_heads,
    other_numbers,
    checkpointed,
    saved,
    caught,
    missed,
    another_context,
    interrupted,
    own_messages,
    freed,
]


def worker(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    for case in CASES:
        began = time.monotonic()
        case(rank)
        print(f"{case.__name__}: {time.monotonic() - began:.1f} s", flush=True)
    os._exit(0)  # what was sent in vain is still there, and gloo would wait for it


def test_two_ranks(tmp_path):
    two_processes.run(__file__, tmp_path / "store", 240)


def test_what_is_dropped_by_callbacks():
    """An exception that no try of a function in Python sees is noted, and others' are not."""
    import ctypes
    import sys

    from saccade.c.interrupts import noting_dropped

    def fails():
        raise ValueError("dropped")

    noted, others, before = [], [], sys.unraisablehook
    sys.unraisablehook = others.append
    try:
        callback = ctypes.CFUNCTYPE(ctypes.c_int)(fails)
        with noting_dropped(noted.append):
            callback()  # returns whatever
        callback()
    finally:
        sys.unraisablehook = before
    assert [str(x) for x in noted] == ["dropped"] and len(others) == 1


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
