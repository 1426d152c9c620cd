/* One item: a chunk of the key blocks of one (batch, kv head), each against the live blocks of
 * rows of all heads of the group. */
#include "cpu/backward/backward.h"

#include "base/integers.h"

#include <assert.h>
#include <string.h>

backward_worker *backward_worker_of(const backward_job *job, int thread)
{
    return (backward_worker *)(void *)(job->memory + job->g.thread_off
                                       + (size_t)thread * job->g.thread_bytes);
}

static void begin_mods(backward_worker *w, const backward_job *job, char *base,
                       const backward_scratch *at)
{
    const cpu_state *state = cpu_state_of(job->plan);
    const cpu_backward_plan *b = job->backward;
    const plan_run *run = job->run;
    const eval_prog *score = b->score ? b->score : state->score;
    const jit_program *jit = b->score ? b->jit : state->jit;
    if (jit)
        w->jit = jit_begin(jit, &run->score_env, &run->mask_env,
                           job->plan->problem.score ? (float)job->plan->problem.scale : 1,
                           base + at->jit);
    if (score)
        w->score = eval_begin(score, &run->score_env, base + at->score);
    if (state->mask)
        w->mask = eval_begin(state->mask, &run->mask_env, base + at->mask);
}

void backward_begin_threads(backward_job *job)
{
    const backward_scratch at = backward_scratch_of(job->plan, job->backward, &job->g);
    static_assert(sizeof(backward_worker) <= BACKWARD_WORKER, "room in front of the scratch");
    for (int n = 0; n < job->plan->threads; n++) {
        backward_worker *w = backward_worker_of(job, n);
        char *base = (char *)w;
        *w = (backward_worker){.job = job, .head_slope = 1};
        w->k_turned = base + at.k_turned;
        w->v_turned = base + at.v_turned;
        w->k_steps = base + at.k_steps;
        w->q_rows = base + at.q_rows;
        w->q_steps = base + at.q_steps;
        w->o_rows = base + at.o_rows;
        w->o_steps = base + at.o_steps;
        w->s = (float *)(void *)(base + at.s);
        w->dp = (float *)(void *)(base + at.dp);
        w->dx = (float *)(void *)(base + at.dx);
        w->sums = (float *)(void *)(base + at.sums);
        w->results = (float **)(void *)(base + at.pointers);
        w->out = w->results + (job->backward->n_results > 1 ? job->backward->n_results : 1);
        for (uint32_t k = 1; k < job->backward->n_results; k++)
            w->results[k] =
                (float *)(void *)(base + at.results)
                + (k - 1) * (uint32_t)(job->backward->kernels->block->strip * BACKWARD_KEYS);
        w->p = job->backward->kernels->is_apart ? base + at.p : (char *)w->s;
        w->ds = job->backward->kernels->is_apart ? base + at.ds : (char *)w->dp;
        w->dk = (float *)(void *)(base + at.dk);
        w->dv = (float *)(void *)(base + at.dv);
        w->turned = (float *)(void *)(base + at.turned);
        w->row = (float *)(void *)(base + at.row);
        w->most = (float *)(void *)(base + at.most);
        w->live = (uint8_t *)(base + at.live);
        w->ranges = base + at.ranges;
        w->limits.first = (int64_t *)(void *)(base + at.limits);
        w->limits.past = w->limits.first + CPU_MOST_ROWS;
        w->values = (double *)(void *)(base + at.values);
        w->k_room = base + at.k_room;
        w->v_room = base + at.v_room;
        begin_mods(w, job, base, &at);
        w->element = (int64_t *)(void *)(base + at.element);
        w->kept = (backward_kept *)(void *)(base + at.kept);
        backward_begin_indices(w, base + at.indices);
    }
}

int32_t backward_keys_there(const backward_worker *w)
{
    const int64_t left = w->job->run->sizes.KV - w->j0;
    return (int32_t)smaller(left, w->job->g.keys);
}

/* ---- which tiles are live ---- */

static cpu_cover cover_of_span(const backward_span *span, int64_t j0, int64_t j1)
{
    if (j1 <= span->any_first || j0 >= span->any_past)
        return CPU_EMPTY;
    return j0 >= span->all_first && j1 <= span->all_past ? CPU_FULL : CPU_PARTIAL;
}

