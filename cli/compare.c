/* Results against float64. Pass: max|x - gold| <= 2 max|plain - gold| + 2 ulp(dtype) at
 * max|gold|; lse: 2x plain + 4 ulp of f32. Infinities and NaN must be the truth's own. */
#include "compare.h"
#include "floats.h"

#include <math.h>

static double ulp(saccade_dtype dtype, double at)
{
    const int bits = dtype == SACCADE_F64    ? 52
                     : dtype == SACCADE_F32  ? 23
                     : dtype == SACCADE_BF16 ? 7
                                             : 10;
    return at > 0 ? ldexp(1, ilogb(at) - bits) : 0;
}

/* Offset of the i-th element, counted row-major, of a strided tensor. */
static int64_t offset_of(const saccade_tensor *t, int64_t i)
{
    int64_t offset = 0;
    for (int32_t d = t->rank - 1; d >= 0; d--) {
        offset += i % t->shape[d] * t->stride[d];
        i /= t->shape[d];
    }
    return offset;
}

static double difference(double got, double gold)
{
    if (isnan(gold) || isinf(gold))
        return (isnan(gold) && isnan(got)) || got == gold ? 0 : INFINITY;
    return isfinite(got) ? fabs(got - gold) : INFINITY;
}

static void compare(const saccade_tensor *got, const saccade_tensor *gold, double *worst,
                    double *rms, double *most)
{
    const int64_t n = floats_count(gold);
    double sum = 0;
    *worst = *most = 0;
    for (int64_t i = 0; i < n; i++) {
        const double g = floats_get(gold->data, gold->dtype, offset_of(gold, i));
        const double d = difference(floats_get(got->data, got->dtype, offset_of(got, i)), g);
        *worst = fmax(*worst, d);
        *most = isfinite(g) ? fmax(*most, fabs(g)) : *most;
        sum += d * d;
    }
    *rms = sqrt(sum / (double)n);
}

double compare_worst(const saccade_tensor *got, const saccade_tensor *gold)
{
    double worst, rms, most;
    compare(got, gold, &worst, &rms, &most);
    return worst;
}

double compare_allowed(const saccade_tensor *plain, const saccade_tensor *gold,
                       saccade_dtype dtype)
{
    double worst, rms, most;
    compare(plain, gold, &worst, &rms, &most);
    return 2 * worst + 2 * ulp(dtype, most);
}

double compare_most(const saccade_tensor *t)
{
    double worst, rms, most;
    compare(t, t, &worst, &rms, &most);
    return most;
}

double compare_longest_row(const saccade_tensor *t)
{
    const int64_t n = floats_count(t), columns = t->shape[t->rank - 1];
    double longest = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const double x = floats_get(t->data, t->dtype, offset_of(t, i));
        sum = (i % columns ? sum : 0) + (isfinite(x) ? x * x : 0);
        longest = fmax(longest, sum);
    }
    return sqrt(longest);
}

void compare_results(const job_tensors *got, const job_tensors *gold, deviation *out)
{
    double unused;
    compare(&got->out, &gold->out, &out->out, &out->rms_out, &out->most_out);
    compare(&got->lse, &gold->lse, &out->lse, &unused, &out->most_lse);
}

static saccade_status measure(const job *j, const engine_options *options, const job_tensors *t,
                              yardstick *y, saccade_error *err)
{
    engine_options ref = *options, plain = *options;
    job_tensors naive;
    ref.backend = "ref";
    plain.backend = "plain";
    ref.level = plain.level = NULL;
    CLI_TRY(job_tensors_copy(t, SACCADE_F64, &y->gold, err));
    CLI_TRY(engine_once(j, &ref, &y->gold, NULL, err));
    CLI_TRY(job_tensors_copy(t, t->q.dtype, &naive, err));
    const saccade_status status = engine_once(j, &plain, &naive, NULL, err);
    if (status == SACCADE_OK)
        compare_results(&naive, &y->gold, &y->plain);
    job_tensors_free(&naive);
    y->allowed_out = 2 * y->plain.out + 2 * ulp(t->q.dtype, y->plain.most_out);
    y->allowed_lse = 2 * y->plain.lse + 4 * ulp(SACCADE_F32, y->plain.most_lse);
    return status;
}

saccade_status yardstick_open(const job *j, const engine_options *options, const job_tensors *t,
                              yardstick *out, saccade_error *err)
{
    *out = (yardstick){.allowed_out = 0};
    const saccade_status status = measure(j, options, t, out, err);
    if (status != SACCADE_OK)
        yardstick_close(out);
    return status;
}

void yardstick_close(yardstick *y)
{
    job_tensors_free(&y->gold);
}

bool yardstick_holds(const yardstick *y, const deviation *d)
{
    return d->out <= y->allowed_out && d->lse <= y->allowed_lse;
}
