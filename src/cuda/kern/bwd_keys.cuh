/* Tiles of STAY queries, and the blocks of PASS keys that each of them meets. */
#pragma once

struct query_tile {
    int b, h, g, block, row0, q_offset, kv_offset, kv_len;
#if CFG_RAGGED
    sequence s;
#endif
};

/* id: (b * H + h) * tiles of a head + block */
DEVICE query_tile query_tile_of(const cu_bwd &p, int id)
{
    query_tile t;
    int n = (p.f.M + STAY - 1) / STAY, bh = id / n;
    t.block = id % n;
    t.row0 = t.block * STAY;
    t.h = bh % p.f.H;
    t.b = bh / p.f.H;
    t.g = kv_head(p.f, t.h);
    sequence s = sequence_at(p.f, t.b);
    place_rows(p.f, t.b, s, t.q_offset, t.kv_offset, t.kv_len);
#if CFG_RAGGED
    t.s = s;
#endif
    t.q_offset += row_shift(p.f, t.row0);
    return t;
}

DEVICE query_tile query_tile_at(const cu_bwd &p, int turn)
{
    return query_tile_of(p, p.q_order ? __ldg(p.q_order + turn) : turn);
}

/* Blocks of PASS keys that the tile meets; runs are of blocks of that size. */
struct key_walk {
    int run, end, block, last, masked;
};

DEVICE key_walk key_begin(const cu_bwd &p, const mod_args &mod, const query_tile &t)
{
    key_walk w = {0, 0, -1, (t.kv_len + PASS - 1) / PASS - 1, MOD_MASK != MASK_NONE};
#if CFG_RAGGED /* run and end: the first block that needs no mask, the one past the last */
    seen_keys k = seen_by(p.f, mod, t.b, t.h, t.row0, min(t.row0 + STAY, t.s.q_len) - 1,
                          t.q_offset, t.kv_offset, t.kv_len);
    w.block = k.from / PASS - 1;
    w.last = k.past > k.from ? (k.past + PASS - 1) / PASS - 1 : w.block;
    w.run = (k.all_from + PASS - 1) / PASS;
    w.end = k.all_past / PASS;
#endif
    if (p.q_runs) {
        int row = t.b * p.q_mask_b + t.h * p.q_mask_h + t.block;
        w.run = __ldg(p.q_run_start + row);
        w.end = __ldg(p.q_run_start + row + 1);
        w.last = -1;
    }
    return w;
}

DEVICE int key_next(key_walk &w, const cu_bwd &p, const query_tile &t)
{
    int n = (t.kv_len + PASS - 1) / PASS;
#if CFG_RAGGED
    if (w.block >= w.last)
        return 0;
    w.masked = MOD_MASK != MASK_NONE && (w.block + 1 < w.run || w.block + 1 >= w.end);
#endif
    while (w.block >= w.last) {
        if (w.run == w.end)
            return 0;
        int4 run = __ldg((const int4 *)p.q_runs + w.run++);
        w.block = run.x - 1;
        w.last = min(run.x + run.y, n) - 1;
        w.masked = run.z;
    }
    w.block++;
    return 1;
}
