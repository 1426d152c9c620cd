/* Keys of a run as codes and scales. */
#include "put_codes.h"

#include <stdlib.h>
#include <string.h>

saccade_status code_groups_of(const char *name, const char *scale, code_groups *out,
                              saccade_error *err)
{
    static const saccade_dtype codes[] = {SACCADE_E4M3, SACCADE_E5M2, SACCADE_I8, SACCADE_I4};
    static const struct {
        const char *name;
        code_groups groups;
    } scales[] = {{"row", {.tokens = 1}},
                  {"head", {.tokens = 0}},
                  {"channel", {.channels = 1}},
                  {"tensor", {.is_one = true}}};
    const char *wanted = scale ? scale : scales[0].name;
    size_t n = 0, s = 0;
    *out = (code_groups){.dtype = SACCADE_NONE};
    CLI_FAIL_IF(scale && !name, SACCADE_EINVAL, "--kv-scale",
                "got it alone, expected --kv-dtype with it");
    if (!name)
        return SACCADE_OK;
    while (n < sizeof codes / sizeof codes[0]
           && strcmp(name, saccade_dtype_name(codes[n])) != 0)
        n++;
    CLI_FAIL_IF(n == sizeof codes / sizeof codes[0], SACCADE_EINVAL, "--kv-dtype",
                "got '%.20s', expected e4m3, e5m2, i8 or i4", name);
    while (s < sizeof scales / sizeof scales[0] && strcmp(wanted, scales[s].name) != 0)
        s++;
    CLI_FAIL_IF(s == sizeof scales / sizeof scales[0], SACCADE_EINVAL, "--kv-scale",
                "got '%.20s', expected row, head, channel or tensor", wanted);
    *out = scales[s].groups;
    out->dtype = codes[n];
    return SACCADE_OK;
}

/* Rows of i4 begin at whole bytes: those of an odd length take one place more. */
static void even_rows(saccade_tensor *t)
{
    int64_t stride = t->shape[3] + t->shape[3] % 2;
    for (int32_t d = 2; d >= 0; d--) {
        t->stride[d] = stride;
        stride *= t->shape[d];
    }
}

static saccade_status encode(const saccade_tensor *from, const code_groups *groups,
                             saccade_tensor *to, saccade_tensor *scale, saccade_error *err)
{
    const int64_t *n = from->shape;
    const int64_t shape[] = {groups->is_one ? 1 : n[0], groups->is_one ? 1 : n[1],
                             groups->tokens ? n[2] : 1, groups->channels ? n[3] : 1};
    const size_t codes = (size_t)(n[0] * n[1] * n[2] * n[3]); /* bytes; i4 needs no more */
    const size_t scales = (size_t)(shape[0] * shape[1] * shape[2] * shape[3]);
    saccade_quantize_args args;
    *to = saccade_tensor_of(malloc(codes), groups->dtype, 4, n);
    if (groups->dtype == SACCADE_I4)
        even_rows(to);
    *scale = saccade_tensor_of(malloc(scales * sizeof(float)), SACCADE_F32, 4, shape);
    CLI_FAIL_IF(!to->data || !scale->data, SACCADE_ENOMEM, "--kv-dtype", "out of memory");
    saccade_quantize_args_init(&args);
    args.from = from;
    args.to = to;
    args.scale = scale;
    args.tokens = groups->tokens;
    args.channels = groups->channels;
    return saccade_quantize(NULL, &args, err);
}

saccade_status coded_make(const saccade_tensor *k, const saccade_tensor *v,
                          const code_groups *groups, coded *out, saccade_error *err)
{
    coded made = {.k = {.data = NULL}};
    saccade_status status;
    CLI_TRY_GOTO(encode(k, groups, &made.k, &made.k_scale, err));
    CLI_TRY_GOTO(encode(v, groups, &made.v, &made.v_scale, err));
    *out = made;
    return SACCADE_OK;
out:
    coded_free(&made);
    return status;
}

void coded_free(coded *c)
{
    free(c->k.data);
    free(c->v.data);
    free(c->k_scale.data);
    free(c->v_scale.data);
    *c = (coded){.k = {.data = NULL}};
}
