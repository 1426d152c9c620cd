"""How a BlockMask looks: in characters, and in notebooks."""

from __future__ import annotations

import itertools
import math

import torch

from ..c import abi


def in_characters(live, shape, grid_size, limit):
    """live(place, rows): how many blocks of these rows are live, by column. shape: [.., rows,
    columns] of blocks; grid_size and limit as BlockMask.to_string has them."""
    *lead, rows, columns = shape
    wanted = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
    down, along = (
        1 if n == -1 else max(1, -(-size // n)) for n, size in zip(wanted, (rows, columns))
    )
    parts: list[str] = []
    for place in itertools.product(*map(range, lead)):
        if len(parts) == limit:
            more = math.prod(lead) - limit
            parts.append(f"... {more} more: to_string(limit=...) or mask[batch, head]")
            break
        lines = [
            _line(live(place, range(r, min(r + down, rows))), min(down, rows - r), along)
            for r in range(0, rows, down)
        ]
        parts.append(f"{place}\n" + "".join(lines))
    return "\n".join(parts)


def _line(live, rows, along):
    """Of cells of so many rows and columns of blocks."""
    cells = [(part.sum().item(), rows * len(part)) for part in live.split(along)]
    return "".join(2 * ("█" if n == all else " " if n == 0 else "░") for n, all in cells) + "\n"


def live_of_runs(handle, columns):
    """`live` of in_characters, from a block mask's runs: no list of blocks is made."""

    def live(place, rows):
        b, h = (0,) * (2 - len(place)) + place
        change = torch.zeros(columns + 1, dtype=torch.int64)
        for row in rows:
            found = handle.row(b, h, row)
            if len(found):
                run = torch.frombuffer(found, dtype=torch.int32).view(-1, 3)
                one = torch.ones(len(run), dtype=torch.int64)
                change.index_add_(0, run[:, 0], one)
                change.index_add_(0, run[:, 0] + run[:, 1], -one)
        return change.cumsum(0)[:-1]

    return live


def in_html(mask) -> str:
    """The first batch and head."""
    picture = mask.handle().render(0, 0, abi.SVG, 0).decode()
    return (
        f"<div>BlockMask {tuple(mask.shape)}, {mask.sparsity():.1f} % of blocks not "
        f'computed</div><div style="width:20em">{picture[picture.index("<svg") :]}</div>'
    )
