/* Where rows of queries stand in their sequence. With CFG_ROWS a run has parts of it. */
#pragma once

/* How far on row m of those that are here stands: what its position has beside q_offset. */
DEVICE int row_shift(const cu_fwd &p, int m)
{
#if CFG_ROWS
    return __ldg(p.row_shift + m / ROW_BLOCK);
#else
    return 0;
#endif
}
