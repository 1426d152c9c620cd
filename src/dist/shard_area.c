/* The work of each chunk of rows: live positions. FULL blocks are known; of PARTIAL ones some
 * rows are evaluated, spread evenly and as many as a fixed budget allows, so that plans of long
 * sequences take milliseconds and all ranks get the same. Where the budget is too small, or
 * PARTIAL blocks are too few to matter, or there is no mod, one counts by half. A block whose
 * rows lie in two chunks counts for each by its rows there. */
#include "dist/shard.h"

#include "base/integers.h"
#include "base/status.h"
#include "mask/mask_build.h"

#include <stdlib.h>

enum { SAMPLES_MOST = 8, BUDGET = 1 << 20 }; /* rows of a block; positions of a mask */

/* One mask while it is counted. */
typedef struct counter {
    const shard_source *s;
    const mask_runs *runs;
    const mask_view *view;
    eval_state *state; /* NULL: nothing is evaluated */
    int32_t samples;
} counter;

/* Keys of a run that there are. */
static int64_t first_of(const mask_runs *runs, int64_t i)
{
    return (int64_t)runs->runs[i].first * runs->block_kv;
}

static int64_t past_of(const mask_runs *runs, int64_t i, int64_t KV)
{
    const int64_t past = (int64_t)runs->runs[i].first + runs->runs[i].count;
    return smaller(past * runs->block_kv, KV);
}

/* ---- PARTIAL blocks ---- */

/* Rows of each block to evaluate: none where PARTIAL blocks are too few to matter. */
static int32_t samples_of(const shard_source *s, const mask_runs *runs)
{
    int64_t full = 0, partial = 0;
    for (int64_t i = 0; i < runs->stats.runs; i++)
        *(runs->runs[i].full ? &full : &partial) += past_of(runs, i, s->KV) - first_of(runs, i);
    return partial > full / 100 ? (int32_t)smaller(SAMPLES_MOST, BUDGET / partial) : 0;
}

/* Live keys of [j0, j1) in the row that the state is set to. */
static int64_t count_live(const counter *c, int64_t b, int64_t j0, int64_t j1)
{
    const int64_t offset = c->view->kv_offset ? c->view->kv_offset[b] : 0;
    uint8_t live[EVAL_STRIP];
    int64_t n = 0;
    for (int64_t j = j0; j < j1; j += EVAL_STRIP) {
        const int32_t length = (int32_t)smaller(EVAL_STRIP, j1 - j);
        eval_mask(c->state, (int32_t)(j + offset), length, live);
        for (int32_t i = 0; i < length; i++)
            n += live[i];
    }
    return n;
}

/* Live keys in PARTIAL blocks of a row of blocks, the mean of its samples. */
static double sampled_keys(const counter *c, int64_t row, int64_t n_rows)
{
    const mask_runs *runs = c->runs;
    const int64_t b = row / runs->rows / runs->H, h = row / runs->rows % runs->H;
    const int64_t offset = c->view->q_offset ? c->view->q_offset[b] : 0;
    const int32_t samples = (int32_t)smaller(c->samples, n_rows);
    int64_t n = 0;
    eval_head(c->state, (int32_t)b, (int32_t)h);
    for (int32_t i = 0; i < samples; i++) {
        const int64_t q =
            row % runs->rows * runs->block_q + (2 * i + 1) * n_rows / (2 * samples);
        eval_row(c->state, (int32_t)(q + offset));
        for (int64_t at = runs->row_begin[row]; at < runs->row_begin[row + 1]; at++)
            if (!runs->runs[at].full)
                n += count_live(c, b, first_of(runs, at), past_of(runs, at, c->s->KV));
    }
    return (double)n / samples;
}

/* Live keys of a row of blocks, on average over its n_rows rows. */
static double live_keys(const counter *c, int64_t row, int64_t n_rows)
{
    const mask_runs *runs = c->runs;
    int64_t full = 0, partial = 0;
    for (int64_t i = runs->row_begin[row]; i < runs->row_begin[row + 1]; i++)
        *(runs->runs[i].full ? &full : &partial) +=
            past_of(runs, i, c->s->KV) - first_of(runs, i);
    if (partial && c->state)
        return (double)full + sampled_keys(c, row, n_rows);
    return (double)full + (double)partial / 2;
}

/* ---- masks ---- */

static void add_rows(const counter *c, double weight, double *area)
{
    const shard_source *s = c->s;
    const mask_runs *runs = c->runs;
    for (int64_t row = 0; row < runs->B * runs->H * runs->rows; row++) {
        const int64_t first = row % runs->rows * runs->block_q;
        const int64_t past = smaller(first + runs->block_q, s->Q);
        const double keys = weight * live_keys(c, row, past - first);
        for (int64_t at = first, next; at < past; at = next) {
            next = smaller((at / s->chunk + 1) * s->chunk, past);
            area[at / s->chunk] += keys * (double)(next - at);
        }
    }
}

static saccade_status add_mask(const shard_source *s, int32_t index, double *area,
                               saccade_error *err)
{
    const saccade_block_mask *mask = s->masks[index];
    counter c = {.s = s, .runs = s->runs[index], .view = mask_get_view(mask)};
    void *memory = NULL;
    c.samples = samples_of(s, c.runs);
    if (c.samples && mask->prog) {
        memory = aligned_alloc(64, eval_state_bytes(mask->prog));
        FAIL_IF_NULL(memory);
        c.state = eval_begin(mask->prog, &c.view->env, memory);
    }
    add_rows(&c, s->weight[index], area);
    free(memory);
    return SACCADE_OK;
}

saccade_status shard_areas(const shard_source *s, double *area, saccade_error *err)
{
    for (int64_t c = 0; c < s->chunks; c++)
        area[c] = 0;
    for (int32_t mask = 0; mask < s->n_masks; mask++) {
        if (s->runs[mask]) {
            TRY(add_mask(s, mask, area, err));
            continue;
        }
        for (int64_t c = 0; c < s->chunks; c++)
            area[c] += (double)(smaller(s->chunk, s->Q - c * s->chunk) * s->KV);
    }
    return SACCADE_OK;
}
