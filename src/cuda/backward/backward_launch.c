/* A backward run: which programs it takes, and their kernels put on the stream. Nothing is
 * allocated, compiled or copied here. */
#include "cuda/backward/cuda_backward.h"
#include "cuda/emit/emit.h"
#include "cuda/run/run.h"

#include "base/integers.h"

typedef struct launch {
    cu_bwd p;
    run_args a; /* captures, maps of Q, K, V; driver and stream */
    cu_map d_out;
    cu_capture_run captured;
    cu_turns turns; /* of tiles of keys */
} launch;

/* A kernel that waits by itself for what the one before it on the stream leaves. */
static saccade_status start_beside(const launch *l, void *kernel, int64_t grid, int threads,
                                   int shared, void **parameters, saccade_error *err)
{
    const unsigned size[2] = {(unsigned)grid, 1};
    return run_start_with(&l->a, kernel, size, threads, shared, WITH_OVERLAP, 1, parameters,
                          err);
}

/* Rows of a CTA of bwd_prepare: a few lanes to each. */
static int prepare_rows(const plan_problem *p)
{
    const int D = cu_padded(p->sizes.D), E = cu_padded(p->sizes.Dv), dim = D > E ? D : E;
    return PREPARE_THREADS / BWD_ROW_LANES(dim);
}

/* Parts of a key head whose bounds are found apart: as many as all run at once. */
static int count_bounds(int n_sm, int64_t heads)
{
    enum { CTAS = 8 }; /* of 256 threads to a multiprocessor */
    const int64_t parts = (CTAS * (int64_t)n_sm + heads - 1) / larger(heads, 1);
    return (int)smaller(larger(parts, 1), BWD_CHUNKS);
}

static saccade_status start_prepare(const saccade_plan *plan, launch *l, saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_loaded *program = &s->programs[CU_BWD_PREPARE];
    const int64_t rows = (int64_t)l->p.f.B * l->p.f.H * l->p.n_mblk * BWD_ROWS;
    const int each = prepare_rows(&plan->problem);
    const int64_t grid = (rows + each - 1) / each;
    void *parameters[] = {&l->p, l->a.captures};
    if (!l->p.bounds || !cu_backward_is_fixed(&plan->problem, &program->form))
        return run_start(&l->a, program->kernel, grid, PREPARE_THREADS, 0, parameters, err);
    const int64_t heads = (int64_t)l->p.f.B * l->p.f.G;
    l->p.n_bounds = count_bounds(s->device.n_sm, heads);
    TRY(start_beside(l, program->other, heads * l->p.n_bounds, PREPARE_THREADS, 0,
                     parameters, err));
    return start_beside(l, program->kernel, grid, PREPARE_THREADS, 0, parameters, err);
}

static int shared_of(const saccade_plan *plan, const cu_loaded *program)
{
    return cu_backward_shared(plan->state, &plan->problem, &program->form);
}

/* After start_prepare. */
static saccade_status start_sinks(const saccade_plan *plan, launch *l, saccade_error *err)
{
    const cu_state *s = plan->state;
    void *parameters[] = {&l->p};
    if (!l->p.d_sinks)
        return SACCADE_OK;
    const int64_t elements = (int64_t)l->p.n_sinks_b * l->p.f.H * l->p.n_sinks_m;
    return run_start(&l->a, s->programs[CU_BWD_SINKS].kernel, elements, SINK_THREADS, 0,
                     parameters, err);
}

/* Maps of K and V in tiles of so many keys, of Q and dO in blocks of BWD_ROWS. */
static saccade_status encode_maps(const plan_run *run, const plan_gradients *g, int keys,
                                  launch *l, saccade_error *err)
{
    const cu_driver *driver = l->a.driver;
    cu_map *m = l->a.maps;
    TRY(run_encode_map(driver, run->q, BWD_ROWS, PROMOTE_128, &m[0], err));
    TRY(run_encode_map(driver, run->k, keys, PROMOTE_128, &m[1], err));
    TRY(run_encode_map(driver, run->v, keys, PROMOTE_128, &m[2], err));
    return run_encode_map(driver, g->d_out, BWD_ROWS, PROMOTE_128, &l->d_out, err);
}

enum { GROUP_WARPS = 4 }; /* of a warpgroup */

/* A kernel over tiles of keys: its threads and shared memory, how many warps of a CTA tell that
 * they have stored gradients, or 0, and how many CTAs take all tiles, or 0: each takes one.
 * Those that tell wait for the kernel before themselves. */
