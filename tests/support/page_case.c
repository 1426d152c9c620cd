/* Problems whose keys lie in pages: see page_case.h. */
#include "support/page_case.h"

#include "base/convert.h"
#include "support/forward_case.h"
#include "support/problem_case.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

static uint64_t seed;
static uint32_t below(uint32_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((seed >> 33) % n);
}

void page_fill(const saccade_tensor *t, int64_t n, int is_nan)
{
    const size_t each = saccade_dtype_bytes(t->dtype);
    for (int64_t i = 0; i < n; i++) {
        const float x = is_nan ? NAN : (float)below(4001) / 1000 - 2;
        convert_from_f32(t->dtype, &x, (char *)t->data + (size_t)i * each, 1);
    }
}

saccade_tensor page_tensor(saccade_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d,
                                int is_nan)
{
    const int64_t shape[] = {a, b, c, d};
    saccade_tensor t = saccade_tensor_of(NULL, dtype, 4, shape);
    t.data = malloc((size_t)(a * b * c * d) * saccade_dtype_bytes(dtype));
    assert_non_null(t.data);
    page_fill(&t, a * b * c * d, is_nan);
    return t;
}

char *page_row(const saccade_tensor *t, int64_t a, int64_t h, int64_t n)
{
    const int64_t at = a * t->stride[0] + h * t->stride[1] + n * t->stride[2];
    return (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype);
}

int page_is_list(const page_run *r)
{
    return r->c->form == LAST_PAGES || r->c->form == LISTED;
}

/* ---- pools ---- */

/* Memory that ends where nothing can be read. */
static void *guarded(page_run *r, size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    r->mapped_bytes = whole + page;
    r->mapped = mmap(NULL, r->mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                     -1, 0);
    assert_true(r->mapped != MAP_FAILED);
    assert_int_equal(mprotect((char *)r->mapped + whole, page, PROT_NONE), 0);
    return (char *)r->mapped + whole - bytes;
}

/* K and V in one piece of memory, in the order of the case's layout. */
static void make_pools(page_run *r)
{
    const saccade_sizes *s = &r->sizes;
    const int64_t P = r->pages, p = r->c->page, H = s->Hkv, D = s->D, E = s->Dv;
    const int64_t k[4] = {P, H, p, D}, v[4] = {P, H, p, E};
    const int64_t n = r->c->layout == VIEW ? P * p * H * D : P * p * H * (D + E);
    char *data = guarded(r, (size_t)n * saccade_dtype_bytes(r->dtype));
    const size_t each = saccade_dtype_bytes(r->dtype);
    r->pool_k = saccade_tensor_of(data, r->dtype, 4, k);
    r->pool_v = saccade_tensor_of(data + (size_t)(P * p * H * D) * each, r->dtype, 4, v);
    page_fill(&r->pool_k, n, 1);
    if (r->c->layout == NHD) {
        memcpy(r->pool_k.stride, (int64_t[]){p * H * D, D, H * D, 1}, sizeof k);
        memcpy(r->pool_v.stride, (int64_t[]){p * H * E, E, H * E, 1}, sizeof v);
    } else if (r->c->layout == BOTH) { /* K beside V in each row */
        r->pool_v.data = data + (size_t)D * each;
        memcpy(r->pool_k.stride, (int64_t[]){p * H * (D + E), D + E, H * (D + E), 1}, sizeof k);
        memcpy(r->pool_v.stride, r->pool_k.stride, sizeof v);
    } else if (r->c->layout == VIEW) {
        r->pool_v.data = data;
        memcpy(r->pool_v.stride, r->pool_k.stride, sizeof v);
    }
}

/* What a chunk's entry counts: rows of a pool seen as one batch, for all batches. */
static void as_chunks(page_run *r, saccade_tensor *t)
{
    const int64_t rows = t->shape[0] * t->shape[2];
    assert_true(t->stride[0] == t->shape[2] * t->stride[2]); /* NHD and BOTH */
    t->shape[0] = r->sizes.B;
    t->shape[2] = rows;
    t->stride[0] = 0;
}

static void make_table(page_run *r)
{
    const int32_t page = r->c->page, B = (int32_t)r->sizes.B;
    int32_t order[PAGE_MOST_ENTRIES], used = 0;
    r->most = (int32_t)((r->sizes.KV + page - 1) / page);
    r->pages = 2 * B * r->most;
    assert_true(r->pages <= PAGE_MOST_ENTRIES);
    for (int32_t i = 0; i < r->pages; i++)
        order[i] = i;
    for (int32_t i = r->pages - 1; i > 0; i--) {
        const int32_t j = (int32_t)below((uint32_t)i + 1), held = order[i];
        order[i] = order[j];
        order[j] = held;
    }
    for (int32_t b = 0; b < B; b++) {
        const int32_t n = (r->len[b] + page - 1) / page;
        const int is_list = page_is_list(r);
        int32_t *row = is_list ? r->table + r->n_entries : r->table + b * r->most;
        r->indptr[b] = r->n_entries;
        r->last[b] = n ? r->len[b] - (n - 1) * page : 0;
        for (int32_t i = 0; i < n; i++) {
            row[i] = order[r->c->is_shared ? (int32_t)below(5) : used++];
            if ((i + 1) * page <= r->c->dead)
                row[i] = -1;
        }
        for (int32_t i = n; i < r->most && !is_list; i++)
            row[i] = (int32_t)below(UINT32_MAX); /* never read */
        r->n_entries += n;
    }
    r->indptr[B] = r->n_entries;
}

