/* CUDA text of a mod: its captures, its score (emit_score.c), its mask (emit_mask.c), both by
 * nodes (emit_nodes.c). */
#include "cuda/emit/emit.h"

/* scratch NULL: the score for forward; else value and derivative, made there */
static saccade_status emit_both(const plan_problem *problem, arena *scratch, strbuf *out,
                                cu_mod_text *facts, saccade_error *err)
{
    static const char *const scores[] = {"SCORE_NONE", "SCORE_AFFINE", "SCORE_GENERAL"};
    static const char *const masks[] = {"MASK_NONE", "MASK_INTERVAL", "MASK_GENERAL"};
    emitter e = {.problem = problem, .out = out};
    const int n_score = problem->score ? (int)problem->score->n_captures : 0;
    const int n_mask = problem->mask ? (int)problem->mask->n_captures : 0;
    facts->n_captures = n_score + n_mask;
    facts->column_words = facts->n_dense = 0;
    facts->shares = (cu_shares){0};
    strbuf_printf(out,
                  "/* generated: the user's score and mask */\n#pragma once\n\n"
                  "struct mod_args {\n    cu_capture cap[%d];\n};\n\n",
                  facts->n_captures ? facts->n_captures : 1);
    TRY(scratch ? emit_slope(&e, scratch, facts, err) : emit_score(&e, facts, err));
    facts->n_dense_score = facts->n_dense;
    e.first_capture = n_score;
    TRY(emit_mask(&e, facts, err));
    strbuf_printf(out, "#define MOD_SCORE %s\n#define MOD_MASK %s\n#define MOD_SURE %d\n"
                  "#define DENSE_READS %d\n#define SCORE_DENSE %d\n",
                  scores[facts->score], masks[facts->mask], facts->has_sure_keys,
                  facts->n_dense, facts->n_dense_score);
    return strbuf_status(out, err);
}

saccade_status cu_emit_mod(const plan_problem *problem, strbuf *out, cu_mod_text *facts,
                           saccade_error *err)
{
    return emit_both(problem, NULL, out, facts, err);
}

saccade_status cu_emit_backward_mod(const plan_problem *problem, arena *scratch, strbuf *out,
                                    cu_mod_text *facts, saccade_error *err)
{
    return emit_both(problem, scratch, out, facts, err);
}