cpu_cover backward_cover_of(const backward_job *job, int64_t b, int64_t h, int64_t row_block,
                            int64_t j0, int64_t j1, void *ranges)
{
    const saccade_sizes *s = &job->run->sizes;
    const int64_t i0 = row_block * job->g.rows;
    const int64_t i1 = i0 + job->g.rows < s->Q ? i0 + job->g.rows : s->Q;
    const cpu_box box = {b, h, h + 1, i0, i1, j0, j1};
    if (job->live.by == CPU_BY_LIMITS)
        return cover_of_span(&job->spans[(b * s->H + h) * job->g.row_blocks + row_block], j0,
                             j1);
    return cpu_cover_of(&job->live, NULL, &box, ranges);
}

/* A block of keys of the mask's runs: a place in each of its rows of cells. */
typedef struct run_walk {
    const saccade_run *at[BACKWARD_KEYS / BACKWARD_CELL], *end[BACKWARD_KEYS / BACKWARD_CELL];
    int32_t n;
} run_walk;

static run_walk walk_runs(const backward_job *job, int64_t b, int64_t h, int64_t j0, int64_t n)
{
    const mask_runs *r = job->runs;
    run_walk walk = {.n = 0};
    for (int64_t j = j0; j < j0 + n; j += BACKWARD_CELL, walk.n++) {
        const int64_t row = plan_block_row(job->run, r, b, h, j / BACKWARD_CELL);
        walk.at[walk.n] = r->runs + r->row_begin[row];
        walk.end[walk.n] = r->runs + r->row_begin[row + 1];
    }
    return walk;
}

/* The first row of cells at or after `from` in which a run of any key column lies; INT64_MAX if
 * there is none. Drops runs that end before `from`. */
static int64_t first_cell(run_walk *walk, int64_t from)
{
    int64_t first = INT64_MAX;
    for (int32_t k = 0; k < walk->n; k++) {
        while (walk->at[k] < walk->end[k]
               && (int64_t)walk->at[k]->first + walk->at[k]->count <= from)
            walk->at[k]++;
        if (walk->at[k] < walk->end[k])
            first = walk->at[k]->first < first ? walk->at[k]->first : first;
    }
    return first < from ? from : first;
}

/* Row `cell` of cells; no earlier one is asked for afterwards. */
static cpu_cover cover_of_cell(run_walk *walk, int32_t k, int64_t cell)
{
    while (walk->at[k] < walk->end[k]
           && (int64_t)walk->at[k]->first + walk->at[k]->count <= cell)
        walk->at[k]++;
    if (walk->at[k] == walk->end[k] || walk->at[k]->first > cell)
        return CPU_EMPTY;
    return walk->at[k]->full ? CPU_FULL : CPU_PARTIAL;
}

/* The cells of a block of rows. */
static cpu_cover take_cells(backward_worker *w, run_walk *walk, int64_t row_block)
{
    const int64_t n_rows = w->job->g.rows / BACKWARD_CELL, first = row_block * n_rows;
    int any = 0, all = 1;
    for (int64_t r = 0; r < n_rows; r++)
        for (int32_t k = 0; k < walk->n; k++) {
            const int is_there = (first + r) * BACKWARD_CELL < w->job->run->sizes.Q;
            const cpu_cover cover = is_there ? cover_of_cell(walk, k, first + r) : CPU_FULL;
            w->cells[r][k] = (uint8_t)cover;
            any |= is_there && cover != CPU_EMPTY;
            all &= cover == CPU_FULL;
        }
    return !any ? CPU_EMPTY : all ? CPU_FULL : CPU_PARTIAL;
}

/* Rows that no tile has come to, up to row i. */
static void store_rest(backward_worker *w, int64_t i)
{
    if (w->job->has_stored)
        backward_store_zeros(w, w->rows_stored, i - w->rows_stored, 0);
    w->rows_stored = i;
}

