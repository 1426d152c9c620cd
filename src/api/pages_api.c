/* Where keys lie that come in pages or chunks: tables and lengths of all forms into one. */
#include "api/api.h"

#include "base/integers.h"

static const int64_t MOST_KEYS = (int64_t)1 << 30;

/* ---- tables ---- */

saccade_status api_start_pages(const saccade_plan *plan, const api_inputs *in,
                               saccade_pages *pages, saccade_error *err)
{
    saccade_pages_init(pages);
    FAIL_AT(!plan->problem.page != !in->pages, SACCADE_EINVAL, "pages", 0, 0,
            "got %s, expected %s: the plan's problem has %s page", in->pages ? "some" : "none",
            in->pages ? "none" : "some", in->pages ? "no" : "a");
    return in->pages ? RECORD_READ(pages, in->pages, "pages") : SACCADE_OK;
}

static saccade_status check_table(const saccade_plan *plan, const saccade_tensor *t,
                                  const char *name, int32_t rank, int64_t first,
                                  saccade_error *err)
{
    const api_expected expected = {name, SACCADE_I32, rank, plan->backend->device};
    int64_t shape[2] = {first, 0};
    TRY(api_check_tensor(t, &expected, shape, err));
    return api_check_packed(t, name, err);
}

/* Batches' ranges of entries rise and stay in the table; *most: entries of the longest. */
static saccade_status check_starts(const int32_t *start, int64_t B, int64_t entries,
                                   int64_t *most, saccade_error *err)
{
    *most = 1;
    FAIL_AT(start[0] < 0, SACCADE_EINVAL, "indptr", 0, 0, "got %d first, expected 0 or more",
            start[0]);
    for (int64_t b = 0; b < B; b++) {
        FAIL_AT(start[b + 1] < start[b] || start[b + 1] > entries, SACCADE_EINVAL, "indptr", 0,
                0, "got %d after %d for batch %lld, expected no less and up to %lld entries",
                start[b + 1], start[b], (long long)b, (long long)entries);
        *most = larger(*most, start[b + 1] - start[b]);
    }
    return SACCADE_OK;
}

/* *most: entries of a batch, 0 where the host cannot know. */
static saccade_status read_table(const saccade_plan *plan, const saccade_pages *pages,
                                 int64_t B, plan_chunks *out, int64_t *most, saccade_error *err)
{
    const saccade_tensor *t = pages->table;
    if (!pages->indptr) {
        TRY(check_table(plan, t, "table", 2, B, err));
        *most = t->shape[1];
        out->row_stride = t->stride[0];
    } else {
        TRY(check_table(plan, t, "table", 1, 0, err));
        TRY(check_table(plan, pages->indptr, "indptr", 1, B + 1, err));
        *most = 0;
        out->start = pages->indptr->data;
        out->entries = (int32_t)t->shape[0];
        if (plan->backend->device == SACCADE_CPU)
            TRY(check_starts(out->start, B, out->entries, most, err));
    }
    out->first = t->data;
    return SACCADE_OK;
}

saccade_status api_read_pages(const saccade_plan *plan, const saccade_pages *pages,
                              plan_run *run, plan_chunks *chunks, saccade_error *err)
{
    const int64_t wanted = plan->problem.page;
    const int64_t size = pages->chunk ? pages->chunk : run->k->shape[2];
    int64_t most;
    *chunks = (plan_chunks){.is_paged = !pages->chunk, .size = (int32_t)size};
    FAIL_AT(size < 1 || size > MOST_KEYS || (wanted > 0 && size != wanted), SACCADE_EINVAL,
            pages->chunk ? "chunk" : "page", 0, 0, "got %lld keys, expected %lld%s",
            (long long)size, wanted > 0 ? (long long)wanted : 1LL,
            wanted > 0 ? ", the problem's page" : " to 2^30");
    TRY(read_table(plan, pages, run->sizes.B, chunks, &most, err));
    const int64_t held = smaller(most * size, MOST_KEYS);
    const int64_t limit = most && !chunks->start ? held : MOST_KEYS;
    FAIL_AT(pages->KV < 0 || pages->KV > limit, SACCADE_EINVAL, "pages.KV", 0, 0,
            "got %lld, expected 0 to %lld", (long long)pages->KV, (long long)limit);
    FAIL_AT(!pages->KV && !most, SACCADE_EINVAL, "pages.KV", 0, 0,
            "got 0, expected the most keys of a batch: indptr lies on a GPU");
    run->sizes.KV = pages->KV ? pages->KV : held;
    chunks->count = (int32_t)(chunks->start ? (run->sizes.KV + size - 1) / size : most);
    run->chunks = chunks;
    return SACCADE_OK;
}

/* ---- lengths ---- */

