/* Which tile an instance of backward takes: pure functions of integers. Numbers: one H200,
 * docs/lab. */
#include "cuda/backward/cuda_backward.h"

/* Three consumer groups as long as dK and dV of 64 keys leave room for them. Wider heads have
 * two, and, where dQ has two parts, loads and sums by warps of their own; if a score function
 * wants registers, those of the helpers go to the consumers. */
int cu_backward_tile_choice(int D, int E, int rung, cu_form *out)
{
    enum { KEYS = 64 }; /* of a group */
    typedef struct choice {
        int groups, stages, has_helpers, registers[3];
    } choice;
    static const choice small[] = {{3, 4, 0, {144, 80, 0}}, {2, 3, 0, {200, 104, 0}}};
    static const choice wide[] = {{2, 3, 1, {208, 64, 32}}, {2, 3, 0, {216, 72, 0}}};
    const int dim = D > E ? D : E;
    rung += dim > 64 && D <= 64; /* dQ of one part: none for warps of their own */
    if (dim > 128 || rung > 1)
        return 0;
    const choice *row = (dim <= 64 ? small : wide) + rung;
    *out = (cu_form){
        .family = CU_SM90,
        .tile = {.groups = row->groups, .keys = row->groups * KEYS, .stages = row->stages},
        .backward = {.rows = BWD_ROWS, .parts = 1, .has_helpers = row->has_helpers}};
    for (int i = 0; i < 3; i++)
        out->backward.registers[i] = row->registers[i];
    return 1;
}

/* Two stages are enough where consumers say when they are done with one (FREES_EARLY). */
int cu_backward_fit_dense(int D, int E, cu_form *form)
{
    enum { STAGES_MOST = 3 }; /* dense reads have two places */
    const int least = STAGES_MOST - form->backward.has_helpers;
    form->tile.stages = STAGES_MOST;
    while (form->tile.stages > least
           && cu_backward_shared_bytes(form, D, E) > cu_shared_most(90))
        form->tile.stages--;
    return cu_backward_shared_bytes(form, D, E) <= cu_shared_most(90);
}

/* A key takes 1.15 times as long where two groups share a step as where three do (b1 h32 q15360
 * d64, docs/lab/021). */
int cu_backward_is_short(const cu_form *first, const cu_form *second,
                         const saccade_sizes *sizes, int n_sm, int group, int cuts_rows,
                         int has_mask)
{
    const cu_form *const form[2] = {first, second};
    double each[2];
    int64_t tiles[2];
    if (n_sm <= 0)
        return 0;
    for (int i = 0; i < 2; i++) {
        const cu_tile_lengths all =
            cu_equal_tiles(sizes->B * sizes->Hkv, sizes->KV, form[i]->tile.groups,
                           form[i]->backward.passes, cu_backward_query_blocks(sizes));
        cu_query_parts(n_sm, group, cuts_rows, &all, &each[i]);
        tiles[i] = all.n;
        each[i] *= (double)form[i]->tile.keys * (i ? 1.15 : 1);
    }
    const int is_even = group > 1 && tiles[0] * group >= n_sm; /* by parts, whatever the mask */
    return each[1] < each[0] && (!has_mask || (tiles[1] * group <= n_sm && !is_even));
}

/* Five products and sums of dQ in memory take longer than seven products without, with two
 * CTAs and more to a multiprocessor, where blocks of queries meet few blocks of 64 keys: 1.06
 * to 1.27 times as long up to 5 of them, 0.95 times with 7 (docs/lab/061). */
int cu_backward_sees_few(int64_t blocks, int64_t lists, int64_t Q, int most)
{
    return blocks > 0 && blocks <= most * lists * ((Q + BWD_ROWS - 1) / BWD_ROWS);
}

/* Stages as shared memory allows: those of K and Q come first, which are held for longer. */
int cu_backward_wide_choice(int D, int E, int rung, cu_form *out)
{
    const int most = cu_shared_most(90);
    if (rung > 0)
        return 0;
    *out = (cu_form){.family = CU_SM90,
                     .tile = {.groups = 2, .keys = 64, .stages = 3},
                     .backward = {.rows = BWD_ROWS,
                                  .parts = 1,
                                  .value_stages = 2,
                                  .stay = BWD_WIDE_ROWS,
                                  .ctas = {1, 1},
                                  .registers = {240, 24, 0}}};
    if (cu_backward_shared_bytes(out, D, E) > most)
        out->tile.stages = 2;
    if (cu_backward_shared_bytes(out, D, E) > most)
        out->backward.value_stages = 1;
    return 1;
}

/* Blocks that pass have as many rows as leave room for two of them; both kernels' stages. */
int cu_backward_f32_choice(int D, int E, int rung, cu_form *out)
{
    const int dim = D > E ? D : E, most = cu_shared_most(90);
    if (dim > 128 || rung > 0)
        return 0;
    *out = (cu_form){.family = CU_SM90,
                     .tile = {.groups = 2, .keys = 64, .stages = 3},
                     .backward = {.rows = dim > 64 ? 32 : 64,
                                  .parts = 1,
                                  .is_thirds = 1,
                                  .value_stages = dim > 64 ? 2 : 3,
                                  .stay = BWD_ROWS,
                                  .ctas = {1, 1},
                                  .registers = {240, 24, 0}}};
    if (cu_backward_shared_bytes(out, D, E) > most)
        out->tile.stages = 2;
    return 1;
}

