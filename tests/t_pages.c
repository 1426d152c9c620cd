/* Keys in pages through the public interface against the same keys in one piece, bit for bit:
 * every form of table, layouts of pools, any size and order of pages, pages that several rows
 * or one row twice names, garbage behind lengths, NaN wherever no key lies, a page that cannot
 * be read behind the pool. */
#include "saccade.h"

#include "base/convert.h"
#include "support/forward_case.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

typedef enum form { TABLE, LAST_PAGES, LISTED, CHUNKS, FORMS } form;
typedef enum layout { NHD, HND, BOTH, VIEW, LAYOUTS } layout;

typedef struct page_case {
    const char *problem, *mask, *score, *backend, *level;
    int32_t page;
    form form;
    layout layout;
    int is_shared;   /* entries name any page; else each page once */
    int is_known;    /* the problem names the page size */
    int32_t dead;    /* keys before this one are live in no row: their pages are absent */
    uint32_t gradients;
} page_case;

enum { MOST_B = 4, MOST_ENTRIES = 8192 };

/* A problem twice: keys in one piece, and in a pool. */
typedef struct page_run {
    const page_case *c;
    saccade_sizes sizes;
    saccade_dtype dtype;
    int32_t len[MOST_B], indptr[MOST_B + 1], last[MOST_B], table[MOST_ENTRIES];
    int32_t most, pages, n_entries;
    saccade_tensor q, k, v, d_out;         /* k, v: in one piece */
    saccade_tensor pool_k, pool_v, lens, tables, starts, lasts;
    void *mapped;
    size_t mapped_bytes;
    saccade_pages at;
    saccade_positions whole_at, pool_at;
} page_run;

static uint64_t seed;
static uint32_t below(uint32_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((seed >> 33) % n);
}

static void fill(const saccade_tensor *t, int64_t n, int is_nan)
{
    const size_t each = saccade_dtype_bytes(t->dtype);
    for (int64_t i = 0; i < n; i++) {
        const float x = is_nan ? NAN : (float)below(4001) / 1000 - 2;
        convert_from_f32(t->dtype, &x, (char *)t->data + (size_t)i * each, 1);
    }
}

static saccade_tensor tensor_of(saccade_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d,
                                int is_nan)
{
    const int64_t shape[] = {a, b, c, d};
    saccade_tensor t = saccade_tensor_of(NULL, dtype, 4, shape);
    t.data = malloc((size_t)(a * b * c * d) * saccade_dtype_bytes(dtype));
    assert_non_null(t.data);
    fill(&t, a * b * c * d, is_nan);
    return t;
}