static saccade_status read_last_pages(const saccade_plan *plan, const saccade_tensor *t,
                                      plan_run *run, saccade_error *err)
{
    const plan_chunks *c = run->chunks;
    const api_expected expected = {"last_page_len", SACCADE_I32, 1, plan->backend->device};
    int64_t shape[1] = {run->sizes.B};
    FAIL_AT(!c->start, SACCADE_EINVAL, "last_page_len", 0, 0,
            "got it without indptr, expected positions.kv_len");
    FAIL_AT(run->positions.kv_len.dtype != SACCADE_NONE, SACCADE_EINVAL, "last_page_len", 0, 0,
            "got it and positions.kv_len, expected one of them");
    TRY(api_check_tensor(t, &expected, shape, err));
    run->positions.kv_len = *t;
    run->positions.pages = c;
    for (int64_t b = 0; plan->backend->device == SACCADE_CPU && b < shape[0]; b++) {
        const int32_t last = ((const int32_t *)t->data)[b * t->stride[0]];
        const int64_t n = plan_entries_of(c, b).count;
        FAIL_AT(n && (last < 1 || last > c->size), SACCADE_EINVAL, "last_page_len", 0, 0,
                "got %d for batch %lld, expected 1 to %d", last, (long long)b, c->size);
        FAIL_AT(n && (n - 1) * c->size + last > run->sizes.KV, SACCADE_EINVAL, "pages.KV", 0, 0,
                "got %lld, expected %lld or more, the keys of batch %lld",
                (long long)run->sizes.KV, (long long)((n - 1) * c->size + last), (long long)b);
    }
    return SACCADE_OK;
}

saccade_status api_read_page_lengths(const saccade_plan *plan, const api_inputs *in,
                                     plan_run *run, saccade_error *err)
{
    saccade_pages pages;
    TRY(api_start_pages(plan, in, &pages, err));
    if (!in->pages)
        return SACCADE_OK;
    if (pages.last_page_len)
        return read_last_pages(plan, pages.last_page_len, run, err);
    FAIL_AT(pages.indptr && run->positions.kv_len.dtype == SACCADE_NONE, SACCADE_EINVAL,
            "last_page_len", 0, 0, "got neither it nor positions.kv_len, expected one of them");
    for (int64_t b = 0;
         pages.indptr && plan->backend->device == SACCADE_CPU && b < run->sizes.B; b++) {
        const int64_t held = (int64_t)plan_entries_of(run->chunks, b).count * run->chunks->size;
        const int64_t len = plan_position_of(&run->positions, run->sizes.KV, b).kv_len;
        FAIL_AT(len > held, SACCADE_EINVAL, "kv_len", 0, 0,
                "got %lld for batch %lld, expected up to the %lld keys that its pages hold",
                (long long)len, (long long)b, (long long)held);
    }
    return SACCADE_OK;
}

/* ---- check ---- */

/* Entries of pages that batch b shares, and that are those of its group's first. */
static int64_t shared_entries(const plan_run *run, int64_t b)
{
    const plan_prefix *p = run->prefix;
    for (int32_t g = 0; p && g < p->n; g++)
        if (b > p->groups[g] && b < p->groups[g + 1])
            return p->shared[g] / run->chunks->size;
    return 0;
}

/* Entries of batch b that keys before its length are in. */
static saccade_status check_entries(const plan_run *run, int64_t b, saccade_error *err)
{
    const plan_chunks *c = run->chunks;
    const plan_entries own = plan_entries_of(c, b);
    const int64_t len = plan_position_of(&run->positions, run->sizes.KV, b).kv_len;
    const int64_t places = run->k->shape[c->is_paged ? 0 : 2];
    for (int64_t i = shared_entries(run, b); i * c->size < len; i++) {
        const int64_t keys = smaller(len - i * c->size, c->size);
        const int64_t most = places - (c->is_paged ? 1 : keys);
        FAIL_AT(own.first[i] < -1 || own.first[i] > most, SACCADE_EVALUE, "table", 0, 0,
                "got %d in entry %lld of batch %lld, expected -1 to %lld", own.first[i],
                (long long)i, (long long)b, (long long)most);
    }
    return SACCADE_OK;
}

saccade_status saccade_pages_check(const saccade_plan *plan, const saccade_forward_args *args,
                                   saccade_error *err)
{
    api_forward_call call;
    TRY(api_start_forward(plan, args, "pages", &call, err));
    FAIL_AT(!call.run.chunks, SACCADE_EINVAL, "pages", 0, 0,
            "got a plan whose problem has no page, expected one with pages");
    FAIL_AT(plan->backend->device != SACCADE_CPU, SACCADE_EBACKEND, "pages", 0, 0,
            "got tables on a GPU, expected tables on the host: copy them there");
    for (int64_t b = 0; b < call.run.sizes.B; b++)
        TRY(check_entries(&call.run, b, err));
    return SACCADE_OK;
}