static void run_tile(backward_worker *w, int64_t row_block, cpu_cover cover)
{
    const backward_job *job = w->job;
    const int64_t Q = job->run->sizes.Q;
    const plan_rows *rows = job->run->rows;
    w->i0 = row_block * job->g.rows;
    const plan_part *part = rows ? plan_part_of(rows, w->i0) : NULL;
    if (rows && !part)
        return;
    w->shift = part ? part->row - part->first : 0;
    w->m = (int32_t)(Q - w->i0 < job->g.rows ? Q - w->i0 : job->g.rows);
    w->is_full = cover == CPU_FULL;
    if (job->backward->has_dq) {
        const int64_t group = job->plan->problem.group;
        const int64_t head =
            (w->b * job->run->sizes.Hkv + w->g - job->head0) / job->step * group + w->h % group;
        uint8_t *touched = backward_touched_of(job, w->chunk, head) + row_block;
        const int64_t ld = job->g.dq_ld;
        w->dq = backward_partial_of(job, w->chunk, head) + w->i0 * ld;
        w->dq_is_new = !*touched;
        *touched = 1;
    }
    store_rest(w, w->i0);
    backward_run_tile(w);
    w->rows_stored += w->m;
}

static void run_head(backward_worker *w)
{
    const backward_job *job = w->job;
    const mod_fn *slope = job->backward->slope;
    if (slope && !job->backward->has_slopes) {
        const eval_point point = {(int32_t)w->b, (int32_t)w->h, 0, 0, 0};
        w->head_slope =
            (float)eval_scalar(slope, &job->run->score_env, &point, w->values, NULL);
    }
    if (job->runs) {
        const int64_t each = job->g.rows / BACKWARD_CELL;
        run_walk walk = walk_runs(job, w->b, w->h, w->j0, w->n);
        for (int64_t n = 0; n < job->g.row_blocks; n++) {
            const int64_t next = first_cell(&walk, n * each) / each;
            if (next >= job->g.row_blocks)
                break;
            n = next;
            const cpu_cover cover = take_cells(w, &walk, n);
            if (cover != CPU_EMPTY)
                run_tile(w, n, cover);
        }
        return;
    }
    for (int64_t n = 0; n < job->g.row_blocks; n++) {
        const cpu_cover cover =
            backward_cover_of(job, w->b, w->h, n, w->j0, w->j0 + w->n, w->ranges);
        if (cover != CPU_EMPTY)
            run_tile(w, n, cover);
    }
}

/* ---- items ---- */

static void store(const backward_worker *w, const saccade_tensor *t, uint32_t bit,
                  const float *from, int32_t ld, float scale)
{
    const backward_job *job = w->job;
    const cpu_rows to = cpu_rows_of(t, w->b, w->g);
    char *at = (char *)t->data + (to.base - (const char *)t->data) + w->j0 * to.stride;
    const cpu_backward_kernels *kernels = job->backward->kernels;
    const int is_added = (job->gradients->added & bit) != 0;
    const int32_t rows = backward_keys_there(w);
    const int32_t step = kernels->turn_sums ? BACKWARD_TURNED : rows;
    for (int32_t j = 0; j < rows; j += step) {
        const int32_t n = rows - j < step ? rows - j : step;
        if (kernels->turn_sums)
            kernels->turn_sums(from + j, BACKWARD_KEYS, step, ld, w->turned, ld);
        kernels->store(kernels->turn_sums ? w->turned : from, ld, n, to.dim, scale, is_added,
                       to.dtype, at + j * to.stride, to.stride);
    }
}

/* Sums stored [dim][key] cover whole tiles. Columns past kv_len may hold 0 * inf = NaN; clear
 * them. */
static void clear_past(const backward_worker *w, float *sums, int32_t ld)
{
    const int32_t there = backward_keys_there(w);
    if (!w->job->backward->kernels->turn_sums || !w->n || w->n >= there)
        return;
    for (int32_t d = 0; d < ld; d++)
        memset(sums + (int64_t)d * BACKWARD_KEYS + w->n, 0,
               (size_t)(there - w->n) * sizeof *sums);
}

