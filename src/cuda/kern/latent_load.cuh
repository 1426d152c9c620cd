/* Latent decode: one warp copies the CTA's blocks of keys, unit by unit, as room is made. */
#pragma once

#include "latent_place.cuh"
#include "decode_ahead.cuh"

/* Keys of a tensor copy. */
DEVICE int copied_keys(const cu_fwd &p)
{
#if CFG_CHUNKS
    return p.chunks.box;
#else
    return KEYS;
#endif
}

/* The panels of a unit; mine: where the lane's copy of them lies. Lane 0 begins all copies. */
DEVICE void load_unit(const arena &a, u32 n, int unit, const cu_fwd &p, const span &s,
                      lane_key mine, const tensor_map *map)
{
    int box = copied_keys(p), is_first = (threadIdx.x & 31) == 0;
    u32 full = barrier_of(a.full, n, unit), to = stage_of(a, n);
    head_box at = key_box(p, s.b, s.g);
    int row = max(0, mine.row), b = CFG_CHUNKS && p.ks.b ? mine.b : at.b;
    b = mine.row < 0 || mine.b < 0 ? -1 : b;
    barrier_wait(barrier_of(a.empty, n, unit), turn_of(n) ^ 1);
    if (is_first)
        barrier_expect(full, unit_panels(unit) * PANEL);
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < KEYS; i += box) {
        int from = __shfl_sync(~0u, row, i / box), of = __shfl_sync(~0u, b, i / box);
#pragma unroll
        for (int j = 0; j < unit_panels(unit); j++) {
            int panel = unit_panel(unit, j);
            if (is_first)
                copy_box(to + panel * PANEL + i * 128, map, panel * 64, from, at.h, of, full,
                         EVICT_NORMAL);
        }
    }
}

DEVICE void load_keys(const arena &a, const cu_fwd &p, const mod_args &mod, const line &l,
                      const tensor_map *map)
{
    lookahead x;
    int each = copied_keys(p), end = share_of_cta(p, mod, l, x.at);
    ahead_begin(x, p, mod, l, each, end);
#pragma unroll 1
    for (u32 n = 0; x.first != NO_BLOCK; n++) {
        lane_key mine = find_key(x, 0, each);
#pragma unroll
        for (int unit = 0; unit < UNITS; unit++)
            load_unit(a, n, unit, p, x.at.s, mine, map);
        ahead_move(x, p, mod, l, each, end);
    }
}
