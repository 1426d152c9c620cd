/* Backward over keys in chunks: K and V are brought into one piece of the workspace, the other
 * kernels run over that, and what they make for each key is summed to where it lies
 * (kern/bwd_pages.cu). */
#include "cuda/backward/cuda_backward.h"
#include "cuda/run/run.h"

/* ---- workspace ---- */

/* offsets of the parts of cu_pages */
typedef struct space {
    size_t v, dk, dv, entries, own, lens, bytes;
} space;

/* Entries of a batch in runs of these sizes; size: keys of a chunk. */
static int64_t entries_of(const saccade_sizes *s, int64_t size)
{
    return (s->KV + size - 1) / size;
}

static space space_of(const plan_problem *p, const saccade_sizes *s)
{
    const size_t keys = (size_t)(s->B * s->Hkv * s->KV), D = (size_t)p->sizes.D;
    const size_t E = (size_t)p->sizes.Dv, each = saccade_dtype_bytes(p->kv_dtype);
    const int64_t entries = s->B * entries_of(s, p->page > 0 ? p->page : 1);
    space x;
    x.v = cu_aligned(keys * D * each);
    x.dk = x.v + cu_aligned(keys * E * each);
    x.dv =
        x.dk + (p->gradients & SACCADE_GRADIENT_K ? cu_aligned(keys * D * sizeof(float)) : 0);
    x.entries =
        x.dv + (p->gradients & SACCADE_GRADIENT_V ? cu_aligned(keys * E * sizeof(float)) : 0);
    x.own = x.entries + cu_aligned(2 * (size_t)entries * sizeof(uint64_t));
    x.lens = x.own + cu_aligned((size_t)entries * sizeof(int));
    x.bytes = x.lens + cu_aligned((size_t)s->B * sizeof(int));
    return x;
}

size_t cu_pages_workspace(const saccade_plan *plan, const saccade_sizes *sizes)
{
    return plan->problem.has_chunks && plan->problem.gradients
               ? space_of(&plan->problem, sizes).bytes
               : 0;
}

/* ---- the run that stands for it ---- */

/* Whether a row is whole pieces of so many elements, which lie on their size. */
static int is_even(const saccade_tensor *t, int64_t elements)
{
    int ok = t->shape[3] % elements == 0
             && (uintptr_t)t->data % ((size_t)elements * saccade_dtype_bytes(t->dtype)) == 0;
    for (int d = 0; d < 3; d++)
        ok = ok && (t->shape[d] == 1 || t->stride[d] % elements == 0);
    return ok;
}

static void place_keys(const plan_run *run, char *room, const space *at, cu_paged *out)
{
    const int64_t piece = 16 / (int64_t)saccade_dtype_bytes(run->k->dtype);
    out->k = run_in_one_piece(run, room, run->k->dtype, run->k->shape[3]);
    out->v = run_in_one_piece(run, room + at->v, run->v->dtype, run->v->shape[3]);
    out->run.k = &out->k;
    out->run.v = &out->v;
    out->run.chunks = NULL;
    out->x.k = out->k.data;
    out->x.v = out->v.data;
    out->x.is_even = is_even(run->k, piece) && is_even(run->v, piece);
    if (!run->positions.pages)
        return;
    const int64_t shape[1] = {run->sizes.B};
    out->kv_len = saccade_tensor_of(room + at->lens, SACCADE_I32, 1, shape);
    out->kv_len.device = run->k->device;
    out->run.positions.kv_len = out->kv_len;
    out->run.positions.pages = NULL;
    out->x.lens = out->kv_len.data;
}

/* A gradient of each key in place of one of what chunks name. */
static const saccade_tensor *place_result(const plan_run *run, const saccade_tensor *t,
                                          void *data, uint32_t bit, saccade_tensor *each,
                                          cu_paged *out)
{
    if (!t)
        return NULL;
    *each = run_in_one_piece(run, data, SACCADE_F32, t->shape[3]);
    out->g.added &= ~bit;
    out->x.even_results |= is_even(t, 4) ? (int)bit : 0;
    return each;
}

/* Whether tiles store a gradient where it lies: each head has a place of its own. */
static int takes_tiles(const saccade_tensor *t)
{
    return !t || (run_has_aligned_rows(t) && (t->stride[1] || t->shape[1] == 1));
}

