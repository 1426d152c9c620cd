/* Decode put on a stream: whole spans to CTAs or clusters in one launch, or all keys in equal
 * shares and a second kernel that joins them (kern/decode.cu). */
#include "cuda/run/run.h"

#include "base/integers.h"

enum { FEW_PIECES = 4 }; /* of a span, which one warp joins */

/* Blocks of spans are counted in shared memory, but where they are fixed or each CTA has a span
 * of its own. */
static int decode_shared(const cu_state *s, const cu_form *form, const plan_problem *p,
                         const cu_decode *f)
{
    const int is_counted = !f->owns && !s->has_fixed_pieces;
    return run_decode_shared(form, &s->facts, p, is_counted ? f->spans : 0);
}

/* Blocks of every span where all have the same, known here; else 0. */
static int span_blocks(const cu_state *s, const cu_tile *tile, const cu_fwd *p)
{
    const int len = p->kv_len.value < p->N ? p->kv_len.value : p->N;
    if (p->kv_len.by_batch || s->facts.mask == CU_MASK_INTERVAL || p->runs || s->is_ragged)
        return 0;
    return len > 0 ? (len + tile->keys - 1) / tile->keys : 1;
}

static int streams_of(const cu_form *form)
{
    return cu_decode_streams(&form->tile, form->span_rows, form->column_parts);
}

/* CTAs that share the keys: each with a block for every stream, if there are so many. */
static int decode_ctas(const cu_state *s, const cu_form *form, const cu_fwd *p, int spans)
{
    const int most = cu_reading_ctas(s->device.n_sm);
    const int64_t blocks = spans * (int64_t)((p->N + form->tile.keys - 1) / form->tile.keys);
    const int streams = streams_of(form);
    const int64_t ctas = (blocks + streams - 1) / streams;
    return ctas < 1 ? 1 : ctas < most ? (int)ctas : most;
}

/* One launch, without cuts between CTAs of different clusters, where spans are alike: CTAs of a
 * cluster, 0 where two launches with equal shares are better; *grid: all CTAs. */
static int decode_cluster(const cu_state *s, const cu_form *form, const cu_fwd *p, int spans,
                          unsigned *grid)
{
    const int blocks = (p->N + form->tile.keys - 1) / form->tile.keys;
    const int is_alike = !p->kv_len.by_batch && !p->q_offset.by_batch && !p->kv_offset.by_batch
                         && !p->runs && !s->is_ragged;
    const int is_light = s->facts.score != CU_SCORE_GENERAL && s->facts.mask != CU_MASK_GENERAL;
    return is_alike && form->column_parts < 2 ? cu_decode_cluster(
               s->device.n_sm, spans, blocks, streams_of(form), is_light, grid)
                                              : 0;
}

static unsigned reciprocal(int d)
{
    return d == 1 ? 0 : (unsigned)(((1ull << 32) + (unsigned)d - 1) / (unsigned)d);
}

/* Fixed pieces are dealt out one by one; blocks that are not live are passed over. */
static void fill_pieces(const cu_state *s, const cu_tile *tile, cu_fwd *p)
{
    const int64_t pieces = cu_decode_pieces(p->N), all = pieces * p->decode.spans;
    const int most = cu_reading_ctas(s->device.n_sm);
    p->runs = NULL;
    p->decode.span_blocks = (int)(pieces * (PIECE_KEYS / tile->keys));
    p->n_split = all < most ? (int)all : most;
}

static void fill_decode(const cu_state *s, const cu_form *form, cu_fwd *p,
                        const saccade_sizes *sizes, int spans)
{
    cu_decode *f = &p->decode;
    f->group = cu_group(sizes);
    f->flags = f->most = (int)sizes->Q;
    f->rows = f->group * f->most;
    f->tiles = (f->rows + form->span_rows - 1) / form->span_rows;
    f->spans = spans;
    f->owns = 0;
    f->span_blocks = span_blocks(s, &form->tile, p);
    p->n_split = decode_ctas(s, form, p, spans);
    f->share = spans * f->span_blocks / p->n_split;
    f->larger = spans * f->span_blocks % p->n_split;
    f->joins_spans = spans < p->n_split - 1;
    if (s->has_fixed_pieces)
        fill_pieces(s, &form->tile, p);
    f->by_tiles = reciprocal(f->tiles);
    f->by_G = reciprocal(p->G);
    f->by_M = reciprocal(p->M);
}

/* Whether each CTA gets a span of its own: two CTAs to a multiprocessor always do. */
static int has_own_spans(const cu_state *s, cu_program which, const cu_fwd *p, int spans)
{
    const int counted = which == CU_LATENT ? CU_LATENT_SPANS : CU_LARGE_SPANS;
    return which == CU_DECODE_HALF || (s->has_large_heads && spans > counted)
           || (p->kv_len.by_batch && !p->runs && !s->is_ragged && !s->has_fixed_pieces
               && cu_decode_owns_pays(s->device.n_sm, spans));
}

