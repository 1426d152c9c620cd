/* A block that its range leaves open: is it live, dead, or both?
 * First witnesses, by proof alone: the corners, then smaller boxes. What ranges can't decide is
 * evaluated by the strip interpreter, which defines what a mask is, a few thousand positions at
 * a time. All stops as soon as a live and a dead position have been seen. */
#include "mask/mask_build.h"

#include "base/status.h"

#include <stdlib.h>
#include <string.h>

enum {
    LEAF = 4096,     /* positions evaluated without asking for another proof */
    LEAF_KEYS = 128, /* keys in a row of them, so that strips stay long */
    CUT_MIN = 512,   /* positions for which another proof is cheaper than evaluation */
    CUTS_MAX = 24    /* per block */
};

saccade_status worker_open(const mask_source *source, mask_worker *worker, saccade_error *err)
{
    memset(worker, 0, sizeof *worker);
    worker->source = source;
    worker->budget_left = source->budget;
    worker->scratch = malloc(pass_prover_scratch(source->prover));
    worker->eval_memory = aligned_alloc(64, eval_state_bytes(source->prog));
    if (!worker->scratch || !worker->eval_memory) {
        worker_close(worker);
        FAIL(SACCADE_ENOMEM, "out of memory");
    }
    return SACCADE_OK;
}

void worker_close(mask_worker *worker)
{
    free(worker->scratch);
    free(worker->eval_memory);
    worker->scratch = worker->eval_memory = NULL;
}

void worker_head(mask_worker *worker, int32_t b, int32_t h)
{
    worker->b = b;
    worker->h = h;
    worker->eval = NULL;
}

static int64_t keys_of(const pass_box *box)
{
    return (int64_t)box->hi[VAR_KV] - box->lo[VAR_KV] + 1;
}

static int64_t queries_of(const pass_box *box)
{
    return (int64_t)box->hi[VAR_Q] - box->lo[VAR_Q] + 1;
}

/* ---- evaluation ---- */

static int evaluate_row(mask_worker *w, const pass_box *box, int32_t q, int seen)
{
    const int64_t n = keys_of(box);
    uint8_t live[EVAL_STRIP];
    eval_row(w->eval, q);
    for (int64_t at = 0; at < n && seen != SEEN_BOTH; at += EVAL_STRIP) {
        const int32_t length = (int32_t)(n - at < EVAL_STRIP ? n - at : EVAL_STRIP);
        int32_t sum = 0;
        eval_mask(w->eval, (int32_t)(box->lo[VAR_KV] + at), length, live);
        for (int32_t i = 0; i < length; i++)
            sum += live[i];
        seen |= (sum > 0 ? SEEN_LIVE : 0) | (sum < length ? SEEN_DEAD : 0);
        w->positions += length;
    }
    return seen;
}

static int evaluate(mask_worker *w, const pass_box *box, int seen)
{
    const int64_t n = keys_of(box) * queries_of(box);
    if (w->budget_left >= 0) {
        if (w->budget_left < n)
            return seen | SEEN_UNKNOWN;
        w->budget_left -= n;
    }
    if (!w->eval) {
        w->eval = eval_begin(w->source->prog, &w->source->env, w->eval_memory);
        eval_head(w->eval, w->b, w->h);
    }
    w->has_evaluated = 1;
    watch_tick(w);
    if (watch_is_stopped(w))
        return SEEN_BOTH; /* the quickest end */
    for (int64_t q = box->lo[VAR_Q]; q <= box->hi[VAR_Q] && (seen & SEEN_BOTH) != SEEN_BOTH;
         q++)
        seen = evaluate_row(w, box, (int32_t)q, seen);
    return seen;
}

/* ---- witnesses ---- */

static int seen_by(pass_verdict verdict)
{
    return verdict == PASS_ALWAYS ? SEEN_LIVE : verdict == PASS_NEVER ? SEEN_DEAD : 0;
}