typedef struct keys_kernel {
    void *kernel;
    int threads, shared, tellers, takers;
} keys_kernel;

static keys_kernel keys_kernel_of(const saccade_plan *plan, const cu_loaded *program, int tells)
{
    return (keys_kernel){program->kernel, cu_backward_threads(&program->form),
                         shared_of(plan, program),
                         tells ? program->form.tile.groups * GROUP_WARPS : 0, 0};
}

/* Tiles [first, past) of the order. */
static saccade_status start_some(launch *l, const keys_kernel *k, int first, int past,
                                 void **parameters, saccade_error *err)
{
    const int *order = l->p.f.order;
    const int all = l->p.f.n_tiles, n = past - first;
    const int grid = k->takers ? (int)smaller(k->takers, n) : n;
    if (!n)
        return SACCADE_OK;
    l->p.f.order = order ? order + first : NULL;
    l->p.f.n_tiles = n;
    const saccade_status status =
        k->tellers ? start_beside(l, k->kernel, grid, k->threads, k->shared, parameters, err)
                   : run_start(&l->a, k->kernel, grid, k->threads, k->shared, parameters, err);
    l->p.f.order = order;
    l->p.f.n_tiles = all;
    return status;
}

/* Gradients of keys from elsewhere are on the stream. */
static saccade_status send_far(const plan_run *run, uint32_t told, saccade_error *err)
{
    const plan_far *far = run->far;
    return far && far->send ? far->send(far->user, told, err) : SACCADE_OK;
}

/* The kernel over tiles of keys for as many KV heads as there are parts, whose dK and dV
 * bwd_join adds. */
static saccade_status start_parts(const saccade_plan *plan, launch *l, const keys_kernel *k,
                                  void **parameters, saccade_error *err)
{
    const saccade_sizes *s = &plan->problem.sizes;
    const int64_t D = s->D, E = s->Dv, N = l->p.f.N;
    const cu_bwd whole = l->p;
    void *join[] = {&l->p};
    l->p.f.G *= whole.parts;
    l->p.f.n_tiles *= whole.parts;
    l->p.dk = whole.dk ? whole.parts_k : NULL;
    l->p.dv = whole.dv ? whole.parts_v : NULL;
    l->p.dks = (cu_stride){.b = l->p.f.G * N * D, .h = N * D, .n = D};
    l->p.dvs = (cu_stride){.b = l->p.f.G * N * E, .h = N * E, .n = E};
    l->p.wide |= BWD_OF_K | BWD_OF_V;
    l->p.added &= ~(BWD_OF_K | BWD_OF_V);
    l->p.own.page = NULL;
    const saccade_status status = start_some(l, k, 0, l->p.f.n_tiles, parameters, err);
    l->p = whole;
    TRY(status);
    if (!l->p.dk && !l->p.dv)
        return SACCADE_OK;
    const int64_t most = (int64_t)l->p.f.B * l->p.f.G * N * (D > E ? D : E);
    const int each = D % 4 || E % 4 || l->p.f.is_plain ? 1 : 4;
    const unsigned grid[2] = {(unsigned)((most / each + JOIN_THREADS - 1) / JOIN_THREADS), 2};
    const cu_loaded *program = &((const cu_state *)plan->state)->programs[CU_BWD_JOIN];
    return run_start_with(&l->a, program->kernel, grid, JOIN_THREADS, 0,
                          k->tellers ? WITH_OVERLAP : WITH_NOTHING, 1, join, err);
}

/* Tiles of keys from elsewhere come first, so that their gradients travel while others are
 * made. Where the kernel tells that they are stored, one launch has all tiles: they are few and
 * long, and a launch of their own leaves most multiprocessors idle at its end. */
static saccade_status start_keys(const saccade_plan *plan, const plan_run *run, launch *l,
                                 const keys_kernel *k, void **parameters, saccade_error *err)
{
    if (l->p.parts > 1)
        return start_parts(plan, l, k, parameters, err);
    const int all = run->far ? l->turns.needed : l->p.f.n_tiles;
    const int first = run->far && run->far->send && l->turns.first ? l->turns.first : all;
    if (first == all || !k->tellers) {
        TRY(start_some(l, k, 0, first, parameters, err));
        TRY(send_far(run, 0, err));
        return start_some(l, k, first, all, parameters, err);
    }
    l->p.told = run->far->told;
    l->p.n_told = first;
    TRY(start_some(l, k, 0, all, parameters, err));
    return send_far(run, (uint32_t)first * (uint32_t)k->tellers, err);
}

