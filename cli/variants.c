/* The eight variants of the tables, as FlexAttention (arXiv 2412.05496, section 5) runs them:
 * ALiBi and soft cap on causal attention, documents see all of themselves. */
#include "variants.h"

#include <string.h>

/* clang-format off */
const cli_variant cli_variants[VARIANTS] = {
    {"full",           NULL,                   NULL,              NULL},
    {"causal",         "causal()",             NULL,              NULL},
    {"relative_bias",  NULL,                   "relative_bias()", NULL},
    {"alibi",          "causal()",             "alibi()",         NULL},
    {"sliding_window", "sliding_window(256)",  NULL,              NULL},
    {"prefix_lm",      "prefix_lm(KV / 4)",    NULL,              NULL},
    {"softcap",        "causal()",             "softcap(20.0)",   NULL},
    {"document",       "document(doc)",        NULL,              "doc=i32[KV]:docs(12)"},
};

const cli_variant cli_long_variants[VARIANTS] = {
    {"full",           NULL,                            NULL,              NULL},
    {"causal",         "causal()",                      NULL,              NULL},
    {"relative_bias",  NULL,                            "relative_bias()", NULL},
    {"alibi",          "causal()",                      "alibi()",         NULL},
    {"sliding_window", "sliding_window(1024)",          NULL,              NULL},
    {"prefix_lm",      "prefix_lm(2048)",               NULL,              NULL},
    {"softcap",        "causal()",                      "softcap(20.0)",   NULL},
    {"document",       "document(doc) && causal()",     NULL,  "doc=i32[KV]:docs(12)"},
};
/* clang-format on */

void variant_apply(const cli_variant *variant, cli_args *args)
{
    args->mask = variant->mask;
    if (variant->score)
        args->score.item[args->score.n++] = variant->score;
    if (variant->bind)
        args->bind.item[args->bind.n++] = variant->bind;
}

const cli_variant *variant_find(const char *name)
{
    for (int i = 0; i < VARIANTS; i++)
        if (strcmp(cli_variants[i].name, name) == 0)
            return &cli_variants[i];
    return NULL;
}
