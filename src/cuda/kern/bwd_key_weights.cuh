/* Weights of 64 keys that stay, before they are packed: where a thread's lie, and which of them
 * are 0. */
#pragma once

DEVICE places places_of(const key_tile &t, const int4 &step)
{
    places at;
    at.b = t.b;
    at.h = step.z;
    at.q = step.y + 2 * (threadIdx.x & 3) + t.q_offset;
    at.key = t.key0 + (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    at.kv = at.key + t.kv_offset;
    at.kv_len = t.kv_len;
    return at;
}

/* Weights of positions that the mask or the keys' end hides become 0. */
DEVICE void cut_hidden(float (&x)[S_COUNT], const cu_fwd &p, const mod_args &mod,
                       const places &at, int asks_mod)
{
    key_side k0 = {at.kv, at.key < at.kv_len}, k1 = {at.kv + 8, at.key + 8 < at.kv_len};
#pragma unroll
    for (int i = 0; i < S_COUNT / 4; i++) {
        bool live[4];
        query_side q0 = query_side_of(p, mod, at.b, at.h, at.q + 8 * i);
        query_side q1 = query_side_of(p, mod, at.b, at.h, at.q + 8 * i + 1);
        live4(p, mod, at.b, at.h, q0, q1, k0, k1, asks_mod, live);
#pragma unroll
        for (int j = 0; j < 4; j++) /* live: of two queries by two keys */
            x[4 * i + j] = live[j / 2 + 2 * (j & 1)] ? x[4 * i + j] : 0.f;
    }
}

/* Weights of positions of a step that are not live become 0, and, of a block with a last row,
 * those of the rows after it. */
DEVICE void cut_weights(float (&x)[S_COUNT], const cu_fwd &p, const mod_args &mod,
                        const places &at, int flags)
{
    if (!CUTS_ROWS || (flags & STEP_MASKED))
        cut_hidden(x, p, mod, at, !(flags & STEP_BY_END));
    int rows = flags >> STEP_ROWS;
    if ((MOD_MASK == MASK_NONE && !CUTS_ROWS) || !rows)
        return;
    int left = rows - 2 * (threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < S_COUNT; i++)
        x[i] = i / 4 * 8 + (i & 1) < left ? x[i] : 0.f;
}