/* p: of the run over chunks. */
static void place_own(const plan_run *run, const plan_gradients *g, const cu_bwd *p, int *room,
                      cu_paged *out)
{
    if (!run->chunks->is_paged || !takes_tiles(g->dk) || !takes_tiles(g->dv))
        return;
    out->x.own = room;
    out->own = (cu_own){.page = room,
                        .per_batch = (int)out->x.per_batch,
                        .size = p->f.chunks.size,
                        .shift = p->f.chunks.shift,
                        .wide = p->wide,
                        .added = p->added,
                        .dk = p->dk,
                        .dv = p->dv,
                        .dks = p->dks,
                        .dvs = p->dvs};
}

saccade_status cu_pages_place(const saccade_plan *plan, const plan_run *run,
                              const plan_gradients *g, const cu_bwd *p, void *room,
                              cu_paged *out, saccade_error *err)
{
    const space at = space_of(&plan->problem, &run->sizes);
    const int64_t per_batch = entries_of(&run->sizes, run->chunks->size);
    const int64_t n = run->sizes.B * per_batch;
    FAIL_AT(n > INT32_MAX, SACCADE_ELIMIT, "pages", 0, 0,
            "got %lld entries with keys, expected at most 2^31 - 1 where gradients are wanted",
            (long long)n);
    *out = (cu_paged){.run = *run, .g = *g};
    place_keys(run, room, &at, out);
    out->g.dk =
        place_result(run, g->dk, (char *)room + at.dk, SACCADE_GRADIENT_K, &out->dk, out);
    out->g.dv =
        place_result(run, g->dv, (char *)room + at.dv, SACCADE_GRADIENT_V, &out->dv, out);
    out->x.dk = g->dk ? out->dk.data : NULL;
    out->x.dv = g->dv ? out->dv.data : NULL;
    out->x.entries = (unsigned long long *)(void *)((char *)room + at.entries);
    out->x.n = g->dk || g->dv ? (unsigned)n : 0;
    out->x.per_batch = (unsigned)per_batch;
    out->x.rows = (int)run->k->shape[2];
    place_own(run, g, p, (int *)(void *)((char *)room + at.own), out);
    return SACCADE_OK;
}

/* ---- launches ---- */

/* Kernels count to 2^32 in steps of up to 64. */
static saccade_status check_grid(int64_t grid, saccade_error *err)
{
    FAIL_AT(grid > UINT32_MAX / 64, SACCADE_ELIMIT, "pages", 0, 0,
            "got keys for %lld blocks of threads, expected at most 2^26 - 1", (long long)grid);
    return SACCADE_OK;
}

saccade_status cu_pages_begin(const cu_paged *paged, const cu_loaded *program, cu_bwd *p,
                              const run_args *a, saccade_error *err)
{
    const saccade_sizes *s = &paged->run.sizes;
    const int64_t grid = 1 + s->B * s->Hkv * ((s->KV + PAGES_ROWS - 1) / PAGES_ROWS);
    cu_pages x = paged->x;
    void *parameters[] = {p, &x};
    TRY(check_grid(grid, err));
    return run_start(a, program->kernel, grid, PAGES_COPIERS, 0, parameters, err);
}

/* CTAs over the rows of a gradient. */
static int64_t blocks_of(const saccade_tensor *t, const plan_chunks *chunks)
{
    enum { WARPS = PAGES_THREADS / 32 };
    if (!t)
        return 0;
    const int64_t pools = chunks->is_paged || t->stride[0] ? t->shape[0] : 1;
    const int64_t heads = t->stride[1] ? t->shape[1] : 1;
    const int64_t parts = (t->shape[2] + PAGES_SUMS - 1) / PAGES_SUMS;
    return (parts * heads * pools + WARPS - 1) / WARPS;
}

saccade_status cu_pages_end(const cu_paged *paged, const plan_run *run, const plan_gradients *g,
                            const cu_loaded *program, cu_bwd *p, const run_args *a,
                            saccade_error *err)
{
    const int64_t keys = blocks_of(g->dk, run->chunks);
    const int64_t grid = keys + blocks_of(g->dv, run->chunks);
    cu_pages x = paged->x;
    void *parameters[] = {p, &x};
    TRY(check_grid(grid, err));
    x.key_blocks = (int)keys;
    return grid ? run_start(a, program->other, grid, PAGES_THREADS, 0, parameters, err)
                : SACCADE_OK;
}