/* dK, dV and the sums of dQ by tiles, then dQ from its sums. */
static saccade_status start_tiles(const saccade_plan *plan, const plan_run *run,
                                  const plan_gradients *g, cu_program which, launch *l,
                                  saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_loaded *program = &s->programs[which];
    const int D = cu_padded(plan->problem.sizes.D);
    const int64_t blocks = (int64_t)l->p.f.B * l->p.f.H * l->p.n_mblk;
    cu_map *m = l->a.maps;
    void *parameters[] = {&l->p, l->a.captures, &m[0],          &m[1],
                          &m[2], &l->d_out,     &l->captured.c, l->a.dense};
    void *finish[] = {&l->p, l->a.captures, &l->captured.c};
    TRY(encode_maps(run, g, program->form.tile.keys, l, err));
    if (which == CU_BWD_DENSE)
        TRY(run_map_dense(plan, run, which, &l->a, &l->p.f.dense_turned, err));
    TRY(start_prepare(plan, l, err));
    TRY(start_sinks(plan, l, err));
    keys_kernel k = keys_kernel_of(plan, program, 1);
    k.takers = cu_backward_takes_many(&s->backward_facts, &plan->problem) ? s->device.n_sm : 0;
    TRY(start_keys(plan, run, l, &k, parameters, err));
    if (!g->dq)
        return SACCADE_OK;
    return start_beside(l, s->programs[CU_BWD_FINISH].kernel, blocks * ((D + 63) / 64), 128, 0,
                        finish, err);
}

/* dK and dV by tiles of keys, dQ by tiles of queries. */
static saccade_status start_wide(const saccade_plan *plan, const plan_run *run,
                                 const plan_gradients *g, cu_program which, launch *l,
                                 saccade_error *err)
{
    const cu_loaded *program = &((const cu_state *)plan->state)->programs[which];
    const keys_kernel k = keys_kernel_of(plan, program, 1);
    const int stay = program->form.backward.stay, tiles = (l->p.f.M + stay - 1) / stay;
    const int query_threads = cu_backward_query_threads(&program->form);
    const int query_shared = cu_backward_query_shared(
        &program->form, cu_padded(plan->problem.sizes.D), cu_padded(plan->problem.sizes.Dv));
    const int64_t grid = (int64_t)l->p.f.B * l->p.f.H * tiles;
    cu_map *m = l->a.maps;
    void *parameters[] = {&l->p, l->a.captures, &m[0], &m[1], &m[2], &l->d_out};
    l->p.dq_sum = NULL;
    l->p.bounds = NULL;
    TRY(encode_maps(run, g, program->form.tile.keys, l, err));
    TRY(start_prepare(plan, l, err));
    TRY(start_sinks(plan, l, err));
    if (!g->dk && !g->dv) {
        TRY(send_far(run, 0, err));
        return run_start(&l->a, program->other, grid, query_threads, query_shared, parameters,
                         err);
    }
    TRY(start_keys(plan, run, l, &k, parameters, err));
    if (!g->dq)
        return SACCADE_OK;
    return start_beside(l, program->other, grid, query_threads, query_shared, parameters, err);
}

/* Q, K, V and dO in bf16 numbers, and maps of them in boxes of so many rows. */
static saccade_status split(const saccade_plan *plan, const plan_run *run,
                            const plan_gradients *g, int rows, launch *l, saccade_error *err)
{
    const cu_loaded *program = &((const cu_state *)plan->state)->programs[CU_BWD_SPLIT];
    const cu_backward_space at = cu_backward_space_of(plan, &run->sizes, g);
    cu_map *const maps[4] = {&l->a.maps[0], &l->a.maps[1], &l->a.maps[2], &l->d_out};
    int64_t most = 0;
    cu_thirds to;
    for (int i = 0; i < 4; i++) {
        int64_t n[4];
        cu_backward_thirds_shape(plan, &run->sizes, i, &n);
        const int64_t pieces = n[0] * n[1] * n[2] * (n[3] / 24);
        most = pieces > most ? pieces : most;
        to.rows[i] = (char *)run->workspace + at.thirds[i];
        const saccade_tensor t = saccade_tensor_of(to.rows[i], SACCADE_BF16, 4, n);
        TRY(run_encode_map(l->a.driver, &t, rows, PROMOTE_128, maps[i], err));
    }
    const unsigned grid[2] = {(unsigned)((most + 255) / 256), 4};
    void *parameters[] = {&l->p, &to};
    return run_start_with(&l->a, program->kernel, grid, 256, 0, WITH_NOTHING, 1, parameters,
                          err);
}

