/* dQ of the backward kernel for Hopper. Its warpgroup multiplies dS by K, 64 columns (a part)
 * at a time, in the last part those that are left; a part goes to global memory as the
 * registers lie: 16 bytes of each thread together for every eight columns. */
#pragma once

/* Floats that a thread has of a part: of two rows, a quarter of the columns. */
template <int PART> struct part_of {
    enum { COUNT = (PART < PANELS_D - 1 ? 64 : LAST_COLUMNS) / 2 };
};

/* A part of dQ = dS K; both operands lie with their rows along the sum */
template <int COUNT> DEVICE void product_dq(float (&dq)[COUNT], u32 ds, u32 k)
{
    u64 a = operand(ds, 16), b = operand(k, KEY_PANEL);
#pragma unroll
    for (int kk = 0; kk < KEYS / 16; kk++)
        wgmma_dq(dq, a + kk * 2048 / 16, b + kk * 2048 / 16, kk > 0);
}

/* A float of dQ as it is summed: in units of its row and BWD_LIFT too large, or as it is. */
DEVICE u32 counted(float x, float precision)
{
#if CFG_FIXED
    return (u32)__float2int_rn(x * precision) + BWD_LIFT;
#else
    return __float_as_uint(x * precision);
#endif
}

#if CFG_FIXED
/* counted() for |x * precision| < COUNTED_MOST: after adding the float whose bits BWD_LIFT is,
 * the low mantissa bits are the integer. An addition does not use the conversion unit, which
 * exponentials share; BWD_LIFT is taken off once for all steps, by bwd_finish. */
#define COUNTED_MOST 4194304.f

DEVICE u32 counted_small(float x, float precision)
{
    return __float_as_uint(fmaf(x, precision, __uint_as_float(BWD_LIFT)));
}

/* Whether all of this thread's dQ values are that small, as they nearly always are; NaN says
 * no. */
template <int COUNT> DEVICE int are_small(const float (&dq)[COUNT], float f0, float f1)
{
    float most0 = 0.f, most1 = 0.f;
#pragma unroll
    for (int i = 0; i < COUNT / 4; i++) {
        most0 = max_or_nan(most0, max_or_nan(fabsf(dq[4 * i]), fabsf(dq[4 * i + 1])));
        most1 = max_or_nan(most1, max_or_nan(fabsf(dq[4 * i + 2]), fabsf(dq[4 * i + 3])));
    }
    return most0 * f0 < COUNTED_MOST && most1 * f1 < COUNTED_MOST;
}
#endif

template <int COUNT> DEVICE void stage(u32 to, const float (&dq)[COUNT], float f0, float f1)
{
    u32 at = to + (threadIdx.x & 127) * 16;
#if CFG_FIXED
    if (are_small(dq, f0, f1)) {
#pragma unroll
        for (int i = 0; i < COUNT / 4; i++)
            store_four(at + i * 2048, counted_small(dq[4 * i], f0),
                       counted_small(dq[4 * i + 1], f0), counted_small(dq[4 * i + 2], f1),
                       counted_small(dq[4 * i + 3], f1));
    } else
#endif
    {
#pragma unroll
        for (int i = 0; i < COUNT / 4; i++)
            store_four(at + i * 2048, counted(dq[4 * i], f0), counted(dq[4 * i + 1], f0),
                       counted(dq[4 * i + 2], f1), counted(dq[4 * i + 3], f1));
    }
    fence_async_proxy();
}

/* A staged part is added to the sums of a tile of queries; the first one counts the step. */
DEVICE void add_part(const cu_bwd &p, int tile, int part, u32 from)
{
    add_bytes(p.dq_sum + (long long)tile * (BWD_ROWS * CFG_D) + part * (PART_BYTES / 4), from,
              part < PANELS_D - 1 ? PART_BYTES : LAST_BYTES);
    if (CFG_FIXED && part == 0)
        atomicAdd(p.dq_steps + tile, 1u);
}

/* Staged parts are written by another warp, or by this group's first thread; two may be on
 * their way. */
#if CFG_HELPERS
static_assert(PANELS_D == 2, "each of two parts has a place");

template <int PART>
DEVICE void put_part(const arena &s, const cu_bwd &p, u32 n, int tile,
                     const float (&dq)[part_of<PART>::COUNT], float f0, float f1)
{
    barrier_wait(s.staging_empty + PART * 8, n & 1 ^ 1);
    stage(s.staging + PART * PART_BYTES, dq, f0, f1);
    warp_arrives(s.staging_full + PART * 8);
}

