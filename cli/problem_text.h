/* problem_text.h: "b2 h16/4 q4096 kv4096 d128 dv64 bf16", the one grammar of problems. */
#ifndef SACCADE_CLI_PROBLEM_TEXT_H
#define SACCADE_CLI_PROBLEM_TEXT_H

#include "cli.h"

saccade_status problem_read(const char *text, saccade_sizes *sizes, saccade_dtype *dtype,
                            saccade_error *err);
enum { PROBLEM_BYTES = 128 };
void problem_show(const saccade_sizes *sizes, saccade_dtype dtype, char *out);

#endif
