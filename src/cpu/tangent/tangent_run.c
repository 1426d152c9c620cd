/* A run of forward mode: keys and their rates are packed by waves of (batch, kv head), then
 * items run. */
#include "cpu/tangent/tangent.h"

#include "base/integers.h"
#include "base/parallel.h"
#include "base/status.h"

#include <string.h>

tangent_keys tangent_keys_of(const tangent_job *job, int64_t head, int64_t block)
{
    const tangent_geometry *g = &job->g;
    const size_t at = (size_t)(head * g->key_blocks + block);
    char *k = job->memory + at * 2 * (g->k_bytes + g->v_bytes);
    char *v = k + 2 * g->k_bytes;
    return (tangent_keys){.k = k,
                          .v = v,
                          .k_dot = job->t->k ? k + g->k_bytes : NULL,
                          .v_dot = job->t->v ? v + g->v_bytes : NULL,
                          .nonfinite = job->memory + g->flag_off + at};
}

/* par_fn over blocks of keys of the wave. */
static void pack(void *arg, int64_t index, int thread)
{
    const tangent_job *job = arg;
    const plan_run *run = job->run;
    const cpu_kernels *k = job->tangent->kernels->block;
    const int64_t head = index / job->g.key_blocks, block = index % job->g.key_blocks;
    const int64_t b = (job->head0 + head) / run->sizes.Hkv;
    const int64_t g = (job->head0 + head) % run->sizes.Hkv, j0 = block * CPU_BLOCK_KEYS;
    const int64_t left = plan_position_of(&run->positions, run->sizes.KV, b).kv_len - j0;
    const tangent_keys to = tangent_keys_of(job, head, block);
    (void)thread;
    if (left <= 0)
        return;
    const int32_t n = (int32_t)smaller(left, CPU_BLOCK_KEYS);
    const int32_t padded = (int32_t)round_up(n, 32);
    const saccade_tensor *keys[] = {run->k, job->t->k}, *values[] = {run->v, job->t->v};
    char *packed[] = {to.k, to.k_dot, to.v, to.v_dot};
    *to.nonfinite = 0;
    for (int i = 0; i < 2; i++) {
        if (keys[i]) {
            const cpu_rows rows = cpu_rows_from(cpu_rows_of(keys[i], b, g), j0);
            k->pack_keys(&rows, n, padded, packed[i]);
        }
        if (values[i]) {
            const cpu_rows rows = cpu_rows_from(cpu_rows_of(values[i], b, g), j0);
            if (k->pack_values(&rows, n, padded, packed[2 + i]))
                *to.nonfinite = 1;
        }
    }
}

/* The graph's captures: those of the run, then their rates, or zeros where none are given. */
static void bind_rates(tangent_job *job)
{
    static float zero;
    const eval_env *env = &job->run->score_env;
    const mod_fn *score = job->plan->problem.score;
    job->score_env = *env;
    if (!score)
        return;
    for (uint32_t c = 0; c < score->n_captures; c++) {
        const int32_t twin = job->tangent->twin[c];
        job->captures[c] = env->tensors[c];
        if (twin < 0)
            continue;
        job->captures[twin] = job->t->captures[c];
        if (job->t->captures[c].data)
            continue;
        job->captures[twin] = env->tensors[c];
        job->captures[twin].dtype = SACCADE_F32;
        job->captures[twin].data = &zero;
        memset(job->captures[twin].stride, 0, sizeof job->captures[twin].stride);
    }
    job->score_env.tensors = job->captures;
}

saccade_status cpu_tangent(const saccade_plan *plan, const cpu_tangent_plan *tangent,
                           const plan_run *run, const plan_tangents *t, saccade_error *err)
{
    const saccade_sizes *s = &run->sizes;
    tangent_job job = {.plan = plan, .tangent = tangent, .run = run, .t = t};
    TRY(cpu_live_of(&plan->problem, run, &job.live, err));
    job.memory = run->workspace;
    job.g = tangent_geometry_of(plan, tangent, s);
    bind_rates(&job);
    tangent_begin_threads(&job);
    if (s->Q == 0)
        return SACCADE_OK;
    const int64_t heads = s->B * s->Hkv, blocks = s->KV ? job.g.key_blocks : 0;
    for (; job.head0 < heads; job.head0 += job.g.wave) {
        const int64_t n = smaller(heads - job.head0, job.g.wave);
        par_for(n * blocks, plan->threads, pack, &job);
        par_for(n * plan->problem.group * job.g.row_blocks, plan->threads, tangent_run_item,
                &job);
    }
    return SACCADE_OK;
}