/* Random values in the pool's rows that keys lie in; the same keys in one piece, zeros where a
 * page is absent and NaN past lengths. */
static void copy_keys(page_run *r, const saccade_tensor *pool, const saccade_tensor *to,
                      int is_filled)
{
    const size_t each = saccade_dtype_bytes(r->dtype), bytes = (size_t)to->shape[3] * each;
    const int is_list = page_is_list(r);
    for (int64_t b = 0; b < r->sizes.B; b++)
        for (int64_t h = 0; h < r->sizes.Hkv; h++)
            for (int32_t j = 0; j < r->len[b]; j++) {
                const int32_t *row = r->table + (is_list ? r->indptr[b] : b * r->most);
                const int32_t entry = row[j / r->c->page];
                char *at = page_row(to, b, h, j);
                memset(at, 0, bytes);
                if (entry < 0)
                    continue;
                saccade_tensor from = *pool;
                from.data = page_row(pool, entry, h, j % r->c->page);
                if (is_filled)
                    page_fill(&from, pool->shape[3], 0);
                memcpy(at, from.data, bytes);
            }
}

void page_make(page_run *r, const page_case *c)
{
    memset(r, 0, sizeof *r);
    r->c = c;
    seed = 77 + (uint64_t)c->page * 131 + (uint64_t)c->form * 7 + (uint64_t)c->layout;
    problem_case(c->problem, &r->sizes, &r->dtype);
    const saccade_sizes *s = &r->sizes;
    assert_true(s->B <= PAGE_MOST_B);
    for (int64_t b = 0; b < s->B; b++)
        r->len[b] = (int32_t)(b == 0   ? s->KV
                              : b == 2 ? 0
                                       : 1 + (int32_t)below((uint32_t)s->KV));
    make_table(r);
    make_pools(r);
    r->q = page_tensor(r->dtype, s->B, s->H, s->Q, s->D, 0);
    r->d_out = page_tensor(r->dtype, s->B, s->H, s->Q, s->Dv, 0);
    r->k = page_tensor(r->dtype, s->B, s->Hkv, s->KV, s->D, 1);
    r->v = page_tensor(r->dtype, s->B, s->Hkv, s->KV, s->Dv, 1);
    copy_keys(r, &r->pool_k, &r->k, 1); /* rows named twice are filled twice: */
    copy_keys(r, &r->pool_v, &r->v, c->layout != VIEW);
    copy_keys(r, &r->pool_k, &r->k, 0); /* copied as they came to be */
    copy_keys(r, &r->pool_v, &r->v, 0);

    const int64_t shape[2] = {s->B, r->most}, list[1] = {r->n_entries}, B1[1] = {s->B + 1};
    const int is_list = page_is_list(r);
    r->tables = saccade_tensor_of(r->table, SACCADE_I32, is_list ? 1 : 2,
                                  is_list ? list : shape);
    r->lens = saccade_tensor_of(r->len, SACCADE_I32, 1, shape);
    r->starts = saccade_tensor_of(r->indptr, SACCADE_I32, 1, B1);
    r->lasts = saccade_tensor_of(r->last, SACCADE_I32, 1, shape);
    saccade_pages_init(&r->at);
    saccade_positions_init(&r->whole_at);
    saccade_positions_init(&r->pool_at);
    r->whole_at.kv_len = &r->lens;
    r->at.table = &r->tables;
    r->at.KV = s->KV;
    if (is_list)
        r->at.indptr = &r->starts;
    if (c->form == LAST_PAGES)
        r->at.last_page_len = &r->lasts;
    else
        r->pool_at.kv_len = &r->lens;
    if (c->form == CHUNKS) {
        r->at.chunk = c->page;
        for (int32_t i = 0; i < s->B * r->most; i++) /* pages' first rows */
            if (i % r->most < (r->len[i / r->most] + c->page - 1) / c->page && r->table[i] > 0)
                r->table[i] *= c->page;
        as_chunks(r, &r->pool_k);
        as_chunks(r, &r->pool_v);
    }
}

void page_free(page_run *r)
{
    free(r->q.data);
    free(r->d_out.data);
    free(r->k.data);
    free(r->v.data);
    munmap(r->mapped, r->mapped_bytes);
}

saccade_plan *page_plan(const page_run *r, int is_paged)
{
    saccade_error err = {0};
    saccade_problem p;
    saccade_context_options options;
    saccade_context *context;
    saccade_plan *plan = NULL;
    saccade_problem_init(&p);
    saccade_context_options_init(&options);
    options.level = r->c->level;
    options.threads = 2;
    p.sizes = r->sizes;
    p.dtype = r->dtype;
    p.backend = r->c->backend;
    p.gradients = r->c->gradients;
    saccade_mod *mask = r->c->mask ? case_mod(SACCADE_MASK, r->c->mask) : NULL;
    saccade_mod *score = r->c->score ? case_mod(SACCADE_SCORE, r->c->score) : NULL;
    p.mask = mask;
    p.score = score;
    p.page = !is_paged ? 0 : r->c->is_known ? r->c->page : SACCADE_PAGE_ANY;
    if (saccade_context_create(&options, &context, &err)
        || saccade_plan_create(context, &p, &plan, &err))
        fail_msg("%s: %s", r->c->problem, err.message);
    saccade_context_destroy(context);
    saccade_mod_destroy(mask);
    saccade_mod_destroy(score);
    return plan;
}

