/* Elements that take terms as they are: of which a CTA has a tile, STAY queries by keys in
 * blocks of PASS, and how terms that warps hold in fragments go there. */
#pragma once

enum {
    READS_ALL = MOD_READS ? MOD_READS : 1,
    PITCH = PASS + 1,
    TERM_ROOM = STAY * PITCH /* floats of shared memory */
};

/* What a CTA has: elements, and the batches and heads that read them. */
struct share {
    int row_block, key_block; /* tile of STAY queries; first of its blocks of PASS keys */
    int b, h;                 /* the first that read them */
    int n_b, n_h;             /* and how many do */
    int part, first, past;    /* which of those are this CTA's */
};

DEVICE share share_of(const cu_bwd &p, const cu_elements &c, int turn)
{
    share s;
    s.part = turn % c.parts;
    turn /= c.parts;
    int ranges = (p.f.N + c.blocks * PASS - 1) / (c.blocks * PASS);
    int tiles = (p.f.M + STAY - 1) / STAY;
    s.key_block = turn % ranges * c.blocks;
    turn /= ranges;
    s.row_block = turn % tiles;
    turn /= tiles;
    s.h = c.has_heads ? turn % p.f.H : 0;
    s.b = !c.has_batches ? 0 : c.has_heads ? turn / p.f.H : turn;
    s.n_h = c.has_heads ? 1 : p.f.H;
    s.n_b = c.has_batches ? 1 : p.f.B;
    s.first = (int)((long long)s.n_b * s.n_h * s.part / c.parts);
    s.past = (int)((long long)s.n_b * s.n_h * (s.part + 1) / c.parts);
    return s;
}

/* The warps' terms as rows of STAY queries. */
DEVICE void share_terms(const float (&term)[S_COUNT], float *tile)
{
    int lane = threadIdx.x & 31, row = warp_row() + lane / 4;
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        tile[(row + 8 * (i / 2 & 1)) * PITCH + i / 4 * 8 + 2 * (lane & 3) + (i & 1)] =
            term[i];
}

/* Elements of their own are lines in q and kv. */
struct element_line {
    long long first, by_row, by_key;
};

DEVICE int rows_left(const cu_bwd &p, const query_tile &t)
{
    return min(tile_rows_of(p.f, t).q_len - t.row0, (int)STAY);
}

/* Those that read r reads from the tile's first query and key0 on. */
DEVICE element_line elements_of(const cu_bwd &p, const mod_args &mod, const cu_read &to, int r,
                                const query_tile &t, int key0)
{
    int q = t.row0 + t.q_offset, kv = key0 + t.kv_offset;
    element_line e;
    e.first = read_place(mod, p.f, t.b, t.h, r, q, kv, to.stride);
    e.by_row = read_place(mod, p.f, t.b, t.h, r, q + 1, kv, to.stride) - e.first;
    e.by_key = read_place(mod, p.f, t.b, t.h, r, q, kv + 1, to.stride) - e.first;
    return e;
}

/* Terms of `rows` queries by `keys` keys to their elements; neighbouring threads have
 * neighbouring elements. tile: of TERM_ROOM. */
DEVICE void put_terms(const cu_read &to, const element_line &e, int rows, int keys,
                      const float (&term)[S_COUNT], int is_adding, float *tile)
{
    int is_turned = llabs(e.by_row) < llabs(e.by_key);
    share_terms(term, tile);
    named_sync(1, THREADS);
#pragma unroll 4
    for (int i = threadIdx.x; i < STAY * PASS; i += THREADS) {
        int row = is_turned ? i % STAY : i / PASS, key = is_turned ? i / STAY : i % PASS;
        if (row < rows && key < keys)
            put_element(to, e.first + row * e.by_row + key * e.by_key, tile[row * PITCH + key],
                        is_adding);
    }
    named_sync(1, THREADS);
}