/* A block of keys; keys at and past kv_len are not read, and their gradient is 0. */
static void run_keys(backward_worker *w, int64_t key_block)
{
    const backward_job *job = w->job;
    const cpu_backward_plan *b = job->backward;
    const int64_t group = job->plan->problem.group;
    const int64_t left = w->at.kv_len - key_block * job->g.keys;
    w->j0 = key_block * job->g.keys;
    w->n = (int32_t)(left < 0 ? 0 : smaller(left, job->g.keys));
    const int by_dims = b->kernels->turn_sums != NULL;
    const int64_t there = by_dims ? BACKWARD_KEYS : backward_keys_there(w);
    w->is_packed = 0;
    w->k_nonfinite = w->q_nonfinite = w->o_nonfinite = 0;
    if (b->has_dk)
        memset(w->dk, 0, (size_t)(there * job->g.dq_ld) * sizeof(float));
    if (b->has_dv)
        memset(w->dv, 0, (size_t)(there * job->g.dv_ld) * sizeof(float));
    for (w->h = w->g * group; w->h < (w->g + 1) * group; w->h++) {
        backward_begin_columns(w);
        w->rows_stored = 0;
        if (w->n)
            run_head(w);
        store_rest(w, job->run->sizes.Q);
    }
    if (b->has_dk) {
        clear_past(w, w->dk, job->g.dq_ld);
        store(w, job->gradients->dk, SACCADE_GRADIENT_K, w->dk, job->g.dq_ld,
              (float)job->plan->problem.scale);
    }
    if (b->has_dv) {
        clear_past(w, w->dv, job->g.dv_ld);
        store(w, job->gradients->dv, SACCADE_GRADIENT_V, w->dv, job->g.dv_ld,
              job->run->dropout.is_on ? job->run->dropout.factor : 1);
    }
}

static void clear_touched(const backward_worker *w, int64_t head)
{
    const backward_job *job = w->job;
    const int32_t group = job->plan->problem.group;
    for (int64_t h = head * group; h < (head + 1) * group; h++)
        memset(backward_touched_of(job, w->chunk, h), 0, (size_t)job->g.row_blocks);
}

void backward_run_item(void *arg, int64_t at, int thread)
{
    const backward_job *job = arg;
    const plan_run *run = job->run;
    const int32_t *order = (const int32_t *)(const void *)(job->memory + job->g.order_off);
    const int64_t index = order[at], head = index / job->g.chunks;
    backward_worker *w = backward_worker_of(job, thread);
    w->chunk = index % job->g.chunks;
    w->b = backward_head_of(job, head) / run->sizes.Hkv;
    w->g = backward_head_of(job, head) % run->sizes.Hkv;
    w->at = plan_position_of(&run->positions, run->sizes.KV, w->b);
    w->k = kv_view_of(run, run->k, w->b, w->g);
    w->v = kv_view_of(run, run->v, w->b, w->g);
    w->score_head = w->mask_head = w->jit_head = -1;
    const cpu_kernels *k = job->backward->kernels->block;
    if (job->backward->has_dq)
        clear_touched(w, head);
    backward_begin_sums(w, head);
    backward_begin_kept(w);
    if (k->begin)
        k->begin();
    for (int64_t n = w->chunk; n < job->g.key_blocks; n += job->g.chunks)
        run_keys(w, n);
    if (k->end)
        k->end();
    backward_end_kept(w);
}

/* Live cells or tiles of a block of keys, or where finding them would cost, all. */
static int64_t weight_of_keys(const backward_job *job, int64_t b, int64_t h, int64_t key_block)
{
    const int64_t keys = job->g.keys, j0 = key_block * keys, KV = job->run->sizes.KV;
    int64_t weight = 0;
    if (job->runs) {
        const run_walk walk = walk_runs(job, b, h, j0, smaller(KV - j0, keys));
        for (int32_t k = 0; k < walk.n; k++)
            for (const saccade_run *r = walk.at[k]; r < walk.end[k]; r++)
                weight += r->count;
        return weight;
    }
    if (job->live.by != CPU_BY_LIMITS)
        return job->g.row_blocks;
    for (int64_t n = 0; n < job->g.row_blocks; n++)
        weight += backward_cover_of(job, b, h, n, j0, j0 + keys, NULL) != CPU_EMPTY;
    return weight;
}

void backward_weigh_item(void *arg, int64_t index, int thread)
{
    const backward_job *job = arg;
    const plan_run *run = job->run;
    int64_t *weight = (int64_t *)(void *)(job->memory + job->g.weight_off);
    const int64_t head = backward_head_of(job, index / job->g.chunks);
    const int64_t group = job->plan->problem.group;
    const int64_t b = head / run->sizes.Hkv, h0 = head % run->sizes.Hkv * group;
    const int64_t kv_len = plan_position_of(&run->positions, run->sizes.KV, b).kv_len;
    (void)thread;
    weight[index] = 0;
    for (int64_t n = index % job->g.chunks; n * job->g.keys < kv_len; n += job->g.chunks)
        for (int64_t h = h0; h < h0 + group; h++)
            weight[index] += weight_of_keys(job, b, h, n);
}
