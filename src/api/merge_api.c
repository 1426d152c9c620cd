/* saccade_merge: attention over parts of the keys becomes attention over all.
 *     m = max lse_i    w_i = exp(lse_i - m)
 *     out = sum w_i out_i / sum w_i    lse = m + log sum w_i
 * Weights and sums are double, in the order of the parts. A dead part (lse -inf) is skipped, so
 * that what its out holds never shows; without a live part out is 0 and lse -inf. A part whose
 * lse is NaN or +inf makes the row NaN. Rows are independent. */
#include "api/api.h"

#include "base/convert.h"
#include "base/parallel.h"

#include <math.h>
#include <string.h>

typedef struct merge_job {
    const saccade_merge_args *args;
    saccade_sizes sizes;
} merge_job;

static double load(const saccade_tensor *t, int64_t at)
{
    return convert_element(t->dtype,
                           (const char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype));
}

static void put(const saccade_tensor *t, int64_t at, double x)
{
    convert_to_element(t->dtype, x,
                       (char *)t->data + at * (int64_t)saccade_dtype_bytes(t->dtype));
}

static int64_t row_offset(const saccade_tensor *t, int64_t b, int64_t h, int64_t i)
{
    return b * t->stride[0] + h * t->stride[1] + i * t->stride[2];
}

/* Largest lse of the parts; NaN where one is NaN or +inf. */
static double largest(const merge_job *job, int64_t b, int64_t h, int64_t i)
{
    double most = -INFINITY;
    for (int32_t n = 0; n < job->args->n; n++) {
        const saccade_tensor *t = &job->args->lses[n];
        const double lse = load(t, row_offset(t, b, h, i));
        if (isnan(lse) || lse == INFINITY)
            return NAN;
        most = lse > most ? lse : most;
    }
    return most;
}

/* Sum over live parts of w_i times the element d of their out, or of w_i (d < 0). */
static double weighed(const merge_job *job, int64_t b, int64_t h, int64_t i, double most,
                      int64_t d)
{
    const saccade_merge_args *a = job->args;
    double sum = 0;
    for (int32_t n = 0; n < a->n; n++) {
        const double lse = load(&a->lses[n], row_offset(&a->lses[n], b, h, i));
        if (lse != -INFINITY)
            sum += exp(lse - most)
                   * (d < 0 ? 1 : load(&a->outs[n], row_offset(&a->outs[n], b, h, i) + d));
    }
    return sum;
}

static void merge_row(void *arg, int64_t item, int thread)
{
    const merge_job *job = arg;
    const saccade_merge_args *a = job->args;
    const saccade_sizes *s = &job->sizes;
    const int64_t b = item / s->Q / s->H, h = item / s->Q % s->H, i = item % s->Q;
    const double most = largest(job, b, h, i);
    const double all = most == -INFINITY ? 1 : weighed(job, b, h, i, most, -1);
    (void)thread;
    for (int64_t d = 0; d < s->Dv; d++) /* out may be a part's: each element is read first */
        put(a->out, row_offset(a->out, b, h, i) + d, weighed(job, b, h, i, most, d) / all);
    if (a->lse)
        put(a->lse, row_offset(a->lse, b, h, i), most + log(all));
}

/* ---- arguments ---- */

static saccade_status check_parts(const saccade_merge_args *a, merge_job *job,
                                  saccade_error *err)
{
    int64_t out[4] = {0}, lse[3];
    FAIL_AT(a->n < 1 || !a->outs || !a->lses, SACCADE_EINVAL, "parts", 0, 0,
            "got %d, expected 1 or more and arrays of their out and lse", a->n);
    const saccade_dtype dtype = a->lses[0].dtype == SACCADE_F64 ? SACCADE_F64 : SACCADE_F32;
    for (int32_t n = 0; n < a->n; n++) {
        const api_expected out_n = {"outs", dtype, 4, SACCADE_CPU};
        const api_expected lse_n = {"lses", dtype, 3, SACCADE_CPU};
        TRY(api_check_tensor(&a->outs[n], &out_n, out, err));
        memcpy(lse, out, sizeof lse);
        TRY(api_check_tensor(&a->lses[n], &lse_n, lse, err));
    }
    job->sizes = (saccade_sizes){.B = out[0], .H = out[1], .Q = out[2], .Dv = out[3]};
    return SACCADE_OK;
}

static saccade_status check_result(const saccade_merge_args *a, const saccade_sizes *s,
                                   saccade_error *err)
{
    int64_t out[4] = {s->B, s->H, s->Q, s->Dv};
    FAIL_AT(!a->out, SACCADE_EINVAL, "out", 0, 0, "got NULL, expected a tensor");
    const saccade_dtype dtype = a->out->dtype;
    const api_expected out_x = {"out", dtype, 4, SACCADE_CPU};
    const api_expected lse_x = {"lse", a->lses[0].dtype, 3, SACCADE_CPU};
    FAIL_AT(dtype != SACCADE_F32 && dtype != SACCADE_F16 && dtype != SACCADE_BF16
                && dtype != SACCADE_F64,
            SACCADE_EINVAL, "out", 0, 0, "got dtype %s, expected f32, f16, bf16 or f64",
            saccade_dtype_name(dtype));
    TRY(api_check_tensor(a->out, &out_x, out, err));
    TRY(api_check_output(a->out, "out", err));
    if (!a->lse)
        return SACCADE_OK;
    TRY(api_check_tensor(a->lse, &lse_x, out, err));
    return api_check_output(a->lse, "lse", err);
}

saccade_status saccade_merge(const saccade_context *context, const saccade_merge_args *args,
                             saccade_error *err)
{
    saccade_merge_args a;
    merge_job job = {.args = &a};
    saccade_merge_args_init(&a);
    TRY(RECORD_READ(&a, args, "arguments"));
    TRY(check_parts(&a, &job, err));
    TRY(check_result(&a, &job.sizes, err));
    par_for(job.sizes.B * job.sizes.H * job.sizes.Q, context ? context->threads : 0, merge_row,
            &job);
    return SACCADE_OK;
}
