/* Keys of a run as codes, as --kv-dtype and --kv-scale ask. */
#ifndef SACCADE_CLI_PUT_CODES_H
#define SACCADE_CLI_PUT_CODES_H

#include "cli.h"

/* What shares a scale, as the problem's k_scale_tokens and k_scale_channels say it. */
typedef struct code_groups {
    saccade_dtype dtype; /* NONE: no codes */
    int32_t tokens, channels;
    bool is_one; /* of all batches and heads */
} code_groups;

/* name: NULL is no codes; scale: NULL is a scale for each row. */
saccade_status code_groups_of(const char *name, const char *scale, code_groups *out,
                              saccade_error *err);

typedef struct coded {
    saccade_tensor k, v, k_scale, v_scale; /* on the host */
} coded;

/* k and v: [B, Hkv, KV, dim] on the host. */
saccade_status coded_make(const saccade_tensor *k, const saccade_tensor *v,
                          const code_groups *groups, coded *out, saccade_error *err);
void coded_free(coded *c);

#endif
