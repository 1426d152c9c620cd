/* What a run takes of memory: shared memory of a CTA, and the workspace. There, tiles have
 * counters, flags, and the list of tiles to do again; decode has flags, counts of blocks, and
 * parts of results; keys that are brought into one piece come last. */
#include "cuda/run/run.h"

int cu_group_bytes(const cu_form *f, const cu_mod_text *facts)
{
    const cu_shares *x = &facts->shares;
    const int keys = f->tile.keys, columns = keys * facts->column_words * 4;
    return f->family == CU_SM90 ? columns + cu_share_bytes(keys, x->n_keys, x->n_diagonals)
                                : columns;
}

int run_decode_shared(const cu_form *f, const cu_mod_text *facts, const plan_problem *p,
                      int64_t spans)
{
    const int D = cu_padded(p->sizes.D), E = cu_value_columns(p), words = facts->column_words;
    return f->latent_panels
               ? cu_latent_shared(&f->tile, D, E, words, spans)
               : cu_decode_shared(&f->tile, f->span_rows, D, E, cu_key_bits(p), words, spans);
}

int cu_shared_bytes(const cu_form *f, const cu_mod_text *facts, const plan_problem *p)
{
    const int D = cu_padded(p->sizes.D), E = cu_padded(p->sizes.Dv);
    if (f->span_rows)
        return run_decode_shared(f, facts, p, 0);
    if (f->buffers)
        return cu_few_shared(&f->tile, f->teams, D, E);
    if (f->teams)
        return cu_small_shared(&f->tile, f->teams, D, E, 0)
               + f->teams * cu_group_bytes(f, facts);
    const int groups = f->family == CU_SM90 ? f->tile.groups : 1;
    return cu_tile_shared(f->family, &f->tile, D, E) + cu_dense_shared(&f->tile, f->dense_bytes)
           + groups * cu_group_bytes(f, facts);
}

const cu_form *run_tiles_form(const cu_state *s, cu_program program)
{
    const cu_operation operation = cu_program_kinds[program].operation;
    const int is_tiled = operation == CU_OP_FORWARD || operation == CU_OP_SMALL;
    return &s->programs[is_tiled ? program : CU_MAIN].form;
}

int run_rows(const cu_form *f)
{
    return cu_tile_rows(f->family, &f->tile);
}

int64_t run_tiles(const cu_form *f, const saccade_sizes *sizes)
{
    if (!f->tile.groups)
        return 0;
    return sizes->B * sizes->H * ((sizes->Q + run_rows(f) - 1) / run_rows(f));
}

int64_t run_groups(const cu_form *f, const saccade_sizes *sizes)
{
    return run_tiles(f, sizes) * (run_rows(f) / 16);
}

run_decode_sizes run_decode_space(const cu_state *s, int span_rows, const saccade_sizes *sizes,
                                  int E)
{
    const int64_t spans = cu_decode_spans(sizes, span_rows);
    const size_t slots = s->has_fixed_pieces ? (size_t)(spans * cu_decode_pieces(sizes->KV))
                                             : 2 * (size_t)s->device.n_sm; /* of each CTA */
    run_decode_sizes d;
    d.counts =
        RUN_COUNTER_BYTES + cu_aligned((size_t)(sizes->B * sizes->H * sizes->Q) * sizeof(int));
    d.part_o = d.counts + cu_aligned((size_t)s->device.n_sm * 4 * sizeof(int));
    d.part_ml = d.part_o + slots * (size_t)(span_rows * E) * sizeof(float);
    d.bytes = d.part_ml + slots * (size_t)(span_rows * 4) * sizeof(float);
    return d;
}

/* Any run whose numbers decode can compute with. */
static int takes_large(const cu_form *form, const saccade_sizes *sizes)
{
    const int64_t rows = cu_group(sizes) * sizes->Q,
                  spans = cu_decode_spans(sizes, form->span_rows);
    return cu_finds_spans(sizes) && rows * sizes->Q <= UINT32_MAX
           && sizes->B * sizes->H * sizes->Q <= INT32_MAX
           && spans * (sizes->KV / form->tile.keys + 1) <= INT32_MAX;
}

int run_takes_decode(const cu_state *s, cu_program program, const saccade_sizes *sizes)
{
    const cu_form *form = &s->programs[program].form;
    const cu_tile *tile = &form->tile;
    if (tile->groups && s->has_fixed_pieces)
        return sizes->Q <= CU_SHORT_ROWS && cu_finds_spans(sizes)
               && cu_decode_spans(sizes, CU_SPAN_ROWS) * cu_decode_pieces(sizes->KV)
                          * PIECE_KEYS
                      < (int64_t)INT32_MAX * tile->keys - PIECE_KEYS * s->device.n_sm;
    if (tile->groups && s->has_large_heads)
        return takes_large(form, sizes);
    return tile->groups && cu_decode_applies(sizes, form->span_rows)
           && cu_decode_spans(sizes, form->span_rows) * (sizes->KV / tile->keys + 1)
                  <= INT32_MAX;
}

int run_is_decode(const cu_state *s, const saccade_sizes *sizes)
{
    return run_takes_decode(s, CU_DECODE, sizes) || run_takes_decode(s, CU_DECODE_WIDE, sizes);
}

