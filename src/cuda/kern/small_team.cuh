/* Shared memory of the kernel of small tiles. A team's, in swizzled rows of 128 bytes, panels
 * of 64 columns: Q [QS][panels][64][64], then a ring of CFG_STAGES pieces of K or V. Barriers
 * come last. */
#pragma once

enum {
    THREADS = (CFG_TEAMS + 1) * 128,
    SLOTS = CFG_STAGES,
    SLOT_BYTES = K_BYTES > V_BYTES ? K_BYTES : V_BYTES,
    TEAM_BYTES = CFG_QS * Q_BYTES + SLOTS * SLOT_BYTES,
    TEAM_BARRIERS = 2 * CFG_QS + 2 * SLOTS
};

/* What a slot with K holds beside it. */
enum { PIECE_MASKED = 1, PIECE_FIRST = 2, PIECE_LAST = 4, PIECE_EMPTY = 8, PIECE_END = 16 };
struct piece {
    int tile, first, flags, unused;
};

/* addresses of a team's shared memory; barriers of 8 bytes, CFG_QS of each of the first two and
 * SLOTS of the others */
struct arena {
    u32 q, ring, q_full, q_empty, full, empty;
    u32 pieces; /* piece [SLOTS] */
    u32 drawn;  /* tiles that the CTA's teams have taken */
#if CFG_SHARES
    u32 shares; /* SHARE_BYTES */
#endif
    mask_column *columns; /* [CFG_TEAMS][CFG_TN] what a general mask needs of each key */
};

DEVICE arena carve(char *shared, int team)
{
    arena s;
    u32 base = smem_address(shared), barriers = base + CFG_TEAMS * TEAM_BYTES;
    u32 pieces = barriers + CFG_TEAMS * TEAM_BARRIERS * 8;
    s.q = base + team * TEAM_BYTES;
    s.ring = s.q + CFG_QS * Q_BYTES;
    s.q_full = barriers + team * TEAM_BARRIERS * 8;
    s.q_empty = s.q_full + CFG_QS * 8;
    s.full = s.q_empty + CFG_QS * 8;
    s.empty = s.full + SLOTS * 8;
    s.pieces = pieces + team * SLOTS * 16;
    s.drawn = pieces + CFG_TEAMS * SLOTS * 16;
    u32 end = s.drawn + 16;
#if CFG_SHARES
    s.shares = end + team * SHARE_BYTES;
    end += CFG_TEAMS * SHARE_BYTES;
#endif
    s.columns = (mask_column *)(shared + (end - base));
    return s;
}

DEVICE void init_barriers(const arena &s)
{
    for (int i = 0; i < CFG_QS; i++) {
        barrier_init(s.q_full + i * 8, 1);
        barrier_init(s.q_empty + i * 8, 4);
    }
    for (int i = 0; i < SLOTS; i++) {
        barrier_init(s.full + i * 8, 1);
        barrier_init(s.empty + i * 8, 4);
    }
}

DEVICE u32 slot_of(u32 n)
{
    return n % SLOTS;
}

DEVICE u32 parity_of(u32 n)
{
    return n / SLOTS & 1;
}