static char *row_at(const saccade_tensor *t, int64_t a, int64_t h, int64_t n)
{
    const int64_t at = a * t->stride[0] + h * t->stride[1] + n * t->stride[2];
    return (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype);
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
    fill(&r->pool_k, n, 1);
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
    int32_t order[MOST_ENTRIES], used = 0;
    r->most = (int32_t)((r->sizes.KV + page - 1) / page);
    r->pages = 2 * B * r->most;
    assert_true(r->pages <= MOST_ENTRIES);
    for (int32_t i = 0; i < r->pages; i++)
        order[i] = i;
    for (int32_t i = r->pages - 1; i > 0; i--) {
        const int32_t j = (int32_t)below((uint32_t)i + 1), held = order[i];
        order[i] = order[j];
        order[j] = held;
    }
    for (int32_t b = 0; b < B; b++) {
        const int32_t n = (r->len[b] + page - 1) / page;
        const int is_list = r->c->form == LAST_PAGES || r->c->form == LISTED;
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
    const int is_list = r->c->form == LAST_PAGES || r->c->form == LISTED;
    for (int64_t b = 0; b < r->sizes.B; b++)
        for (int64_t h = 0; h < r->sizes.Hkv; h++)
            for (int32_t j = 0; j < r->len[b]; j++) {
                const int32_t *row = r->table + (is_list ? r->indptr[b] : b * r->most);
                const int32_t entry = row[j / r->c->page];
                char *at = row_at(to, b, h, j);
                memset(at, 0, bytes);
                if (entry < 0)
                    continue;
                saccade_tensor from = *pool;
                from.data = row_at(pool, entry, h, j % r->c->page);
                if (is_filled)
                    fill(&from, pool->shape[3], 0);
                memcpy(at, from.data, bytes);
            }
}

static void make_run(page_run *r, const page_case *c)
{
    saccade_error err;
    memset(r, 0, sizeof *r);
    r->c = c;
    seed = 77 + (uint64_t)c->page * 131 + (uint64_t)c->form * 7 + (uint64_t)c->layout;
    if (plan_parse_problem(c->problem, &r->sizes, &r->dtype, &err))
        fail_msg("%s", err.message);
    const saccade_sizes *s = &r->sizes;
    assert_true(s->B <= MOST_B);
    for (int64_t b = 0; b < s->B; b++)
        r->len[b] = (int32_t)(b == 0   ? s->KV
                              : b == 2 ? 0
                                       : 1 + (int32_t)below((uint32_t)s->KV));
    make_table(r);
    make_pools(r);
    r->q = tensor_of(r->dtype, s->B, s->H, s->Q, s->D, 0);
    r->d_out = tensor_of(r->dtype, s->B, s->H, s->Q, s->Dv, 0);
    r->k = tensor_of(r->dtype, s->B, s->Hkv, s->KV, s->D, 1);
    r->v = tensor_of(r->dtype, s->B, s->Hkv, s->KV, s->Dv, 1);
    copy_keys(r, &r->pool_k, &r->k, 1); /* rows named twice are filled twice: */
    copy_keys(r, &r->pool_v, &r->v, c->layout != VIEW);
    copy_keys(r, &r->pool_k, &r->k, 0); /* copied as they came to be */
    copy_keys(r, &r->pool_v, &r->v, 0);

    const int64_t shape[2] = {s->B, r->most}, list[1] = {r->n_entries}, B1[1] = {s->B + 1};
    const int is_list = c->form == LAST_PAGES || c->form == LISTED;
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

static void free_run(page_run *r)
{
    free(r->q.data);
    free(r->d_out.data);
    free(r->k.data);
    free(r->v.data);
    munmap(r->mapped, r->mapped_bytes);
}

/* ---- runs ---- */

typedef struct results {
    saccade_tensor out, lse, dq, dk, dv;
} results;

static void drop(results *x)
{
    saccade_tensor *const all[] = {&x->out, &x->lse, &x->dq, &x->dk, &x->dv};
    for (int i = 0; i < 5; i++)
        free(all[i]->data);
}

static saccade_plan *plan_of(const page_run *r, int is_paged)
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

static void *workspace_of(size_t bytes)
{
    void *room = aligned_alloc(64, (bytes + 64) / 64 * 64);
    assert_non_null(room);
    memset(room, 0xff, (bytes + 64) / 64 * 64);
    return room;
}

static saccade_tensor lse_of(const page_run *r)
{
    const saccade_sizes *s = &r->sizes;
    saccade_tensor t = tensor_of(SACCADE_F32, s->B, s->H, s->Q, 1, 1);
    t.rank = 3;
    return t;
}

/* Gradients of pools have no two heads or rows in one place, whatever K's and V's strides. */
static saccade_tensor like(const saccade_tensor *t)
{
    saccade_tensor x = tensor_of(SACCADE_F32, t->shape[0], t->shape[1], t->shape[2],
                                 t->shape[3], 1);
    if (t->stride[0] == 0)
        x.stride[0] = 0;
    return x;
}

static void run_backward(const page_run *r, const saccade_plan *plan,
                         const saccade_forward_args *f, results *x)
{
    saccade_error err = {0};
    saccade_backward_args a;
    saccade_backward_args_init(&a);
    a.q = f->q;
    a.k = f->k;
    a.v = f->v;
    a.out = f->out;
    a.lse = f->lse;
    a.positions = f->positions;
    a.pages = f->pages;
    a.d_out = &r->d_out;
    x->dq = tensor_of(SACCADE_F32, r->q.shape[0], r->q.shape[1], r->q.shape[2], r->q.shape[3],
                      1);
    x->dk = like(f->k);
    x->dv = like(f->v);
    a.d_q = &x->dq;
    a.d_k = &x->dk;
    a.d_v = &x->dv;
    if (saccade_backward_workspace(plan, &a, &a.workspace_bytes, &err))
        fail_msg("%s: %s", r->c->problem, err.message);
    a.workspace = workspace_of(a.workspace_bytes);
    if (saccade_backward(plan, &a, &err))
        fail_msg("%s: %s: %s", r->c->problem, err.where, err.message);
    free(a.workspace);
}

static results run_once(const page_run *r, int is_paged)
{
    const saccade_sizes *s = &r->sizes;
    saccade_error err = {0};
    saccade_forward_args a;
    results x = {.out = tensor_of(r->dtype, s->B, s->H, s->Q, s->Dv, 1), .lse = lse_of(r)};
    saccade_plan *plan = plan_of(r, is_paged);
    saccade_forward_args_init(&a);
    a.q = &r->q;
    a.k = is_paged ? &r->pool_k : &r->k;
    a.v = is_paged ? &r->pool_v : &r->v;
    a.out = &x.out;
    a.lse = &x.lse;
    a.positions = is_paged ? &r->pool_at : &r->whole_at;
    a.pages = is_paged ? &r->at : NULL;
    a.workspace_bytes = saccade_plan_workspace(plan, s);
    a.workspace = workspace_of(a.workspace_bytes);
    if ((is_paged && saccade_pages_check(plan, &a, &err)) || saccade_forward(plan, &a, &err))
        fail_msg("%s: %s: %s", r->c->problem, err.where, err.message);
    free(a.workspace);
    if (r->c->gradients)
        run_backward(r, plan, &a, &x);
    saccade_plan_destroy(plan);
    return x;
}

/* ---- comparison ---- */

static void same(const page_run *r, const saccade_tensor *a, const saccade_tensor *b,
                 const char *what)
{
    size_t bytes = saccade_dtype_bytes(a->dtype);
    for (int32_t d = 0; d < a->rank; d++)
        bytes *= (size_t)a->shape[d];
    if (memcmp(a->data, b->data, bytes))
        fail_msg("%s differs: --problem \"%s\" pages of %d, form %d, layout %d, %s %s", what,
                 r->c->problem, r->c->page, r->c->form, r->c->layout, r->c->backend,
                 r->c->level ? r->c->level : "");
}

/* A pool's gradient is the sum over all places that name a row, 0 where none does. */
static void same_sums(const page_run *r, const saccade_tensor *each, const saccade_tensor *pool,
                      const char *what)
{
    const int is_list = r->c->form == LAST_PAGES || r->c->form == LISTED;
    const int is_chunks = r->c->form == CHUNKS;
    const int64_t page = r->c->page, dim = pool->shape[3], H = r->sizes.Hkv;
    const int64_t rows = is_chunks ? pool->shape[2] : pool->shape[0] * page;
    double *sums = calloc((size_t)(rows * H * dim), sizeof *sums);
    assert_non_null(sums);
    for (int64_t b = 0; b < r->sizes.B; b++)
        for (int64_t j = 0; j < r->len[b]; j++) {
            const int32_t *row = r->table + (is_list ? r->indptr[b] : b * r->most);
            const int64_t entry = row[j / page];
            const int64_t at = (is_chunks ? entry : entry * page) + j % page;
            for (int64_t h = 0; h < H && entry >= 0; h++)
                for (int64_t d = 0; d < dim; d++)
                    sums[(at * H + h) * dim + d] +=
                        (double)((const float *)(void *)row_at(each, b, h, j))[d];
        }
    for (int64_t at = 0; at < rows; at++)
        for (int64_t h = 0; h < H; h++)
            for (int64_t d = 0; d < dim; d++) {
                const float got = ((const float *)(void *)row_at(
                    pool, is_chunks ? 0 : at / page, h, is_chunks ? at : at % page))[d];
                const double x = sums[(at * H + h) * dim + d];
                if (!(fabs((double)got - x) <= 1e-6 * (r->c->is_shared ? 1 + fabs(x) : 0)
                                                   + fabs((double)(float)x - x)))
                    fail_msg("%s row %lld: got %g, expected %g: %s pages of %d", what,
                             (long long)at, (double)got, x, r->c->problem, r->c->page);
            }
    free(sums);
}

static void check(const page_case *c)
{
    page_run r;
    make_run(&r, c);
    results whole = run_once(&r, 0), paged = run_once(&r, 1);
    same(&r, &whole.out, &paged.out, "out");
    same(&r, &whole.lse, &paged.lse, "lse");
    if (c->gradients) {
        same(&r, &whole.dq, &paged.dq, "d_q");
        same_sums(&r, &whole.dk, &paged.dk, "d_k");
        same_sums(&r, &whole.dv, &paged.dv, "d_v");
    }
    drop(&whole);
    drop(&paged);
    free_run(&r);
}

/* ---- tests ---- */

static const int32_t sizes[] = {1, 3, 16, 64, 100};
enum { SIZES = sizeof sizes / sizeof *sizes };

static void every_form_and_layout(void **state)
{
    (void)state;
    for (int f = 0; f < FORMS; f++)
        for (int l = 0; l < LAYOUTS; l++)
            for (int n = 0; n < SIZES; n++) {
                page_case c = {.problem = "b4 h4/2 q5 kv150 d24 dv16 f32",
                               .backend = n % 2 ? "plain" : "ref",
                               .mask = "kv <= q + 120",
                               .page = sizes[n],
                               .form = (form)f,
                               .layout = (layout)l,
                               .is_shared = n % 3 == 0,
                               .is_known = n % 2};
                if (f == CHUNKS && (l == HND || l == VIEW))
                    continue; /* rows that do not follow each other by one stride */
                check(&c);
                c.backend = "cpu";
                check(&c);
            }
}

static void at_every_level(void **state)
{
    static const char *const problems[] = {
        "b3 h4/2 q70 kv333 d40 dv24 f32", "b2 h2 q130 kv300 d64 bf16",
        "b2 h8/2 q1 kv400 d64 bf16",      "b2 h4/1 q2 kv310 d64 f32",
        "b2 h4/1 q1 kv310 d40 f16",       "b3 h2 q40 kv700 d128 f16"};
    (void)state;
    for (size_t p = 0; p < sizeof problems / sizeof *problems; p++)
        for (int n = 0; n < SIZES; n++)
            for (const char *const *level = case_levels(); *level; level++) {
                page_case c = {.problem = problems[p],
                               .backend = "cpu",
                               .level = *level,
                               .page = sizes[n],
                               .layout = n % 2 ? NHD : HND,
                               .is_shared = (int)p % 2};
                check(&c);
                c.mask = "kv <= q + 280";
                c.score = "alibi()";
                c.form = LAST_PAGES;
                check(&c);
            }
}

static void gradients(void **state)
{
    const uint32_t all = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    (void)state;
    for (int f = 0; f < FORMS; f++)
        for (int n = 0; n < SIZES; n++) {
            page_case c = {.problem = "b3 h4/2 q33 kv150 d24 dv16 f32",
                           .backend = "cpu",
                           .mask = "kv <= q + 120",
                           .page = sizes[n],
                           .form = (form)f,
                           .layout = n % 2 || f == CHUNKS ? NHD : HND,
                           .is_shared = n % 2,
                           .gradients = all};
            check(&c);
            if (f == n % FORMS) {
                c.backend = "ref";
                check(&c);
                c.backend = "cpu";
                c.problem = "b2 h2 q40 kv200 d32 bf16";
                check(&c);
            }
        }
}

static void absent_where_nothing_is_live(void **state)
{
    (void)state;
    for (int n = 0; n < SIZES; n++) {
        check(&(page_case){.problem = "b2 h2 q40 kv300 d32 f32",
                           .backend = "cpu",
                           .mask = "kv >= 200",
                           .page = sizes[n],
                           .dead = 200});
        check(&(page_case){.problem = "b2 h2 q1 kv600 d64 bf16",
                           .backend = "cpu",
                           .mask = "kv >= 500 && (q + kv) % 3 != 1",
                           .page = sizes[n],
                           .form = LAST_PAGES,
                           .dead = 500});
    }
}

/* ---- untrusted tables ---- */

static saccade_status run_bad(const page_run *r, const saccade_plan *plan, int is_check,
                              saccade_error *err)
{
    saccade_forward_args a;
    const saccade_sizes *s = &r->sizes;
    saccade_tensor out = tensor_of(r->dtype, s->B, s->H, s->Q, s->Dv, 1);
    saccade_forward_args_init(&a);
    a.q = &r->q;
    a.k = &r->pool_k;
    a.v = &r->pool_v;
    a.out = &out;
    a.positions = &r->pool_at;
    a.pages = &r->at;
    a.workspace_bytes = saccade_plan_workspace(plan, &r->sizes);
    a.workspace = workspace_of(a.workspace_bytes);
    const saccade_status status =
        is_check ? saccade_pages_check(plan, &a, err) : saccade_forward(plan, &a, err);
    free(a.workspace);
    free(out.data);
    return status;
}

static void entries_that_lead_out(void **state)
{
    static const int32_t bad[] = {INT32_MAX, INT32_MIN, -2, 1 << 20, 1000};
    static const char *const backends[] = {"cpu", "ref", "plain"};
    (void)state;
    for (int f = 0; f < FORMS; f++)
        for (int i = 0; i < 5; i++)
            for (int e = 0; e < 3; e++) {
                const page_case c = {.problem = "b2 h2 q3 kv150 d64 f32",
                                     .backend = backends[e],
                                     .page = 16,
                                     .form = (form)f};
                page_run r;
                saccade_error err;
                make_run(&r, &c);
                fill(&(saccade_tensor){.data = r.pool_k.data, .dtype = r.dtype},
                     r.pages * 16 * 2 * 128, 0);
                saccade_plan *plan = plan_of(&r, 1);
                assert_int_equal(run_bad(&r, plan, 1, &err), SACCADE_OK);
                r.table[3] = bad[i];
                assert_int_equal(run_bad(&r, plan, 0, &err), SACCADE_OK);
                assert_int_equal(run_bad(&r, plan, 1, &err), SACCADE_EVALUE);
                assert_non_null(strstr(err.message, "entry 3 of batch 0"));
                saccade_plan_destroy(plan);
                free_run(&r);
            }
}

static void expect(const page_run *r, const saccade_plan *plan, const char *where,
                   const char *what)
{
    saccade_error err = {0};
    assert_int_equal(run_bad(r, plan, 0, &err), SACCADE_EINVAL);
    assert_string_equal(err.where, where);
    if (!strstr(err.message, what))
        fail_msg("got '%s', expected '%s' in it", err.message, what);
}

static void one_clear_line(void **state)
{
    const page_case c = {.problem = "b2 h2 q3 kv150 d16 f32",
                         .backend = "cpu",
                         .page = 16,
                         .form = LAST_PAGES,
                         .is_known = 1};
    page_run r;
    (void)state;
    make_run(&r, &c);
    saccade_plan *plan = plan_of(&r, 1), *whole = plan_of(&r, 0);
    const page_run good = r;
    expect(&r, whole, "pages", "got some, expected none");
    r.tables.dtype = SACCADE_I64;
    expect(&r, plan, "table", "got dtype i64, expected i32");
    r = good;
    r.indptr[1] = r.indptr[2] + 1;
    expect(&r, plan, "indptr", "expected no less");
    r = good;
    r.at.indptr = &r.starts;
    r.starts.data = r.indptr;
    r.indptr[2] = r.n_entries + 1;
    expect(&r, plan, "indptr", "entries");
    r = good;
    r.at.last_page_len = NULL;
    expect(&r, plan, "last_page_len", "got neither");
    r = good;
    r.pool_at.kv_len = &r.lens;
    expect(&r, plan, "last_page_len", "expected one of them");
    r = good;
    r.at.KV = 100;
    expect(&r, plan, "pages.KV", "expected 150 or more");
    r = good;
    r.pool_k.shape[2] = r.pool_v.shape[2] = 8;
    expect(&r, plan, "page", "got 8 keys, expected 16, the problem's page");
    r = good;
    r.tables.device.kind = SACCADE_CUDA;
    expect(&r, plan, "table", "got a tensor on a GPU");
    saccade_plan_destroy(plan);
    saccade_plan_destroy(whole);
    r = good;
    free_run(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_form_and_layout),
        cmocka_unit_test(at_every_level),
        cmocka_unit_test(gradients),
        cmocka_unit_test(absent_where_nothing_is_live),
        cmocka_unit_test(entries_that_lead_out),
        cmocka_unit_test(one_clear_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
