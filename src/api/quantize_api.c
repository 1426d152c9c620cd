/* saccade_quantize: the codes and scales of a K or V, group by group. A group is the rows and
 * channels that share a scale, over all batches and heads where the scale tensor has one. */
#include "api/api.h"

#include "base/convert.h"
#include "base/parallel.h"
#include "base/quantize.h"

#include <string.h>

/* Elements that are widened at a time. */
enum { PIECE = 256 };

typedef struct quantize_job {
    const saccade_quantize_args *args;
    plan_groups groups;
    int64_t n[4]; /* groups in each dimension */
} quantize_job;

/* The elements of a group: from begin[i] to end[i] in dimension i. */
typedef struct quantize_box {
    int64_t begin[4], end[4];
} quantize_box;

static int64_t span_of(const quantize_job *job, int dimension)
{
    if (dimension < 2)
        return job->args->scale->shape[dimension] == 1 ? 0 : 1;
    return dimension == 2 ? job->groups.tokens : job->groups.channels;
}

static quantize_box box_of(const quantize_job *job, const int64_t at[4])
{
    quantize_box box;
    for (int i = 0; i < 4; i++) {
        const int64_t all = job->args->from->shape[i], span = span_of(job, i);
        box.begin[i] = span ? at[i] * span : 0;
        box.end[i] = span && box.begin[i] + span < all ? box.begin[i] + span : all;
    }
    return box;
}

static int64_t offset(const saccade_tensor *t, int64_t b, int64_t h, int64_t n)
{
    return b * t->stride[0] + h * t->stride[1] + n * t->stride[2];
}

/* Largest magnitude of a part of a row, or its codes. */
static void visit_row(const quantize_job *job, const quantize_box *box, int64_t b, int64_t h,
                      int64_t n, float *most, const float *scale)
{
    const saccade_tensor *from = job->args->from, *to = job->args->to;
    const int64_t bytes = (int64_t)saccade_dtype_bytes(from->dtype);
    const char *row = (const char *)from->data + offset(from, b, h, n) * bytes;
    char *codes = (char *)to->data + quant_bytes(to->dtype, offset(to, b, h, n));
    float x[PIECE];
    for (int64_t d = box->begin[3]; d < box->end[3]; d += PIECE) {
        const int64_t left = box->end[3] - d, count = left < PIECE ? left : PIECE;
        convert_to_f32(from->dtype, row + d * bytes, x, count);
        if (scale) {
            quant_encode(to->dtype, x, count, *scale, codes, d);
            continue;
        }
        const float found = quant_most(to->dtype, x, count);
        *most = found > *most || found != found ? found : *most;
    }
}

static void visit(const quantize_job *job, const quantize_box *box, float *most,
                  const float *scale)
{
    for (int64_t b = box->begin[0]; b < box->end[0]; b++)
        for (int64_t h = box->begin[1]; h < box->end[1]; h++)
            for (int64_t n = box->begin[2]; n < box->end[2]; n++)
                visit_row(job, box, b, h, n, most, scale);
}

static void quantize_group(const quantize_job *job, const int64_t at[4])
{
    const saccade_tensor *t = job->args->scale;
    const quantize_box box = box_of(job, at);
    int64_t place = 0;
    float most = 0, scale;
    for (int i = 0; i < 4; i++)
        place += at[i] * t->stride[i];
    char *to = (char *)t->data + place * (int64_t)saccade_dtype_bytes(t->dtype);
    if (job->args->is_given) {
        convert_to_f32(t->dtype, to, &scale, 1);
    } else {
        visit(job, &box, &most, NULL);
        scale = quant_scale(job->args->to->dtype, t->dtype, most);
        convert_from_f32(t->dtype, &scale, to, 1);
    }
    visit(job, &box, NULL, &scale);
}

/* All groups of channels of one group of rows: two nibbles of a byte belong to one thread. */
static void quantize_rows(void *arg, int64_t item, int thread)
{
    const quantize_job *job = arg;
    int64_t at[4] = {item / job->n[2] / job->n[1], item / job->n[2] % job->n[1],
                     item % job->n[2], 0};
    (void)thread;
    for (; at[3] < job->n[3]; at[3]++)
        quantize_group(job, at);
}

static saccade_status check_numbers(const saccade_tensor *from, int64_t *shape,
                                    saccade_error *err)
{
    const int is_number = from
                          && (from->dtype == SACCADE_F32 || from->dtype == SACCADE_F16
                              || from->dtype == SACCADE_BF16);
    FAIL_AT(from && !is_number, SACCADE_EINVAL, "from", 0, 0,
            "got dtype %s, expected f32, f16 or bf16", saccade_dtype_name(from->dtype));
    const api_expected expected = {"from", from ? from->dtype : SACCADE_F32, 4, SACCADE_CPU};
    return api_check_tensor(from, &expected, shape, err);
}

static saccade_status check_codes(const saccade_tensor *to, int64_t *shape, saccade_error *err)
{
    FAIL_AT(to && !quant_is_dtype(to->dtype), SACCADE_EINVAL, "to", 0, 0,
            "got dtype %s, expected e4m3, e5m2, i8 or i4", saccade_dtype_name(to->dtype));
    const api_expected expected = {"to", to ? to->dtype : SACCADE_I8, 4, SACCADE_CPU};
    TRY(api_check_tensor(to, &expected, shape, err));
    for (int i = 0; i < 3; i++)
        FAIL_AT(to->dtype == SACCADE_I4 && to->stride[i] % 2 != 0, SACCADE_EINVAL, "to", 0, 0,
                "got stride %lld in dimension %d of i4, expected an even number",
                (long long)to->stride[i], i);
    return api_check_output(to, "to", err);
}

saccade_status saccade_quantize(const saccade_context *context,
                                const saccade_quantize_args *args, saccade_error *err)
{
    saccade_quantize_args a;
    saccade_context defaults;
    int64_t shape[4] = {0};
    FAIL_AT(!args, SACCADE_EINVAL, "quantize", 0, 0, "got NULL, expected arguments");
    saccade_quantize_args_init(&a);
    TRY(RECORD_READ(&a, args, "arguments"));
    TRY(check_numbers(a.from, shape, err));
    TRY(check_codes(a.to, shape, err));
    FAIL_AT(a.tokens < 0 || a.channels < 0, SACCADE_EINVAL, "groups", 0, 0,
            "got %d rows, %d channels, expected 0 (all) or more", a.tokens, a.channels);
    FAIL_AT(!a.scale, SACCADE_EINVAL, "scale", 0, 0, "got NULL, expected a tensor");
    quantize_job job = {.args = &a, .groups = {a.tokens, a.channels}};
    TRY(plan_check_scales(a.scale, "scale", shape, &job.groups, SACCADE_CPU, err));
    if (!a.is_given)
        TRY(api_check_output(a.scale, "scale", err));
    if (!context) {
        TRY(api_context(NULL, &defaults, err));
        context = &defaults;
    }
    for (int i = 0; i < 4; i++) {
        const int64_t span = span_of(&job, i), all = shape[i];
        job.n[i] = span ? (all + span - 1) / span : 1;
    }
    par_for(job.n[0] * job.n[1] * job.n[2], context->threads, quantize_rows, &job);
    return SACCADE_OK;
}
