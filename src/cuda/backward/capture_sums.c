/* Gradients of captures in a backward run: where each read's terms go, the room that exact sums
 * take, and the launches. Nothing is allocated, compiled or copied here. */
#include "cuda/backward/cuda_backward.h"

#include "base/integers.h"
#include "cuda/emit/emit.h"
#include "cuda/run/run.h"

#include <string.h>

/* ---- indices ---- */

/* Whether read r's indices stay inside of a tensor of this shape, wherever the run's positions
 * are known to the host; env's scalars may be unknown. */
static int is_inside(const plan_problem *p, const pass_read *read, const saccade_tensor *t,
                     const saccade_sizes *s, const eval_env *env, const plan_position *at,
                     arena *scratch)
{
    const mod_fn *fn = p->score;
    const mod_node *load = &fn->nodes[read->node];
    const pass_box box = {{0, 0, at->q_offset, at->kv_offset},
                          {(int32_t)s->B - 1, (int32_t)s->H - 1,
                           at->q_offset + (int32_t)s->Q - 1,
                           at->kv_offset + (int32_t)s->KV - 1}};
    pass_range *ranges = arena_array(scratch, fn->n_nodes, sizeof *ranges);
    if (!ranges)
        return 0;
    pass_ranges(fn, env, &box, NULL, ranges);
    for (int d = 0; d < read->rank; d++) {
        const pass_range *r = &ranges[fn->args[load->args + d]];
        if (r->lo < 0 || r->hi >= t->shape[d])
            return 0;
    }
    return 1;
}

static int64_t element_count(const saccade_tensor *t)
{
    int64_t n = 1;
    for (int32_t d = 0; d < t->rank; d++)
        n *= t->shape[d];
    return n;
}

/* ---- room ---- */

static size_t words_bytes(const saccade_tensor *t)
{
    return ((size_t)element_count(t) * (SUM_WORDS + 1) * sizeof(uint64_t) + 255) / 256 * 256;
}

/* A read's terms are stored directly in the gradient where no index can leave its tensor in a
 * run without offsets and where batches are of one length; all other reads use exact sums.
 * Depends only on what the workspace was asked with, so that a run finds what its caller made
 * room for. */
static cu_capture_layout layout_of(const saccade_plan *plan, const saccade_sizes *s,
                                   const saccade_tensor *captures)
{
    const plan_problem *p = &plan->problem;
    const saccade_sizes whole = cu_whole_sizes(plan, s);
    const plan_position at = {0};
    cu_capture_layout out = {.bytes = 0};
    eval_env env = {0};
    arena scratch;
    arena_init(&scratch);
    cu_find_reads(p, &out.reads);
    plan_set_env(p, &whole, &env);
    for (int i = 0; i < out.reads.n; i++) {
        const pass_read *read = out.reads.read[i];
        const saccade_tensor *t = &captures[read->capture];
        int k = 0;
        out.has_words[i] = read->scatter != SCATTER_ELEMENTS || p->is_ragged
                           || !is_inside(p, read, t, &whole, &env, &at, &scratch);
        while (k < i && out.reads.read[k]->capture != read->capture)
            k++;
        out.words_at[i] = k < i ? out.words_at[k] : out.bytes;
        if (k == i && out.has_words[i])
            out.bytes += words_bytes(t);
    }
    arena_free(&scratch);
    return out;
}

size_t cu_captures_workspace(const saccade_plan *plan, const saccade_sizes *sizes,
                             const plan_gradients *gradients)
{
    return gradients && cu_has_captures(&plan->problem)
               ? layout_of(plan, sizes, gradients->captures).bytes
               : 0;
}

/* ---- launches ---- */

static const cu_loaded *program_of(const cu_capture_run *x)
{
    const cu_state *s = x->plan->state;
    return &s->programs[CU_BWD_CAPTURES];
}

static int code_of(saccade_dtype dtype)
{
    return dtype == SACCADE_F32 ? 0 : dtype == SACCADE_BF16 ? 1 : 2;
}

static void fill_read(cu_capture_run *x, int i, char *room)
{
    const saccade_tensor *t = &x->g->captures[x->at.reads.read[i]->capture];
    cu_read *to = &x->of[i];
    int64_t step = 1;
    *to = (cu_read){.data = t->data, .code = code_of(t->dtype), .n = element_count(t)};
    for (int32_t d = t->rank - 1; d >= 0; d--) {
        to->stride[d] = x->at.has_words[i] ? step : t->stride[d];
        step *= t->shape[d];
    }
    if (x->at.has_words[i])
        to->words = (unsigned long long *)(void *)(room + x->at.words_at[i]);
}