/* CTAs share a multiprocessor: some load and store while others multiply. Loads have one warp,
 * and no registers are handed over. Two CTAs of 9 warps are at most 5 warps to each of four
 * schedulers, so a thread has 96 registers; three CTAs of 5 warps are at most 4, so it has
 * 128. */
int cu_backward_few_choice(int D, int E, int rung, cu_form *out)
{
    if ((D > E ? D : E) > 64 || rung > 0)
        return 0;
    *out = (cu_form){
        .family = CU_SM90,
        .tile = {.groups = 2, .keys = 64, .stages = 3},
        .backward = {
            .rows = BWD_ROWS, .parts = 1, .value_stages = 2, .stay = BWD_ROWS, .ctas = {2, 3}}};
    return 1;
}

/* Blocks as long as registers allow: scores of 16 rows by a block lie there twice. Two stages
 * fit the 99 KB of shared memory that every GPU has. */
cu_form cu_backward_pass_choice(int D, int E)
{
    const int is_wide = (D > E ? D : E) > 128;
    return (cu_form){.family = CU_SM80,
                     .tile = {.groups = 4, .keys = 64, .stages = 2},
                     .backward = {.rows = is_wide ? 16 : 32, .parts = is_wide ? 2 : 1}};
}

/* f32: operands in three bf16 numbers up to head dims of 64, else products of split operands.
 * Two CTAs to a multiprocessor up to head dims of 128, whose stages fit 99 KB. */
cu_form cu_backward_pass32_choice(int D, int E)
{
    const int dim = D > E ? D : E;
    return (cu_form){.family = CU_F32,
                     .tile = {.groups = 4, .keys = 64, .stages = dim > 128 ? 1 : 2},
                     .backward = {.rows = dim > 64 ? 16 : 32,
                                  .parts = dim > 128 ? 2 : 1,
                                  .is_thirds = dim <= 64}};
}

/* Blocks of CU_BWD_PLAIN, so that both programs walk the same runs; no sums of wide rows, so
 * one warp to 16. What is summed in shared memory leaves room for one stage of wide rows. f32
 * multiplies split operands at any head dim: thirds would take that room. */
cu_form cu_backward_captures_choice(int D, int E, int is_f32)
{
    cu_form form = is_f32 ? cu_backward_pass32_choice(D, E) : cu_backward_pass_choice(D, E);
    form.tile.stages = form.backward.rows == 32 ? 2 : 1;
    form.backward.parts = 1;
    form.backward.is_thirds = 0;
    form.backward.is_captures = 1;
    return form;
}

/* Blocks as those that CU_BWD_CAPTURES walks. A CTA leaves room for a second one, whose copies
 * its products hide; two stages are worth less than more keys, which every copy of the queries
 * serves. Tells how many CTAs fit, 0 if none does. */
static int fit_elements(int D, int E, int most, cu_form *form)
{
    static const struct {
        int blocks, stages;
    } choices[] = {{4, 2}, {4, 1}, {2, 1}, {1, 1}};
    for (int ctas = 2; ctas > 0; ctas--)
        for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
            form->backward.blocks = choices[i].blocks;
            form->tile.keys = choices[i].blocks * form->backward.rows;
            form->tile.stages = choices[i].stages;
            if (ctas * (cu_backward_shared_bytes(form, D, E) + 1024) <= most + 1024)
                return ctas;
        }
    return 0;
}

/* What is kept costs a stage, but no blocks and no CTA. */
cu_form cu_backward_elements_choice(int D, int E, int is_f32, int kept, int most)
{
    cu_form plain = cu_backward_captures_choice(D, E, is_f32), keeping = plain;
    keeping.backward.kept = kept;
    const int ctas = fit_elements(D, E, most, &plain);
    return fit_elements(D, E, most, &keeping) == ctas
                   && keeping.backward.blocks == plain.backward.blocks
               ? keeping
               : plain;
}

enum { PAIRS_MOST = 6, PAIRS_LEAST = 2 };

/* Up to six pairs: three visits, two of them on their way. */
static int fit_pairs(int D, int E, cu_form *f)
{
    f->tile.stages = PAIRS_MOST;
    while (f->tile.stages >= PAIRS_LEAST
           && cu_backward_shared_bytes(f, D, E) > cu_shared_most(90))
        f->tile.stages--;
    return f->tile.stages >= PAIRS_LEAST;
}

int cu_backward_elements90_choice(int D, int E, int kept, cu_form *out)
{
    const int dim = D > E ? D : E;
    if (dim > 128)
        return 0;
    *out = (cu_form){.family = CU_SM90,
                     .tile = {.groups = 2, .keys = 128},
                     .backward = {.rows = cu_backward_pass_choice(D, E).backward.rows,
                                  .parts = 1,
                                  .is_captures = 1,
                                  .blocks = 1,
                                  .kept = kept,
                                  .stay = 2 * BWD_ROWS,
                                  .registers = {240, 24, 0}}};
    if (!fit_pairs(D, E, out)) { /* loads are made again, not kept */
        out->backward.kept = 0;
        return fit_pairs(D, E, out);
    }
    return 1;
}
