/* saccade check --backward: gradients of every way against float64: by the rule of forward's
 * output, twice a plain computation's error and two units in the last place, and what f32 loses
 * where dP - delta cancels, as it does wholly in a row of one live key, whose plain gradients
 * may be exact. */
#include "check.h"
#include "compare.h"
#include "engine_backward.h"
#include "floats.h"

#include <math.h>
#include <string.h>

typedef struct truth {
    job_tensors tensors;
    backward gradients;
    double allowed[BACKWARD_MOST];
} truth;

static void print_header(verdict *all)
{
    if (all->has_header)
        return;
    all->has_header = true;
    printf("%-40s %-16s %-5s %-8s %9s %9s %9s %9s %8s  %s\n", "problem", "variant", "on",
           "level", "dq", "dk", "dv", "captured", "of bound", "verdict");
}

/* One forward and one backward run on t by this back end; d_out: of any dtype. */
static saccade_status run_once(const job *j, const engine_options *options,
                               const job_tensors *t, const saccade_tensor *d_out, backward *out,
                               saccade_error *err)
{
    engine_options o = *options;
    cli_list captures;
    engine e;
    backward_captures(j, 2, &captures);
    o.gradients = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V;
    if (captures.n) {
        o.gradients |= SACCADE_GRADIENT_CAPTURES;
        o.grad_of = &captures;
    }
    CLI_TRY(engine_open(j, &o, t, &e, err));
    saccade_status status = engine_run(&e, NULL, err);
    if (status == SACCADE_OK)
        status = backward_new(t, 0, out, err);
    for (int64_t i = 0; i < floats_count(d_out) && status == SACCADE_OK; i++)
        floats_set(out->d_out.data, out->d_out.dtype, i,
                   floats_get(d_out->data, d_out->dtype, i));
    for (int i = 0; i < captures.n && status == SACCADE_OK; i++)
        status =
            backward_add_capture(out, j, captures.item[i], t->q.dtype, false, "check", err);
    if (status == SACCADE_OK)
        status = backward_bind(out, &e, err);
    if (status == SACCADE_OK)
        status = backward_run(out, &e, NULL, err);
    if (status == SACCADE_OK)
        status = backward_fetch(out, err);
    engine_close(&e);
    return status;
}

/* What f32 may lose of dq, dk, dv and captures' gradients, of the size of their largest terms:
 * dP and delta are at most |dO| |V|, and dQ and dK have such terms times the scale and K or Q.
 * A weight is off by an exponential's two ulp and by its score's rounding, which grows as lse
 * does. */
static void find_lost(double scale, const job_tensors *gold, const saccade_tensor *d_out,
                      double lost[BACKWARD_QKV + 1])
{
    const double s = isnan(scale) ? 1 / sqrt((double)gold->q.shape[3]) : fabs(scale);
    const double off = 0x1p-24 * (4 + compare_most(&gold->lse));
    const double row = compare_longest_row(d_out), dp = row * compare_longest_row(&gold->v);
    lost[0] = off * dp * s * compare_longest_row(&gold->k);
    lost[1] = off * dp * s * compare_longest_row(&gold->q);
    lost[2] = off * row;
    lost[BACKWARD_QKV] = off * dp;
}

static saccade_status find_allowed(const job *j, const engine_options *options,
                                   const job_tensors *t, const saccade_tensor *d_out,
                                   truth *gold, saccade_error *err)
{
    engine_options plain = *options;
    backward g = {.n = 0};
    double lost[BACKWARD_QKV + 1];
    job_tensors copy;
    plain.backend = "plain";
    plain.level = NULL;
    CLI_TRY(job_tensors_copy(t, t->q.dtype, &copy, err));
    const saccade_status status = run_once(j, &plain, &copy, d_out, &g, err);
    find_lost(options->scale, &gold->tensors, d_out, lost);
    for (int i = 0; i < g.n && status == SACCADE_OK; i++) {
        const double rounded =
            compare_allowed(&g.tensor[i], &gold->gradients.tensor[i], t->q.dtype);
        gold->allowed[i] = rounded + lost[i < BACKWARD_QKV ? i : BACKWARD_QKV];
    }
    backward_free(&g);
    job_tensors_free(&copy);
    return status;
}

static saccade_status find_truth(const job *j, const engine_options *options,
                                 const job_tensors *t, const saccade_tensor *d_out, truth *gold,
                                 saccade_error *err)
{
    engine_options ref = *options;
    ref.backend = "ref";
    ref.level = NULL;
    CLI_TRY(job_tensors_copy(t, SACCADE_F64, &gold->tensors, err));
    CLI_TRY(run_once(j, &ref, &gold->tensors, d_out, &gold->gradients, err));
    return find_allowed(j, options, t, d_out, gold, err);
}

static void print_way(const check_row *row, const check_way *way, const backward *g,
                      const truth *gold, verdict *all)
{
    double worst[BACKWARD_QKV + 1] = {0}, of_bound = 0;
    bool holds = true;
    for (int i = 0; i < g->n; i++) {
        const double d = compare_worst(&g->tensor[i], &gold->gradients.tensor[i]);
        double *to = &worst[i < BACKWARD_QKV ? i : BACKWARD_QKV];
        *to = fmax(*to, d);
        holds &= d <= gold->allowed[i];
        of_bound = fmax(of_bound, d > 0 ? d / gold->allowed[i] : 0);
    }
    print_header(all);
    printf("%-40s %-16s %-5s %-8s %9.2e %9.2e %9.2e %9.2e %8.2f  %s\n", row->problem, row->name,
           way->backend, way->level ? way->level : "", worst[0], worst[1], worst[2], worst[3],
           of_bound, holds ? "ok" : "FAILED");
    all->is_good &= holds;
    all->rows++;
}

static saccade_status try_way(const job *j, const engine_options *options, const check_way *way,
                              const job_tensors *t, const saccade_tensor *d_out,
                              const truth *gold, const check_row *row, verdict *all,
                              saccade_error *err)
{
    engine_options o = *options;
    backward g = {.n = 0};
    o.backend = way->backend;
    o.level = way->level;
    saccade_status status = run_once(j, &o, t, d_out, &g, err);
    if (status == SACCADE_OK)
        print_way(row, way, &g, gold, all);
    backward_free(&g);
    if (status == SACCADE_EBACKEND) {
        all->left_out = *err;
        status = SACCADE_OK;
    }
    return status;
}

saccade_status check_backward(const job *j, const engine_options *options, const job_tensors *t,
                              const check_row *row, verdict *all, saccade_error *err)
{
    truth gold = {.allowed = {0}};
    backward random = {.n = 0};
    saccade_status status;
    cli_progress("%s %s", row->problem, row->name);
    CLI_TRY_GOTO(backward_new(t, 7, &random, err));
    CLI_TRY_GOTO(find_truth(j, options, t, &random.d_out, &gold, err));
    cli_progress(NULL);
    for (int n = 0; n < CHECK_WAYS && status == SACCADE_OK; n++)
        if (check_wants(options, &check_ways[n]))
            status =
                try_way(j, options, &check_ways[n], t, &random.d_out, &gold, row, all, err);
out:
    cli_progress(NULL);
    backward_free(&random);
    backward_free(&gold.gradients);
    job_tensors_free(&gold.tensors);
    return status;
}