/* A tile's end is a round of both places. */
DEVICE void end_parts(const arena &s, u32 n)
{
#pragma unroll
    for (int part = 0; part < 2; part++) {
        barrier_wait(s.staging_empty + part * 8, n & 1 ^ 1);
        warp_arrives(s.staging_full + part * 8);
    }
}
#else
template <int PART>
DEVICE void put_part(const arena &s, const cu_bwd &p, u32 n, int tile,
                     const float (&dq)[part_of<PART>::COUNT], float f0, float f1)
{
    u32 at = s.staging + (n * PANELS_D + PART) % 2 * PART_BYTES;
    int is_first = (threadIdx.x & 127) == 0;
    if (is_first)
        add_wait<1>();
    named_sync(1, 128);
    stage(at, dq, f0, f1);
    named_sync(1, 128);
    if (is_first)
        add_part(p, tile, PART, at);
}

DEVICE void end_parts(const arena &, u32)
{
    if ((threadIdx.x & 127) == 0)
        add_wait<0>();
}
#endif

/* Keys that are not live: dQ sums over keys, and 0 times what memory holds there may be NaN. */
DEVICE void clear_dead_keys(const arena &s, const key_tile &t)
{
    enum { CHUNKS = PANELS_D * 8 };
    int first = max(t.kv_len - t.key0, 0);
    if (first >= KEYS)
        return;
    for (int i = first * CHUNKS + (threadIdx.x & 127); i < KEYS * CHUNKS; i += 128) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        store_four(s.k + chunk / 8 * KEY_PANEL + row * 128 + chunk % 8 * 16, 0, 0, 0, 0);
    }
    fence_async_proxy();
    named_sync(1, 128);
}

/* Whether live keys of the tile have elements that are infinite or NaN. Queries that a mask
 * keeps from such a key must not see it, though their dS is multiplied by it. */
DEVICE int has_special_keys(const arena &s, const key_tile &t)
{
    enum { CHUNKS = PANELS_D * 8 };
    int n = min(t.kv_len - t.key0, (int)KEYS), any = 0;
    if (MOD_MASK == MASK_NONE)
        return 0;
    for (int i = threadIdx.x & 127; i < n * CHUNKS; i += 128) {
        int4 x = load_four(s.k + i % CHUNKS / 8 * KEY_PANEL + i / CHUNKS * 128 + i % 8 * 16);
        any |= has_special(x.x) | has_special(x.y) | has_special(x.z) | has_special(x.w);
    }
    return named_any(1, 128, any);
}

/* The product of dQ without the keys whose dS is 0, at leisure: for tiles with such keys. */
template <int COUNT> DEVICE void careful_dq(float (&dq)[COUNT], u32 ds, u32 k)
{
    int lane = threadIdx.x & 31, row = (threadIdx.x / 32 & 3) * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        dq[i] = 0.f;
#pragma unroll 1
    for (int key = 0; key < KEYS; key++) {
        /* words hold two queries each: of row and of row + 8 */
        u32 at = ds + key * 128 + (row & 6) * 2, turn = key & 7;
        float even, odd, a0, a1;
        unpack(load_word(at + (row / 8 ^ turn) * 16), even, odd);
        a0 = row & 1 ? odd : even;
        unpack(load_word(at + (row / 8 + 1 ^ turn) * 16), even, odd);
        a1 = row & 1 ? odd : even;
#pragma unroll
        for (int c = 0; c < COUNT / 4; c++) {
            float lo, hi;
            unpack(load_word(k + key * 128 + (c ^ turn) * 16 + (lane & 3) * 4), lo, hi);
            dq[4 * c] = a0 == 0.f ? dq[4 * c] : fmaf(a0, lo, dq[4 * c]);
            dq[4 * c + 1] = a0 == 0.f ? dq[4 * c + 1] : fmaf(a0, hi, dq[4 * c + 1]);
            dq[4 * c + 2] = a1 == 0.f ? dq[4 * c + 2] : fmaf(a1, lo, dq[4 * c + 2]);
            dq[4 * c + 3] = a1 == 0.f ? dq[4 * c + 3] : fmaf(a1, hi, dq[4 * c + 3]);
        }
    }
}

/* Of this thread's two rows: asked for before the product, needed after it. */
struct precisions {
    float row0, row1;
};

