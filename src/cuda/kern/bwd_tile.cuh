/* Tiles of keys, and the blocks of queries that each of them meets: the runs of its row in the
 * transposed block mask, once for every query head of the group. */
#pragma once

#include "rows.cuh"

/* CFG_KEYS keys of one (batch, key head) */
struct key_tile {
    int b, g, block, key0; /* block: index among the key tiles of (b, g) */
    int q_offset, kv_offset, kv_len;
};

DEVICE int position_of(const cu_position &p, int b)
{
    return p.by_batch ? __ldg(p.by_batch + (long long)b * p.step) : p.value;
}

DEVICE key_tile key_tile_at(const cu_fwd &p, int turn)
{
    key_tile t;
    int id = p.order ? __ldg(p.order + turn) : turn;
    t.block = id % p.n_qblk;
    int bg = id / p.n_qblk;
    t.g = bg % p.G;
    t.b = bg / p.G;
    t.key0 = t.block * CFG_KEYS;
    t.q_offset = position_of(p.q_offset, t.b);
    t.kv_offset = position_of(p.kv_offset, t.b);
    t.kv_len = max(0, min(position_of(p.kv_len, t.b), p.N));
    return t;
}

struct query_walk {
    int h, h_end;    /* present head, and the one past the group's last */
    int run, end;    /* indices: next run, and the one past the head's last */
    int block, last; /* present query block, last one of the present run */
    int masked;      /* the mask must be looked at */
};

/* first run of the present head */
DEVICE void walk_head(query_walk &w, const cu_bwd &p, const key_tile &t)
{
    w.run = w.end = 0;
    w.block = -1;
    w.last = p.n_mblk - 1;
    if (p.f.runs) {
        int row = t.b * p.f.mask_b + w.h * p.f.mask_h + t.block;
        w.run = __ldg(p.f.run_start + row);
        w.end = __ldg(p.f.run_start + row + 1);
        w.last = -1;
    }
}

DEVICE query_walk query_begin(const cu_bwd &p, const key_tile &t)
{
    query_walk w;
    int group = p.f.H / p.f.G;
    w.h = t.g * group;
    w.h_end = t.key0 < t.kv_len ? w.h + group : w.h;
    w.masked = MOD_MASK != MASK_NONE;
    if (w.h < w.h_end)
        walk_head(w, p, t);
    else
        w.block = w.last = w.run = w.end = 0;
    return w;
}

/* Whether there is a next block. */
DEVICE int query_next(query_walk &w, const cu_bwd &p, const key_tile &t)
{
    for (;;) {
        if (w.block != w.last) {
            w.block++;
            return 1;
        }
        if (w.run != w.end) {
            int4 run = __ldg((const int4 *)p.f.runs + w.run++);
            w.block = run.x - 1;
            w.last = min(run.x + run.y, p.n_mblk) - 1;
            w.masked = run.z;
            if (w.block >= w.last)
                w.block = w.last;
            continue;
        }
        if (w.h + 1 >= w.h_end)
            return 0;
        w.h++;
        walk_head(w, p, t);
    }
}