/* start_wide for f32, whose kernels read what split() leaves. */
static saccade_status start_f32(const saccade_plan *plan, const plan_run *run,
                                const plan_gradients *g, launch *l, saccade_error *err)
{
    const cu_loaded *program = &((const cu_state *)plan->state)->programs[CU_BWD_F32];
    const keys_kernel k = keys_kernel_of(plan, program, 0);
    cu_map *m = l->a.maps;
    void *parameters[] = {&l->p, l->a.captures, &m[0], &m[1], &m[2], &l->d_out};
    l->p.dq_sum = NULL;
    TRY(split(plan, run, g, program->form.backward.rows, l, err));
    TRY(start_prepare(plan, l, err));
    TRY(start_sinks(plan, l, err));
    if (g->dk || g->dv)
        TRY(start_keys(plan, run, l, &k, parameters, err));
    if (!g->dq)
        return SACCADE_OK;
    return run_start(&l->a, program->other, (int64_t)l->p.f.B * l->p.f.H * l->p.n_mblk,
                     k.threads, k.shared, parameters, err);
}

static saccade_status start_plain(const saccade_plan *plan, const plan_run *run,
                                  const plan_gradients *g, launch *l, saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_loaded *program = &s->programs[CU_BWD_PLAIN];
    const keys_kernel k = keys_kernel_of(plan, program, 0);
    void *parameters[] = {&l->p, l->a.captures};
    l->p.dq_sum = NULL;
    TRY(start_prepare(plan, l, err));
    TRY(start_sinks(plan, l, err));
    if (g->dk || g->dv)
        TRY(start_keys(plan, run, l, &k, parameters, err));
    else
        TRY(send_far(run, 0, err));
    if (!g->dq)
        return SACCADE_OK;
    return run_start(&l->a, program->other, (int64_t)l->p.f.B * l->p.f.H * l->p.n_mblk,
                     k.threads, k.shared, parameters, err);
}

/* ---- a run ---- */

/* Which program makes dQ, dK and dV of a run. */
static cu_program choose(const saccade_plan *plan, const plan_run *run, const cu_bwd *p)
{
    const cu_state *s = plan->state;
    const cu_form *tiles = &s->programs[CU_BWD_TILES].form;
    const cu_form *few = &s->programs[CU_BWD_SHORT].form;
    const cu_form *wide = &s->programs[CU_BWD_WIDE].form;
    if (p->f.is_plain)
        return CU_BWD_PLAIN;
    const int is_dense = cu_backward_suits_dense(s, run->block_mask)
                         && run_takes_dense(plan, run, CU_BWD_DENSE);
    if (cu_backward_takes_few(plan, run->block_mask, run->q->device.index, &run->sizes,
                              is_dense ? BWD_FEW_DENSE : BWD_FEW_BLOCKS))
        return CU_BWD_FEW;
    if (is_dense)
        return CU_BWD_DENSE;
    if (cu_backward_takes_short(plan, &run->sizes, !!run->block_mask)
        && (!run->block_mask
            || cu_backward_key_runs(plan, run->block_mask, run->q->device.index, &run->sizes,
                                    few->tile.keys)))
        return CU_BWD_SHORT;
    if (cu_backward_has_tiles(s)
        && cu_backward_is_suited(run->block_mask, BWD_ROWS, tiles->tile.keys))
        return CU_BWD_TILES;
    if (cu_backward_has_wide(s)
        && cu_backward_is_suited(run->block_mask, wide->backward.stay, wide->tile.keys))
        return CU_BWD_WIDE;
    if (cu_backward_has_f32(s))
        return CU_BWD_F32;
    return CU_BWD_PLAIN;
}

static saccade_status start_program(const saccade_plan *plan, const plan_run *run,
                                    const plan_gradients *g, cu_program program, launch *l,
                                    saccade_error *err)
{
    switch (program) {
    case CU_BWD_PLAIN:
        return start_plain(plan, run, g, l, err);
    case CU_BWD_F32:
        return start_f32(plan, run, g, l, err);
    case CU_BWD_FEW:
    case CU_BWD_WIDE:
        return start_wide(plan, run, g, program, l, err);
    default:
        return start_tiles(plan, run, g, program, l, err);
    }
}

