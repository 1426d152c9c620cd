"""What the ranks of a group tell each other before they exchange, so that calls that differ are
errors on all of them, within a time, where gloo alone would wait or end the processes."""

from __future__ import annotations

import datetime
import hashlib
from typing import Any, Iterable, Optional

import torch
import torch.distributed as dist

Limit = Optional[datetime.timedelta]


class Differs(RuntimeError):
    """Ranks have told each other of calls that are not the same."""


def limit_of(seconds: float, device: torch.device) -> Limit:
    """How long a collective may take. None for CUDA, where the group's own limit holds: NCCL
    would keep the host waiting."""
    return datetime.timedelta(seconds=seconds) if device.type == "cpu" else None


def wait(work: Any, limit: Limit) -> None:
    if limit is None:
        work.wait()
    else:
        work.wait(limit)


def digest(parts: Iterable[Any]) -> int:
    """63 bits of these parts, tensors or what has a repr."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            found.update(repr((part.dtype, part.shape)).encode())
            part = part.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found.update(part.numpy().tobytes())
        else:
            found.update(repr(part).encode() + b"\0")
    return int.from_bytes(found.digest()[:8], "little") >> 1


def agree(what: str, mine: int, group, device: torch.device, limit: Limit) -> None:
    """An error on all ranks unless the digest is the same on all. what: of which it is."""
    ranks = dist.get_world_size(group)
    told = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    work = dist.all_gather(told, torch.tensor([mine], device=device), group, async_op=True)
    wait(work, limit)
    _compare(what, mine, torch.cat(told).tolist(), group)


def agree_on_counts(counts_out, counts_in, each, mine: int, group, limit: Limit) -> None:
    """gloo ends the process where more comes than is expected, so bytes are told before, and
    with them the digest of the call."""
    wanted = torch.tensor(counts_in) * each
    given = torch.stack((torch.tensor(counts_out) * each, torch.full_like(wanted, mine)), 1)
    told = torch.empty_like(given)
    wait(dist.all_to_all_single(told, given, group=group, async_op=True), limit)
    for peer in (told[:, 0] != wanted).nonzero()[:1].flatten().tolist():
        raise Differs(
            f"rank {peer} sends {int(told[peer, 0])} bytes, rank {dist.get_rank(group)} "
            f"expected {int(wanted[peer])}: their calls or their batches differ"
        )
    _compare("mask or problem", mine, told[:, 1].tolist(), group)


def _compare(what, mine, told, group):
    for peer, theirs in enumerate(told):
        if theirs != mine:
            raise Differs(
                f"rank {dist.get_rank(group)} has another {what} than rank {peer}, expected "
                "the same"
            )