DEVICE precisions precisions_of(const cu_bwd &p, int tile)
{
#if CFG_FIXED
    int row = (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
    const float *at = p.precision + (long long)tile * BWD_ROWS + row;
    return {load_float(at), load_float(at + 8)};
#else
    return {BWD_WEIGHT_UNIT, BWD_WEIGHT_UNIT};
#endif
}

template <int PART>
DEVICE void start_part(const arena &s, u32 n, float (&dq)[part_of<PART>::COUNT])
{
    wgmma_fence();
    product_dq(dq, s.ds + (n & 1) * DS_BYTES, s.k + PART * KEY_PANEL);
    wgmma_commit();
}

/* By lane 0 for its warp, whose lanes have all seen this round before there can be another. */
DEVICE void let_ds_go(const arena &s, u32 n)
{
    warp_arrives(s.ds_empty + (n & 1) * 8);
}

template <int PART>
DEVICE void end_part(const arena &s, const cu_bwd &p, u32 n, int tile, const precisions &by,
                     float (&dq)[part_of<PART>::COUNT], int is_careful)
{
    wgmma_wait<0>();
    if (is_careful)
        careful_dq(dq, s.ds + (n & 1) * DS_BYTES, s.k + PART * KEY_PANEL);
    if (PART == PANELS_D - 1 && TERMS != TERMS_AFTER)
        let_ds_go(s, n);
    put_part<PART>(s, p, n, tile, dq, by.row0, by.row1);
}

DEVICE void wait_for_ds(const arena &s, u32 n)
{
    barrier_wait(s.ds_full + (n & 1) * 8, n >> 1 & 1);
}

/* Once dS is there, all consumers are done with what the step before it read, and the load of
 * what takes its place may begin. */
DEVICE int take_ds(const arena &s, u32 n, int4 &step)
{
    wait_for_ds(s, n);
    step = load_four(s.steps + (n & (STEPS - 1)) * 16);
    return !(step.w & STEP_END);
}

/* Loads by threads of this warpgroup, where no warp of their own does them: Q by one of the
 * last warp, dO by one of the warp before it, so that the others wait half as long for them. */
struct own_loads {
#if !CFG_HELPERS
    loader l = no_loads();
#endif
};

/* Steps that are loaded at a tile's begin: dense reads have a place less than Q. */
enum { FIRST_STEPS = CFG_STAGES - (CFG_DENSE && !CFG_HELPERS) };

DEVICE int own_share(void)
{
    int thread = threadIdx.x & 127;
    return thread == 96 ? LOADS_Q : thread == 64 ? LOADS_O : 0;
}

DEVICE void own_begin(own_loads &own, const arena &s, const cu_bwd &p, const mod_args &mod,
                      const key_tile &t, const load_maps &maps)
{
#if !CFG_HELPERS
    if (own_share()) {
        load_begin(s, own.l, own_share(), p, t, maps);
        for (int i = 0; i < FIRST_STEPS; i++)
            load_step(s, own.l, own_share(), p, mod, t, maps);
    }
#endif
}

DEVICE void own_step(own_loads &own, const arena &s, const cu_bwd &p, const mod_args &mod,
                     const key_tile &t, const int4 &step, const load_maps &maps)
{
#if !CFG_HELPERS
    if (own_share() && (FIRST_STEPS < CFG_STAGES || !(step.w & STEP_FIRST)))
        load_step(s, own.l, own_share(), p, mod, t, maps);
    __syncwarp();
#endif
}

/* The steps of a tile from step n of the CTA on: their dQ; the loads run beside the first
 * part's product. Without a dQ to make, dS is let go as it comes. Returns how the tile ends. */
DEVICE int4 sum_tile(own_loads &own, u32 &n, const arena &s, const cu_bwd &p,
                     const mod_args &mod, const cu_reads &c, const key_tile &t, u32 parity,
                     const load_maps &maps)
{
    float dq[part_of<0>::COUNT], rest[part_of<1>::COUNT];
    int4 step;
    terms captured;
    lines along;
    terms_begin(captured);
    own_begin(own, s, p, mod, t, maps);
    barrier_wait(s.kv_full, parity);
    clear_dead_keys(s, t);
    if (!CFG_DQ) {
        for (; take_ds(s, n, step); n++) {
            own_step(own, s, p, mod, t, step, maps);
            let_ds_go(s, n);
        }
        return step;
    }
    int is_careful = has_special_keys(s, t);
    lines_begin(along, s);
    for (; take_ds(s, n, step); n++) {
        precisions by = precisions_of(p, step.x);
        start_part<0>(s, n, dq);
        start_lines(along, s, n);
        own_step(own, s, p, mod, t, step, maps);
        if (TERMS == TERMS_BESIDE)
            take_terms(captured, p, mod, c, t, step, s.ds + (n & 1) * DS_BYTES);
        end_part<0>(s, p, n, step.x, by, dq, is_careful);
        take_lines(along, p, mod, c, t, step);
        if (TERMS == TERMS_BETWEEN || TERMS == TERMS_AFTER)
            take_terms(captured, p, mod, c, t, step, s.ds + (n & 1) * DS_BYTES);
        if (TERMS == TERMS_AFTER)
            barrier_arrive_if(s.ds_empty + (n & 1) * 8, (threadIdx.x & 31) == 0);
        if (PANELS_D > 1) {
            start_part<1>(s, n, rest);
            end_part<1>(s, p, n, step.x, by, rest, is_careful);
        }
    }
    end_parts(s, n);
    end_terms(captured, p, mod, c, t);
    end_lines(along, p, mod, c, t);
    return step;
}

DEVICE void sum_dq(const arena &s, const cu_bwd &p, const mod_args &mod, const cu_reads &c,
                   const load_maps &maps)
{
    own_loads own;
    u32 n = 0, parity = 0;
    int turn = blockIdx.x;
    do {
        key_tile t = key_tile_at(p.f, turn);
        int4 end = sum_tile(own, n, s, p, mod, c, t, parity, maps);
        let_ds_go(s, n);
        if (CFG_TAKES_MANY && !CFG_HELPERS)
            named_sync(1, 128); /* none waits for this tile's K and V when others are loaded */
        n++;
        turn = end.x;
        parity = end.y;
    } while (CFG_TAKES_MANY && turn < p.f.n_tiles);
}

#if CFG_HELPERS
/* Helpers of their own warps: loads, and dQ to global memory. */

/* Nobody waits until this warp has seen dS, and the parity of a barrier tells two rounds apart,
 * not three: when it comes to dS of step n, steps to n + 1 are loaded, so that the round after
 * cannot be over. */
static_assert(CFG_STAGES <= 3, "no step past n + 1 is loaded before dS of step n is seen");

DEVICE void load_all(const arena &s, const cu_bwd &p, const mod_args &mod,
                     const load_maps &maps)
{
    loader l = no_loads();
    int turn = blockIdx.x;
    do {
        key_tile t = key_tile_at(p.f, turn);
        load_begin(s, l, LOADS_Q | LOADS_O, p, t, maps);
        while (l.left) {
            if (FREES_EARLY)
                barrier_wait(s.used + l.at.slot * 8, l.at.parity ^ 1);
            else
                wait_for_ds(s, l.n - (CFG_STAGES - 1));
            load_step(s, l, LOADS_Q | LOADS_O, p, mod, t, maps);
        }
        u32 end = l.n - 1;
        wait_for_ds(s, end - 1);
        wait_for_ds(s, end);
        turn = load_four(s.steps + (end & (STEPS - 1)) * 16).x;
        barrier_wait(s.ds_empty + (end & 1) * 8, end >> 1 & 1);
    } while (CFG_TAKES_MANY && turn < p.f.n_tiles);
}

DEVICE void write_dq(const arena &s, const cu_bwd &p)
{
    for (u32 n = 0;; n++) {
        int4 step;
#pragma unroll
        for (int part = 0; part < PANELS_D; part++) {
            u32 at = s.staging + part * PART_BYTES;
            barrier_wait(s.staging_full + part * 8, n & 1);
            if (part == 0)
                step = load_four(s.steps + (n & (STEPS - 1)) * 16);
            if (step.w & STEP_END)
                break;
            add_part(p, step.x, part, at);
            add_wait<1>();
            if (part > 0 || !(step.w & STEP_FIRST))
                barrier_arrive(s.staging_empty + (part ^ 1) * 8);
        }
        if (!(step.w & STEP_END))
            continue;
        add_wait<0>();
        if (!(step.w & STEP_FIRST))
            barrier_arrive(s.staging_empty + 8);
        if (!CFG_TAKES_MANY || step.x >= p.f.n_tiles)
            break;
        barrier_wait(s.staging_full + 8, n & 1);
        barrier_arrive(s.staging_empty);
        barrier_arrive(s.staging_empty + 8);
    }
}
#endif
