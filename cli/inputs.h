/* inputs.h: values of --bind: numbers, files, and synthetic tensors. */
#ifndef SACCADE_CLI_INPUTS_H
#define SACCADE_CLI_INPUTS_H

#include "cli.h"

/* `text` is a number ("256", "0x1f", "0.5", "true"), a file ("doc.npy") or synthetic:
 *     DTYPE[SIZE, ...]:KIND, where SIZE is a number or one of B H Hkv Q KV D Dv and KIND one of
 *     iota  zeros  const(x)  normal  uniform(lo, hi)  randint(n)  docs(n)  bernoulli(p)
 * The same name and text give the same values. free(out->data). */
saccade_status input_value(const char *name, const char *text, const saccade_sizes *sizes,
                           saccade_tensor *out, saccade_error *err);

/* The file that such a value or a text names, or NULL; of NULL too. */
const char *input_file_of_value(const char *text);
const char *input_file_of_text(const char *text);

/* "12" or a file of ints: an i32 tensor of rank 0 or 1. where: the option. free(out->data). */
saccade_status input_positions(const char *where, const char *text, saccade_tensor *out,
                               saccade_error *err);
/* An i32 scalar; free(out->data). */
saccade_status input_scalar(const char *where, int64_t value, saccade_tensor *out,
                            saccade_error *err);
/* `text`, or what the file behind `@file` holds; free(*out). */
saccade_status input_text(const char *where, const char *text, char **out, size_t *bytes,
                          saccade_error *err);

#endif