/* A span to each CTA, whatever blocks it has: CTAs in all. */
static unsigned give_spans(const cu_tile *tile, cu_fwd *p)
{
    const int blocks = (p->N + tile->keys - 1) / tile->keys;
    p->decode.cluster = p->decode.owns = 1;
    p->decode.span_blocks = blocks ? blocks : 1;
    return (unsigned)p->decode.spans;
}

static saccade_status encode_maps(const cu_tile *tile, const plan_run *run, run_args *a,
                                  saccade_error *err)
{
    const int box = run_place_box(run, 1, tile, &a->p.chunks);
    TRY(run_encode_map(a->driver, run->k, box, PROMOTE_NONE, &a->maps[1], err));
    return run_encode_map(a->driver, run->v, box, PROMOTE_NONE, &a->maps[2], err);
}

/* Whether K and V are half of L2 or less: a longer run gains nothing by an early start, and may
 * lose a quarter (docs/lab/102). */
static int may_start_early(const cu_state *s, const plan_problem *p,
                           const saccade_sizes *sizes)
{
    const int64_t keys = sizes->B * sizes->Hkv * sizes->KV;
    return keys * (p->sizes.D + p->sizes.Dv) * 2 <= s->device.l2_bytes / 2;
}

/* CTAs that join: of each span where there are fewer of these than cuts, and of its rows, which
 * four warps of a CTA have at a time where pieces are few. */
static void join_grid(const cu_state *s, const cu_form *form, const cu_fwd *p, unsigned grid[2])
{
    const int rows = (int)smaller(p->decode.rows, form->span_rows), cuts = p->n_split - 1;
    const int is_by_span = s->has_fixed_pieces || p->decode.joins_spans;
    const int has_many = p->decode.joins_spans && cuts > FEW_PIECES * p->decode.spans;
    const int most = has_many ? form->span_rows : CU_SPAN_ROWS;
    grid[0] = is_by_span ? (unsigned)p->decode.spans : cuts > 0 ? (unsigned)cuts : 1;
    grid[1] = (unsigned)(rows < most ? rows : most);
}

/* which: of the programs of decode. sizes: the run's, Q no more than decode takes; base: of its
 * part of the workspace. */
static saccade_status launch_spans(const saccade_plan *plan, cu_program which,
                                   const plan_run *run, const saccade_sizes *sizes, char *base,
                                   run_args *a, saccade_error *err)
{
    cu_state *s = plan->state;
    const cu_loaded *program = &s->programs[which];
    const cu_form *form = &program->form;
    const int loaders = form->span_rows > CU_SPAN_ROWS ? DECODE_LOADERS : 0;
    const int threads = (form->tile.groups + loaders) * 32;
    const int spans = (int)cu_decode_spans(sizes, form->span_rows);
    const run_decode_sizes d =
        run_decode_space(s, form->span_rows, sizes, cu_value_columns(&plan->problem));
    void *parameters[] = {&a->p, a->captures, &a->maps[1], &a->maps[2]};
    unsigned grid[2] = {1, 1};
    a->p.flags = (int *)(base + RUN_COUNTER_BYTES);
    a->p.done = (int *)(base + d.counts);
    a->p.part_o = (float *)(base + d.part_o);
    a->p.part_ml = (float *)(base + d.part_ml);
    fill_decode(s, form, &a->p, sizes, spans);
    a->starts_early &= may_start_early(s, &plan->problem, sizes);
    if (has_own_spans(s, which, &a->p, spans))
        grid[0] = give_spans(&form->tile, &a->p);
    else if (!s->has_fixed_pieces)
        a->p.decode.cluster = decode_cluster(s, form, &a->p, spans, grid);
    const int shared = decode_shared(s, form, &plan->problem, &a->p.decode);
    if (!cu_codes(&plan->problem) || cu_copies_codes_by_boxes(s, &plan->problem))
        TRY(encode_maps(&form->tile, run, a, err));
    if (a->p.decode.cluster)
        return run_start_first(a, program->kernel, grid[0], threads, shared,
                               a->p.decode.cluster, parameters, err);
    TRY(run_start_first(a, program->kernel, (unsigned)a->p.n_split, threads, shared, 1,
                        parameters, err));
    join_grid(s, form, &a->p, grid);
    return run_start_with(a, program->other, grid, 128, 0, WITH_OVERLAP, 1, parameters, err);
}

saccade_status run_launch_decode(const saccade_plan *plan, const plan_run *run, run_args *a,
                                 saccade_error *err)
{
    return launch_spans(plan, a->program, run, &run->sizes, run->workspace, a, err);
}

saccade_status run_launch_short(const saccade_plan *plan, const plan_run *run, run_args *a,
                                saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_form *form = &s->programs[a->program].form;
    const saccade_sizes few = run_short_sizes(s, &run->sizes);
    if (!run->ragged || !few.Q || !run_is_aligned(run))
        return SACCADE_OK;
    run_args own = *a;
    a->p.ragged.least = (int)few.Q + 1;
    return launch_spans(plan, run_wants_wide(s, &few) ? CU_DECODE_WIDE : CU_DECODE, run, &few,
                        (char *)run->workspace + run_tiles_space(form, &run->sizes, 1), &own,
                        err);
}