/* Terms are stored without a look at what is there: no index may leave its tensor. */
static saccade_status check_inside(const cu_capture_run *x, int i, saccade_error *err)
{
    const plan_problem *p = &x->plan->problem;
    const pass_read *read = x->at.reads.read[i];
    const plan_positions *at = &x->run->positions;
    const int is_known =
        (at->q_offset.dtype == SACCADE_NONE || at->q_offset.device.kind == SACCADE_CPU)
        && (at->kv_offset.dtype == SACCADE_NONE || at->kv_offset.device.kind == SACCADE_CPU);
    int is_good = 0;
    if (is_known) {
        arena scratch;
        const saccade_sizes whole = cu_whole_sizes(x->plan, &x->run->sizes);
        const plan_position first = {
            at->q_offset.dtype == SACCADE_NONE ? 0 : *(const int32_t *)at->q_offset.data,
            at->kv_offset.dtype == SACCADE_NONE ? 0 : *(const int32_t *)at->kv_offset.data, 0};
        arena_init(&scratch);
        is_good = is_inside(p, read, &x->g->captures[read->capture], &whole, &x->run->score_env,
                            &first, &scratch);
        arena_free(&scratch);
    }
    FAIL_AT(!is_good, SACCADE_EINVAL, p->score->captures[read->capture].name, 0, 0,
            "gradient: got offsets with which an index may leave the tensor, expected ones "
            "known to the host that keep it inside");
    return SACCADE_OK;
}

/* Every element of a gradient: from its sums, or cleared. */
static saccade_status end_gradient(const cu_capture_run *x, const saccade_tensor *t,
                                   const cu_read *sums, int is_added, saccade_error *err)
{
    cu_read to =
        sums ? *sums
             : (cu_read){.data = t->data, .code = code_of(t->dtype), .n = element_count(t)};
    cu_shape shape = cu_shape_of(t);
    void *parameters[] = {&to, &shape, &is_added};
    return run_start(x->a, program_of(x)->other, (to.n + 255) / 256, 256, 0, parameters, err);
}

/* Whether batches, or heads, have elements of a read each for itself. */
static int has_own(const cu_capture_run *x, int i, int var)
{
    const saccade_sizes *s = &x->run->sizes;
    return (var == VAR_B ? s->B : s->H) == 1 || cu_read_has_own(x->at.reads.read[i], var);
}

/* How many batches and heads have elements of a read apart from each other. */
static int64_t count_own(const cu_capture_run *x, int i)
{
    const saccade_sizes *s = &x->run->sizes;
    return (has_own(x, i, VAR_B) ? s->B : 1) * (has_own(x, i, VAR_H) ? s->H : 1);
}

/* Whether terms of several scores go to an element without exact sums: CU_BWD_ELEMENTS. */
static int is_shared(const cu_capture_run *x, int i)
{
    const saccade_sizes *s = &x->run->sizes;
    return !x->at.has_words[i] && !cu_read_is_own(x->at.reads.read[i], s->B, s->H);
}

/* Whether batches or heads that have no elements of their own may have others all the same, as
 * t[h / 2, q, kv] has. */
static int may_move(const cu_capture_run *x, int i)
{
    const pass_read *read = x->at.reads.read[i];
    int varies = 0;
    for (int d = 0; d < read->rank; d++)
        varies |= read->index[d].varies;
    return (varies & DEP_B && !has_own(x, i, VAR_B))
           || (varies & DEP_H && !has_own(x, i, VAR_H));
}

/* Tiles come once, in any order: what they store has elements of its own in all of them. */
static void choose_tiles(cu_capture_run *x, int has_tiles)
{
    const cu_state *s = x->plan->state;
    for (int i = 0; i < smaller(x->at.reads.n, CU_READS) && has_tiles; i++) {
        const int kind = s->backward_facts.term[i];
        const int is_stored = kind == CU_TERM_ELEMENT;
        const int is_made = kind == CU_TERM_ROW ? x->g->d_lse == NULL : kind != CU_TERM_NONE;
        if (is_made && is_stored == !x->at.has_words[i] && !is_shared(x, i))
            x->c.in_tiles |= 1u << i;
    }
}

/* Whether terms are stored at each element of the gradient once, so that none keeps what it
 * held. Terms of a mask's other positions are stored by CU_BWD_ELEMENTS alone. */
static int is_covered(const cu_capture_run *x, int i)
{
    const saccade_sizes *s = &x->run->sizes;
    const int64_t stored = count_own(x, i) * s->Q * s->KV;
    const int is_whole =
        is_shared(x, i) ? !may_move(x, i)
                        : !x->run->block_mask && x->run->positions.kv_len.dtype == SACCADE_NONE;
    return is_whole && stored == x->of[i].n;
}

