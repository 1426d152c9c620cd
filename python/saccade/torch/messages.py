"""Host memory between the ranks of a group: what a transport of the library exchanges, by
torch's sends and receives."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from ..c import abi

# Tags of messages: the upper half of what a tag may be, which leaves the lower one, and with it
# the default of 0, to the caller's own messages in the group.
_FIRST, _TAGS, _STEP = 1 << 30, (1 << 30) - 1, 1000003
_TOLD = 4  # what is told of the messages to a peer: how many, bytes of all, first, last


class Messages:
    """call: a number of what is being computed, the same on all ranks. It is in the tags, so
    that a message of one call never meets a receive of another."""

    def __init__(self, group, device: torch.device):
        self.group, self.device, self.call = group, device, 0
        self.rank = dist.get_rank(group)
        self._agreed: set = set()  # (peer, sizes to it, sizes from it) that it has told of

    def exchange(self, sends, receives, seconds):
        """All of these (address, bytes, peer) at once."""
        works, seen, landed = [], {}, []
        limit = datetime.timedelta(seconds=seconds)
        if self.device.type == "cpu":
            self._agree_on_bytes(sends, receives, limit)
        for is_send, messages in ((False, receives), (True, sends)):
            for address, size, peer in messages:
                number = seen[is_send, peer] = seen.get((is_send, peer), 0) + 1
                memory = (abi.C.c_ubyte * size).from_address(address)
                data = torch.frombuffer(memory, dtype=torch.uint8)
                if self.device.type == "cuda":
                    there, data = data, data.to(self.device)
                    landed += [] if is_send else [(there, data)]
                works.append((is_send, data, peer, self._tag(size, number)))
        if self.device.type == "cuda":
            self._at_once(works)
        else:
            self._wait_for([self._begin(*work) for work in works], limit)
        for there, data in landed:
            there.copy_(data)

    def _tag(self, size, number):
        return _FIRST + (self.call + size * _STEP + number) % _TAGS

    def _at_once(self, works):
        """One NCCL group, so that sends meet receives."""
        calls = dist.irecv, dist.isend
        made = [
            dist.P2POp(calls[is_send], data, self._global(peer), self.group)
            for is_send, data, peer, _ in works
        ]
        for work in dist.batch_isend_irecv(made) if made else ():
            work.wait()

    def _wait_for(self, begun, limit):
        for work in begun:
            work.wait(limit)

    def _global(self, peer):
        return dist.get_global_rank(self.group, peer) if self.group else peer

    def _begin(self, is_send, data, peer, tag):
        call = dist.isend if is_send else dist.irecv
        return call(data, self._global(peer), group=self.group, tag=tag)

    def _agree_on_bytes(self, sends, receives, limit):
        """What each peer is about to send, before it is received, the first time that it
        does: gloo ends the process where a message is longer than its receiver expects. Later
        messages of other sizes have other tags and never meet, until time is up."""
        given, wanted = _by_peer(sends), _by_peer(receives)
        pairs = {(p, given.get(p, ()), wanted.get(p, ())) for p in {*given, *wanted}}
        new = pairs - self._agreed
        if not new:
            return
        given = {p: _summary(sizes) for p, sizes, _ in new if sizes}
        wanted = {p: _summary(sizes) for p, _, sizes in new if sizes}
        told = {peer: torch.empty(_TOLD, dtype=torch.int64) for peer in wanted}
        tag = self._tag(0, 0)
        works = [self._begin(False, t, peer, tag) for peer, t in told.items()]
        works += [self._begin(True, t, peer, tag) for peer, t in given.items()]
        self._wait_for(works, limit)
        for peer, t in told.items():
            if not torch.equal(t, wanted[peer]):
                raise RuntimeError(
                    f"rank {peer} sends {int(t[1])} bytes in {int(t[0])} messages, rank "
                    f"{self.rank} expected {int(wanted[peer][1])} in {int(wanted[peer][0])}: "
                    "their calls or their batches differ"
                )
        self._agreed |= pairs


def _by_peer(messages):
    """Bytes of the messages of each peer."""
    sizes: dict = {}
    for _, size, peer in messages:
        sizes[peer] = (*sizes.get(peer, ()), size)
    return sizes


def _summary(sizes):
    return torch.tensor([len(sizes), sum(sizes), sizes[0], sizes[-1]])  # as _TOLD has it
