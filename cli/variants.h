/* variants.h: the eight variants of the tables, in the language and nothing else. */
#ifndef SACCADE_CLI_VARIANTS_H
#define SACCADE_CLI_VARIANTS_H

#include "cli.h"

typedef struct cli_variant {
    const char *name, *mask, *score, *bind; /* NULL: none */
} cli_variant;

enum { VARIANTS = 8 };
extern const cli_variant cli_variants[VARIANTS];
/* The same at the widths that FlexAttention's GPU figures are given for, at 16384 keys. */
extern const cli_variant cli_long_variants[VARIANTS];

/* Puts the variant's texts into arguments that have none. */
void variant_apply(const cli_variant *variant, cli_args *args);
const cli_variant *variant_find(const char *name);

#endif