/* Corner 1 and 2 first: they differ in masks that follow the diagonal. */
static int look_at_corners(mask_worker *w, const pass_box *box)
{
    static const uint8_t order[4] = {1, 2, 0, 3};
    int seen = 0;
    for (int i = 0; i < 4 && seen != SEEN_BOTH; i++) {
        pass_box point = *box;
        point.lo[VAR_Q] = point.hi[VAR_Q] = order[i] & 2 ? box->hi[VAR_Q] : box->lo[VAR_Q];
        point.lo[VAR_KV] = point.hi[VAR_KV] = order[i] & 1 ? box->hi[VAR_KV] : box->lo[VAR_KV];
        seen |= seen_by(pass_prove_next(w->source->prover, &point, w->scratch));
    }
    return seen;
}

/* Halves of a range at the largest aligned length, so that tables answer in few steps. */
static int32_t middle(int32_t lo, int32_t hi)
{
    int64_t half = 1;
    while (2 * half < (int64_t)hi - lo + 1)
        half *= 2;
    return (int32_t)(lo + half - 1);
}

static int refine(mask_worker *w, const pass_box *box, int seen);

static int look_at_part(mask_worker *w, const pass_box *part, int seen)
{
    const pass_verdict v = pass_prove_next(w->source->prover, part, w->scratch);
    return v == PASS_UNKNOWN ? refine(w, part, seen) : seen | seen_by(v);
}

/* Cuts where the mask itself changes: the parts are likely to be proven. */
static int cut(mask_worker *w, const pass_box *box, int var, int32_t at, int seen)
{
    pass_box part = *box;
    w->cuts_left--;
    part.hi[var] = at - 1;
    seen = look_at_part(w, &part, seen);
    if ((seen & SEEN_BOTH) == SEEN_BOTH)
        return seen;
    part.hi[var] = box->hi[var];
    part.lo[var] = at;
    return look_at_part(w, &part, seen);
}

/* Halves of the longer side, or of both, until a part is small enough to be evaluated. */
static int halve(mask_worker *w, const pass_box *box, int seen)
{
    const int64_t queries = queries_of(box), keys = keys_of(box);
    const int cut_keys = keys > LEAF_KEYS && 2 * keys > queries;
    const int cut_queries = queries > 1 && (!cut_keys || 2 * queries > keys);
    const int32_t q_cut = middle(box->lo[VAR_Q], box->hi[VAR_Q]);
    const int32_t k_cut = middle(box->lo[VAR_KV], box->hi[VAR_KV]);
    for (int i = 0; i < 4 && (seen & SEEN_BOTH) != SEEN_BOTH; i++) {
        pass_box part = *box;
        if ((!cut_queries && (i & 2)) || (!cut_keys && (i & 1)))
            continue;
        if (cut_queries)
            *(i & 2 ? &part.lo[VAR_Q] : &part.hi[VAR_Q]) = q_cut + (i >> 1);
        if (cut_keys)
            *(i & 1 ? &part.lo[VAR_KV] : &part.hi[VAR_KV]) = k_cut + (i & 1);
        seen = look_at_part(w, &part, seen);
    }
    return seen;
}

/* A box whose proof, the last one made, came out unknown. */
static int refine(mask_worker *w, const pass_box *box, int seen)
{
    const int64_t positions = queries_of(box) * keys_of(box);
    int var;
    int32_t at;
    if (positions >= CUT_MIN && w->cuts_left > 0
        && pass_prove_cut(w->source->prover, w->scratch, &var, &at))
        return cut(w, box, var, at, seen);
    return positions <= LEAF ? evaluate(w, box, seen) : halve(w, box, seen);
}

int resolve_box(mask_worker *w, const pass_box *box)
{
    const int seen = look_at_corners(w, box);
    w->has_evaluated = 0;
    w->cuts_left = CUTS_MAX;
    if (seen == SEEN_BOTH)
        return seen;
    pass_prove_next(w->source->prover, box, w->scratch); /* the corners were the last */
    return refine(w, box, seen);
}
