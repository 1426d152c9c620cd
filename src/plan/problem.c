/* Problems as text, as the command line reads them (cli/problem_text.c), and positions of one
 * batch. */
#include "plan/plan.h"

void plan_print_problem(const saccade_sizes *s, saccade_dtype dtype, strbuf *out)
{
    strbuf_printf(out, "b%lld h%lld", (long long)s->B, (long long)s->H);
    if (s->Hkv != s->H)
        strbuf_printf(out, "/%lld", (long long)s->Hkv);
    strbuf_printf(out, " q%lld kv%lld d%lld", (long long)s->Q, (long long)s->KV,
                  (long long)s->D);
    if (s->Dv != s->D)
        strbuf_printf(out, " dv%lld", (long long)s->Dv);
    strbuf_printf(out, " %s", saccade_dtype_name(dtype));
}

/* ---- heads ---- */

void plan_set_env(const plan_problem *p, const saccade_sizes *sizes, eval_env *out)
{
    saccade_sizes all = *sizes;
    all.H = p->heads_global;
    all.Hkv = p->heads_global / p->group;
    eval_sizes(&all, out->size);
    out->h_offset = p->h_offset;
}

int64_t plan_block_row(const plan_run *run, const mask_runs *runs, int64_t b, int64_t h,
                       int64_t row)
{
    const int64_t head = runs->H == 1 ? 0 : h + run->mask_env.h_offset;
    const int64_t batch = runs->B == 1 ? 0 : b + run->mask_env.b_offset;
    return (batch * runs->H + head) * runs->rows + row;
}

/* ---- keys that are not in one piece ---- */

plan_entries plan_entries_of(const plan_chunks *c, int64_t b)
{
    if (!c->start)
        return (plan_entries){c->first + b * c->row_stride, c->count};
    const int32_t from = c->start[b] < 0 ? 0 : c->start[b];
    const int32_t past = c->start[b + 1] < c->entries ? c->start[b + 1] : c->entries;
    return (plan_entries){c->first + (from < past ? from : 0), from < past ? past - from : 0};
}

plan_place plan_place_of(const plan_chunks *c, const saccade_tensor *t, int64_t b, int64_t j)
{
    if (!c)
        return (plan_place){b, j};
    const plan_entries entries = plan_entries_of(c, b);
    const int64_t chunk = j / c->size, at = j % c->size;
    const int64_t first = chunk < entries.count ? entries.first[chunk] : -1;
    const int64_t last = t->shape[c->is_paged ? 0 : 2] - 1;
    if (first < 0)
        return (plan_place){b, -1};
    if (c->is_paged)
        return (plan_place){first < last ? first : last, at};
    return (plan_place){b, first + at < last ? first + at : last};
}

/* ---- positions ---- */

/* Element b of a rank-0 or rank-1 host tensor of int32. */
static int32_t element(const saccade_tensor *t, int64_t b, int32_t otherwise)
{
    if (t->dtype == SACCADE_NONE)
        return otherwise;
    return ((const int32_t *)t->data)[t->rank == 1 ? b * t->stride[0] : 0];
}

plan_position plan_position_of(const plan_positions *p, int64_t KV, int64_t b)
{
    int64_t len = element(&p->kv_len, b, (int32_t)KV);
    if (p->pages) {
        const int64_t n = plan_entries_of(p->pages, b).count;
        len = n ? (n - 1) * p->pages->size + len : 0;
    }
    return (plan_position){
        .q_offset = element(&p->q_offset, b, 0),
        .kv_offset = element(&p->kv_offset, b, 0),
        .kv_len = len < 0    ? 0
                  : len > KV ? KV
                             : len,
    };
}

/* first and its n - 1 followers */
static int are_near(int64_t first, int64_t n)
{
    return n <= 0 || (first >= PASS_NEAR_MIN && first + n - 1 <= PASS_NEAR_MAX);
}

static int is_on_host(const saccade_tensor *t)
{
    return t->dtype != SACCADE_NONE && t->device.kind == SACCADE_CPU;
}

int plan_is_near(const plan_positions *p, const saccade_sizes *s)
{
    const plan_positions known = {
        .q_offset = is_on_host(&p->q_offset) ? p->q_offset : (saccade_tensor){0},
        .kv_offset = is_on_host(&p->kv_offset) ? p->kv_offset : (saccade_tensor){0},
        .kv_len = is_on_host(&p->kv_len) ? p->kv_len : (saccade_tensor){0},
        .pages = is_on_host(&p->kv_len) ? p->pages : NULL,
    };
    for (int64_t b = 0; b < s->B; b++) {
        const plan_position at = plan_position_of(&known, s->KV, b);
        if (!are_near(at.q_offset, s->Q) || !are_near(at.kv_offset, at.kv_len))
            return 0;
    }
    return 1;
}

int plan_names_length(const mod_fn *fn)
{
    for (uint32_t i = 0; fn && i < fn->n_nodes; i++)
        if (fn->nodes[i].op == OP_SIZE
            && (fn->nodes[i].imm.i == SIZE_Q || fn->nodes[i].imm.i == SIZE_KV))
            return 1;
    return 0;
}
