"""How a BlockMask looks: in characters, and in notebooks."""

from __future__ import annotations

import itertools
import math

from ..c import abi


def in_characters(dense, grid_size, limit):
    """dense: [.., rows, columns] of blocks; grid_size and limit as BlockMask.to_string has
    them."""
    lead, (rows, columns) = dense.shape[:-2], dense.shape[-2:]
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
        text = "".join(
            "".join(2 * _cell(dense[place][r : r + down, c : c + along]) for c in cs) + "\n"
            for cs in [range(0, columns, along)]
            for r in range(0, rows, down)
        )
        parts.append(f"{tuple(place)}\n{text}")
    return "\n".join(parts)


def _cell(part) -> str:
    live = float(part.float().mean())
    return "█" if live == 1 else " " if live == 0 else "░"


def in_html(mask) -> str:
    """The first batch and head."""
    picture = mask.handle().render(0, 0, abi.SVG, 0).decode()
    return (
        f"<div>BlockMask {tuple(mask.shape)}, {mask.sparsity():.1f} % of blocks not "
        f'computed</div><div style="width:20em">{picture[picture.index("<svg") :]}</div>'
    )