/* flags, the list of tiles to do again and, of ragged runs, their order */
size_t run_tiles_space(const cu_form *f, const saccade_sizes *sizes, int is_ragged)
{
    if (!f->tile.groups)
        return 0;
    return RUN_COUNTER_BYTES
           + cu_aligned((2 * (size_t)run_groups(f, sizes)
                      + (is_ragged ? (size_t)run_tiles(f, sizes) : 0))
                     * sizeof(int));
}

/* Where a row's bits are its own: bytes that CTAs put by between parts of the keys, of each row
 * of the tiles under way its sums and, in each of four lanes, two numbers. */
static size_t put_space(const cu_state *s, const cu_form *f, const saccade_sizes *sizes, int E)
{
    if (!s->part_dim || f->family != CU_SM90 || !f->tile.groups
        || sizes->KV <= cu_part_keys(&f->tile, s->part_dim))
        return 0;
    return (size_t)s->device.n_sm * (size_t)run_rows(f) * (size_t)(E + 8) * sizeof(float);
}

int64_t run_parts(const cu_state *s, const saccade_sizes *sizes)
{
    const int keys = cu_part_keys(&s->programs[CU_PARTS].form.tile, s->part_dim);
    return sizes->KV > 0 ? (sizes->KV + keys - 1) / keys : 1;
}

int run_is_in_parts(const cu_state *s, const saccade_sizes *sizes)
{
    const cu_form *main = &s->programs[CU_MAIN].form;
    const int64_t rows = sizes->B * sizes->H * sizes->Q;
    const int64_t parts = sizes->KV / PART_KEYS + 1;
    return s->programs[CU_PARTS].form.tile.groups && sizes->Q > 0 && rows * parts < INT32_MAX
           && (sizes->Q * cu_group(sizes) <= CU_PART_ROWS
               || (sizes->Q <= CU_SHORT_ROWS && run_tiles(main, sizes) * 4 <= s->device.n_sm));
}

/* Where a row's bits are its own: bytes that parts of few rows take, for any run of at most
 * these sizes. Rows are B H Q of a run that takes parts: few of a KV head, or few tiles. */
static size_t parts_space(const cu_state *s, const saccade_sizes *sizes, int E)
{
    const cu_form *main = &s->programs[CU_MAIN].form;
    if (!s->programs[CU_PARTS].form.tile.groups)
        return 0;
    const int64_t packed = CU_PART_ROWS / cu_group(sizes), heads = sizes->B * sizes->H;
    const int64_t few = heads * (sizes->Q < packed ? sizes->Q : packed);
    const int64_t tiles = (int64_t)s->device.n_sm / 4 * run_rows(main);
    const int64_t some = heads * (sizes->Q < CU_SHORT_ROWS ? sizes->Q : CU_SHORT_ROWS);
    const int64_t short_rows = some < tiles ? some : tiles;
    return RUN_COUNTER_BYTES
           + (size_t)((few > short_rows ? few : short_rows) * run_parts(s, sizes))
                 * (size_t)(E + 4) * sizeof(float);
}

saccade_sizes run_short_sizes(const cu_state *s, const saccade_sizes *sizes)
{
    saccade_sizes few = *sizes;
    if (s->has_fixed_pieces && few.Q > CU_SHORT_ROWS)
        few.Q = CU_SHORT_ROWS;
    while (few.Q && !run_is_decode(s, &few))
        few.Q = few.Q > 64 ? 64 : few.Q - 1;
    return few;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Rows that some run of at most these sizes has in decode: a smaller batch may where this one
 * has too many. */
static saccade_sizes decode_sizes_most(const cu_state *s, cu_program program,
                                       const saccade_sizes *sizes)
{
    const cu_form *form = &s->programs[program].form;
    const int64_t most = !form->tile.groups    ? 0
                         : s->has_large_heads  ? sizes->Q
                         : s->has_fixed_pieces ? CU_SHORT_ROWS
                                               : cu_decode_rows_most(sizes, form->span_rows);
    saccade_sizes few = *sizes;
    few.Q = few.Q < most ? few.Q : most;
    return few;
}

/* Enough for every run of at most these sizes, short ones and smaller batches too. */
size_t run_programs_space(const saccade_plan *plan, const saccade_sizes *sizes)
{
    const cu_state *s = plan->state;
    const int is_ragged = plan->problem.is_ragged;
    const int E = cu_value_columns(&plan->problem);
    size_t tiles = 0;
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (cu_program_kinds[i].operation == CU_OP_FORWARD
            || cu_program_kinds[i].operation == CU_OP_SMALL)
            tiles = larger(tiles, run_tiles_space(&s->programs[i].form, sizes, is_ragged)
                                      + put_space(s, &s->programs[i].form, sizes, E));
    tiles = larger(tiles, parts_space(s, sizes, E));
    size_t decode = 0;
    for (int i = 0; i < CU_PROGRAMS; i++) {
        if (cu_program_kinds[i].operation != CU_OP_DECODE)
            continue;
        const saccade_sizes few = decode_sizes_most(s, (cu_program)i, sizes);
        if (few.Q)
            decode = larger(decode,
                            run_decode_space(s, s->programs[i].form.span_rows, &few, E).bytes);
    }
    return cu_aligned(is_ragged ? tiles + decode : larger(tiles, decode));
}

size_t cu_workspace(const saccade_plan *plan, const saccade_sizes *run_sizes)
{
    const saccade_sizes sizes = cu_local_sizes(plan, run_sizes);
    return run_programs_space(plan, &sizes) + run_keys_space(plan, &sizes);
}