/* Without a mask all whole tiles are alike. */
static void fill_parts(const saccade_plan *plan, const cu_runs *runs, cu_program program,
                       cu_bwd *p)
{
    const cu_state *s = plan->state;
    const cu_form *form = &s->programs[program].form;
    cu_tile_lengths tiles = {.n = p->f.n_tiles, .each = p->n_mblk};
    double time;
    if (form->backward.passes)
        tiles =
            cu_equal_tiles((int64_t)p->f.B * p->f.G, p->f.N, form->tile.groups, 1, p->n_mblk);
    const cu_cut cut =
        runs ? (cu_cut){runs->head_parts, 1}
             : cu_query_parts(s->device.n_sm, cu_backward_cut_heads(&plan->problem),
                              cu_backward_cuts_rows(&plan->problem), &tiles, &time);
    p->parts = cut.heads * cut.rows;
    p->row_parts = cut.rows;
}

/* own: of the run over pages that this one stands for, or NULL. */
static saccade_status start_whole(const saccade_plan *plan, const plan_run *run,
                                  const plan_gradients *g, const cu_own *own,
                                  const cu_driver *driver, saccade_error *err)
{
    cu_state *s = plan->state;
    const plan_problem *problem = &plan->problem;
    const int n_score = problem->score ? (int)problem->score->n_captures : 0;
    cu_backward_runs runs;
    launch l;
    cu_backward_fill(plan, run, g, &l.p);
    l.p.own = own ? *own : l.p.own;
    const cu_program program = choose(plan, run, &l.p);
    cu_backward_fill_rows(plan, run, g, program, &l.p);
    l.a.driver = driver;
    l.a.stream = run->stream;
    TRY(cu_backward_find_runs(plan, run, program, &runs, err));
    cu_backward_fill_tiles(problem, runs.tiles, s->programs[program].form.tile.keys, &l.p.f);
    fill_parts(plan, runs.tiles, program, &l.p);
    l.turns = runs.tiles ? runs.tiles->turns : (cu_turns){0, l.p.f.n_tiles};
    cu_backward_fill_queries(problem, runs.wide_queries ? runs.wide_queries : runs.queries,
                             &l.p);
    TRY(run_captures(problem->score, run->score_env.tensors, l.a.captures, err));
    TRY(run_captures(problem->mask, run->mask_env.tensors, l.a.captures + n_score, err));
    TRY(run_make_ready(s, problem, driver, run->q->device.index, err));
    const size_t captures_at = cu_aligned(cu_backward_space_of(plan, &run->sizes, g).bytes);
    TRY(cu_begin_captures(plan, run, g, captures_at, cu_backward_makes_sums(program), &l.a,
                          &l.captured, err));
    TRY(start_program(plan, run, g, program, &l, err));
    cu_backward_fill_queries(problem, runs.queries, &l.p);
    return cu_end_captures(&l.captured, &l.p, err);
}

/* Keys in chunks: brought into one piece, and their gradients back. */
static saccade_status start_paged(const saccade_plan *plan, const plan_run *run,
                                  const plan_gradients *g, const cu_driver *driver,
                                  saccade_error *err)
{
    const cu_loaded *program = &((const cu_state *)plan->state)->programs[CU_BWD_PAGES];
    char *const room =
        (char *)run->workspace + cu_backward_whole_workspace(plan, &run->sizes, g);
    const run_args a = {.driver = driver, .stream = run->stream};
    cu_paged paged;
    cu_bwd p;
    cu_backward_fill(plan, run, g, &p);
    TRY(cu_pages_place(plan, run, g, &p, room, &paged, err));
    TRY(cu_pages_begin(&paged, program, &p, &a, err));
    TRY(start_whole(plan, &paged.run, &paged.g, &paged.own, driver, err));
    return cu_pages_end(&paged, run, g, program, &p, &a, err);
}

saccade_status cu_backward(const saccade_plan *plan, const plan_run *run,
                           const plan_gradients *gradients, saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_driver *driver;
    plan_run local;
    void *pushed;
    FAIL_IF(!s->is_present, SACCADE_EBACKEND, "cuda: no device here runs %s", s->arch);
    TRY(run_check_positions(s, run, err));
    TRY(cu_local_run(plan, run, &local, err));
    FAIL_IF(local.sizes.B * local.sizes.H * cu_backward_query_blocks(&local.sizes)
                > INT32_MAX / BWD_ROWS,
            SACCADE_ELIMIT, "cuda: got too many rows for one run");
    TRY(cu_get_driver(&driver, err));
    TRY(cu_enter(driver, run->q->device.index, &pushed, err));
    const saccade_status status = local.chunks
                                      ? start_paged(plan, &local, gradients, driver, err)
                                      : start_whole(plan, &local, gradients, NULL, driver, err);
    cu_leave(driver, pushed);
    return status;
}