static saccade_status clear(const cu_capture_run *x, saccade_error *err)
{
    const run_args *a = x->a;
    for (int i = 0; i < x->at.reads.n; i++) {
        const saccade_tensor *t = &x->g->captures[x->at.reads.read[i]->capture];
        const cu_read *to = &x->of[i];
        if (to->words)
            TRY(cu_check(a->driver,
                         a->driver->fill32((cu_ptr)(uintptr_t)to->words, 0, words_bytes(t) / 4,
                                           a->stream),
                         "cuMemsetD32Async", err));
        else if (!x->is_added && !is_covered(x, i))
            TRY(end_gradient(x, t, NULL, 0, err));
    }
    return SACCADE_OK;
}

/* Reads that a launch makes terms of, from `first` on. */
static void take_reads(cu_capture_run *x, int first)
{
    const int n = (int)smaller(x->at.reads.n - first, CU_READS);
    memcpy(x->c.of, x->of + first, (size_t)n * sizeof *x->of);
    x->c.in_tiles = first ? 0 : x->c.in_tiles;
    x->c.elsewhere = x->c.in_tiles;
    for (int i = 0; i < n; i++)
        x->c.elsewhere |= (unsigned)is_shared(x, first + i) << i;
    x->c.first = first;
}

/* ---- tables: bwd_tables.cuh ---- */

/* The elements of read i that a head's scores may read; n is 0 where they are over room. */
static cu_table table_of(const cu_capture_run *x, int i, int64_t room)
{
    const pass_read *read = x->at.reads.read[i];
    const saccade_tensor *t = &x->g->captures[read->capture];
    cu_table out = {.rank = read->rank};
    int64_t n = 1;
    for (int d = read->rank - 1; d >= 0 && n <= room; d--)
        if (read->index[d].varies & ~(DEP_B | DEP_H)) {
            out.size[d] = (unsigned short)t->shape[d];
            out.stride[d] = (unsigned short)n;
            n *= t->shape[d];
        }
    out.n = n <= room ? (int)n : 0;
    return out;
}

enum { WORD = sizeof(int), SPARE = 16, LANES = 32, DIGITS = 3 };

/* Tables of a launch's reads whose terms nothing else sums, in so many words of shared memory;
 * tells how many they take. With two digits for three f32 would lose too much. */
static int64_t find_tables(cu_capture_run *x, int64_t room)
{
    const int fewest = x->plan->problem.dtype == SACCADE_F32 ? DIGITS : DIGITS - 1;
    const int64_t terms = smaller(BWD_ROWS * x->run->sizes.KV, UINT16_MAX);
    int64_t words = 0;
    for (int k = 0; k < CU_READS; k++) {
        const int i = x->c.first + k;
        cu_table *to = &x->tables.of[k];
        *to = (cu_table){.n = 0};
        if (i >= x->at.reads.n || x->c.elsewhere >> k & 1 || !x->at.has_words[i])
            continue;
        const pass_scatter scatter = x->at.reads.read[i]->scatter;
        if (scatter != SCATTER_GENERAL && scatter != SCATTER_ELEMENTS)
            continue;
        for (int digits = DIGITS; digits >= fewest && to->n == 0; digits--) {
            *to = table_of(x, i, smaller(terms, (room - words) / digits));
            to->digits = digits;
        }
        words += (int64_t)to->n * to->digits;
    }
    return words;
}

/* Each element has as many copies as leave room for a second CTA beside, and one at least. */
static void choose_tables(cu_capture_run *x, int base)
{
    enum { RESERVED = 1024 };
    const int most = cu_shared_most(((const cu_state *)x->plan->state)->device.sm);
    const int alone = most - base - SPARE;
    const int beside = (most + RESERVED) / 2 - RESERVED - base - SPARE;
    const int64_t words = find_tables(x, alone / WORD);
    int copies = LANES, at = 0;
    while (copies > 1 && words * copies * WORD > beside)
        copies /= 2;
    for (int k = 0; k < CU_READS; k++) {
        cu_table *to = &x->tables.of[k];
        to->copies = copies;
        to->at = at;
        at += to->n * copies * to->digits;
    }
    x->tables.bytes = (at * WORD + SPARE - 1) / SPARE * SPARE;
}

static saccade_status start_reads(cu_capture_run *x, saccade_error *err)
{
    const saccade_sizes *s = &x->run->sizes;
    const cu_loaded *program = program_of(x);
    const int sums = cu_backward_shared(x->plan->state, &x->plan->problem, &program->form);
    const int shared = (sums + SPARE - 1) / SPARE * SPARE;
    void *parameters[] = {x->p, (void *)x->a->captures, &x->c, &x->tables};
    choose_tables(x, shared);
    return run_start(x->a, program->kernel, s->B * s->H * x->p->n_mblk,
                     cu_backward_threads(&program->form), shared + x->tables.bytes, parameters,
                     err);
}

/* CTAs of fewer keys where those of all blocks are too few to go round. */
static int blocks_of(const cu_state *s, const cu_form *form, int64_t rows, int64_t keys)
{
    int blocks = form->backward.blocks;
    while (blocks > 1
           && rows * ((keys - 1) / ((int64_t)blocks * form->backward.rows) + 1)
                  < 2 * s->device.n_sm)
        blocks /= 2;
    return blocks;
}

/* One read whose elements several batches or heads share. */
static saccade_status start_elements(cu_capture_run *x, int i, saccade_error *err)
{
    const cu_state *state = x->plan->state;
    const saccade_sizes *s = &x->run->sizes;
    const cu_loaded *program = &state->programs[CU_BWD_ELEMENTS];
    const int shared = cu_backward_shared(state, &x->plan->problem, &program->form);
    cu_elements c = {.to = x->of[i],
                     .read = i,
                     .has_batches = has_own(x, i, VAR_B),
                     .has_heads = has_own(x, i, VAR_H),
                     .may_move = may_move(x, i)};
    void *parameters[] = {x->p, (void *)x->a->captures, &c};
    const int64_t rows = count_own(x, i) * x->p->n_mblk;
    c.is_adding = x->is_added || c.may_move;
    c.blocks = blocks_of(state, &program->form, rows, s->KV);
    const int64_t keys = (int64_t)c.blocks * program->form.backward.rows;
    return run_start(x->a, program->kernel, rows * ((s->KV + keys - 1) / keys),
                     cu_backward_threads(&program->form), shared, parameters, err);
}

static saccade_status end_all(const cu_capture_run *x, saccade_error *err)
{
    uint64_t done = 0;
    for (int i = 0; i < x->at.reads.n; i++) {
        const uint32_t capture = x->at.reads.read[i]->capture;
        if (x->of[i].words && !(done >> capture & 1))
            TRY(end_gradient(x, &x->g->captures[capture], &x->of[i], x->is_added, err));
        done |= (uint64_t)1 << capture;
    }
    for (int n = 0; n < MOD_MAX_CAPTURES && !x->is_added; n++) /* that nothing reads */
        if ((x->plan->problem.gradient_captures & ~done) >> n & 1)
            TRY(end_gradient(x, &x->g->captures[n], NULL, 0, err));
    return SACCADE_OK;
}

saccade_status cu_begin_captures(const saccade_plan *plan, const plan_run *run,
                                 const plan_gradients *g, size_t room_at, int has_tiles,
                                 const run_args *a, cu_capture_run *x, saccade_error *err)
{
    *x = (cu_capture_run){.plan = plan, .run = run, .g = g, .a = a};
    if (!cu_has_captures(&plan->problem))
        return SACCADE_OK;
    x->at = layout_of(plan, &run->sizes, g->captures);
    FAIL_AT(run->workspace_bytes < room_at + x->at.bytes, SACCADE_EINVAL, "workspace", 0, 0,
            "got %zu bytes, expected %zu, saccade_backward_workspace's: captures' gradients",
            run->workspace_bytes, room_at + x->at.bytes);
    x->is_added = x->c.is_adding = (g->added & SACCADE_GRADIENT_CAPTURES) != 0;
    for (int i = 0; i < x->at.reads.n; i++) {
        fill_read(x, i, (char *)run->workspace + room_at);
        if (!x->at.has_words[i])
            TRY(check_inside(x, i, err));
    }
    choose_tiles(x, has_tiles);
    take_reads(x, 0);
    return clear(x, err);
}

saccade_status cu_end_captures(cu_capture_run *x, cu_bwd *p, saccade_error *err)
{
    if (!cu_has_captures(&x->plan->problem))
        return SACCADE_OK;
    x->p = p;
    for (int i = 0; i < x->at.reads.n; i++)
        if (is_shared(x, i))
            TRY(start_elements(x, i, err));
    for (int first = 0; first < x->at.reads.n; first += CU_READS) {
        take_reads(x, first);
        const int64_t n = smaller(x->at.reads.n - first, CU_READS);
        if (x->c.elsewhere + 1 < 1u << n)
            TRY(start_reads(x, err));
    }
    return end_all(x, err);
}
