/* The table of programs: what each is called, which kernels it has, which forms it may take and
 * which runs it serves. Compiling, loading, choosing, preparing and explaining walk the table,
 * so that a program is added by a row. */
#include "cuda/backward/cuda_backward.h"

#include <stdlib.h>
#include <string.h>

/* ---- forms ---- */

/* Whether a form fits the GPU's shared memory, and rows of its dense reads are whole lines. */
static int fits(const cu_state *s, const plan_problem *p, const cu_form *form)
{
    int ok = cu_shared_bytes(form, &s->facts, p) <= cu_shared_there(s);
    for (int r = 0; form->dense_bytes && r < s->facts.n_dense; r++)
        ok = ok && form->tile.keys * s->facts.dense[r].bytes % CU_DENSE_LINE == 0;
    return ok;
}

/* The rung'th of a family's tiles that fit. dense_bytes: of the form. */
static int find_tile(const cu_state *s, const plan_problem *p, cu_family family,
                     int dense_bytes, int rung, cu_form *out)
{
    /* keys in pages come in longer copies by tiles for whole sectors */
    const int D = p->has_chunks ? cu_padded(p->sizes.D) : (int)p->sizes.D;
    const int E = p->has_chunks ? cu_padded(p->sizes.Dv) : (int)p->sizes.Dv;
    cu_form form = {.family = family, .dense_bytes = dense_bytes};
    if (s->has_large_heads)
        return 0;
    for (int i = 0; cu_tile_choice(family, D, E, p->dtype, i, &form.tile); i++)
        if (fits(s, p, &form) && rung-- == 0) {
            form.tile.is_lazy &= !p->is_invariant; /* late rows make their tile again */
            *out = form;
            return 1;
        }
    return 0;
}

static int main_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    return find_tile(s, p, s->family, 0, rung, out);
}

/* Tensors that scores and masks read at their own query and key come as tiles. Where keys lie
 * in chunks, others load. */
static int dense_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    const int bytes = cu_dense_bytes(&s->facts);
    return bytes && s->family == CU_SM90 && !p->has_chunks && !p->is_ragged && !p->is_invariant
           && find_tile(s, p, CU_SM90, bytes, rung, out);
}

/* Row maxima beside O may want a smaller tile than the main program. On sm_90a both share one:
 * the program that keeps maxima also makes again the tiles that the main one lists. */
static int exact_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    const cu_loaded *leader = &s->programs[CU_MAIN];
    if (rung)
        return s->family != CU_SM90 && find_tile(s, p, s->family, 0, leader->rung + rung, out);
    *out = leader->form;
    return !s->has_large_heads;
}

static int careful_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    (void)p;
    *out = s->programs[CU_MAIN].form;
    return rung == 0 && !s->has_large_heads;
}

static int unaligned_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    return s->family == CU_SM90 && find_tile(s, p, CU_SM80, 0, rung, out);
}

static int decode_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    const int takes_codes =
        strcmp(s->arch, "sm_90a") == 0 && p->dtype != SACCADE_F32 && cu_has_whole_codes(p);
    out->family = CU_SM90;
    out->span_rows = CU_SPAN_ROWS;
    out->column_parts = 1;
    return !s->has_large_heads && (cu_codes(p) ? takes_codes : s->family == CU_SM90)
           && !p->has_rows && p->is_invariant != SACCADE_INVARIANT && !p->weight
           && cu_decode_choice(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv), cu_key_bits(p),
                               s->facts.column_words, rung, &out->tile);
}

/* What packs no more rows than a warp takes has no use for it. */
static int decode_wide_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    const int D = cu_padded(p->sizes.D), E = cu_value_columns(p);
    const int has_more = !p->sizes.Q || p->sizes.Q * cu_group(&p->sizes) > CU_SPAN_ROWS;
    const int has_decode = !cu_codes(p) && !p->is_invariant && decode_form(s, p, 0, out);
    out->family = CU_SM90;
    out->span_rows = CU_WIDE_ROWS;
    out->column_parts = cu_decode_parts(D, E);
    return (s->has_large_heads || (has_decode && has_more))
           && cu_decode_wide_choice(D, E, cu_key_bits(p), s->facts.column_words, rung,
                                    &out->tile);
}

/* Whether keys whose first columns are their values, codes or not, may be elements of both: one
 * scale for each 16 columns that a thread widens. Codes in pages and in sequences go by wide
 * spans. */
static int may_share_elements(const plan_problem *p)
{
    enum { WIDENED = 16 };
    return !cu_codes(p)
           || (p->k_groups.tokens == p->v_groups.tokens && !p->has_chunks && !p->is_ragged
               && p->k_groups.channels == p->v_groups.channels
               && p->k_groups.channels % WIDENED == 0);
}

/* Keys whose first columns are their values. */
static int latent_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    const int D = (int)p->sizes.D, E = (int)p->sizes.Dv;
    *out = (cu_form){.family = CU_SM90, .span_rows = CU_WIDE_ROWS, .column_parts = 3};
    if (!s->has_large_heads || strcmp(s->arch, "sm_90a") || !may_share_elements(p) || D % 8
        || E > D || p->weight || p->is_invariant)
        return 0;
    out->latent_panels =
        cu_latent_choice(cu_padded(D), E, s->facts.column_words, rung, &out->tile);
    return out->latent_panels > 0;
}

static int decode_half_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    return cu_codes(p) && decode_form(s, p, rung, out) && !p->is_invariant && !p->is_ragged
           && cu_decode_half_choice(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv),
                                    cu_key_bits(p), s->facts.column_words, rung, &out->tile);
}

static int small_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    out->family = CU_SM90;
    out->teams = 3;
    const int D = cu_padded(p->sizes.D), E = cu_padded(p->sizes.Dv);
    const int is_general = s->facts.mask == CU_MASK_GENERAL;
    if (s->family != CU_SM90 || p->is_ragged || p->has_chunks || p->is_invariant || p->weight)
        return 0;
    for (int i = 0; cu_small_choice(D, E, is_general, i, &out->tile); i++)
        if (cu_shared_bytes(out, &s->facts, p) <= cu_shared_most(90) && rung-- == 0) {
            /* Pieces are walked from the left, where a score that is a line may climb. */
            out->tile.is_lazy &= p->dtype == SACCADE_BF16 && s->facts.score == CU_SCORE_NONE;
            return 1;
        }
    return 0;
}

/* A plan has it that says how many keys there are: what registers hold of scores follows from
 * that. */
static int few_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    const int D = cu_padded(p->sizes.D), E = cu_padded(p->sizes.Dv);
    const int is_small = small_form(s, p, 0, out);
    const int is_lazy = out->tile.is_lazy;
    const int has_tile = is_small && s->facts.mask == CU_MASK_NONE && !cu_has_shares(&s->facts)
                         && cu_few_choice(D, E, p->sizes.KV, rung, &out->tile);
    out->tile.is_lazy = is_lazy;
    out->buffers = has_tile ? cu_few_buffers(&out->tile, D, E) : 0;
    return has_tile;
}

static int pair_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    const int is_plain = small_form(s, p, 0, out) && out->tile.is_lazy;
    out->teams = 2;
    return is_plain && s->facts.mask == CU_MASK_NONE
           && cu_pair_choice(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv), rung, &out->tile);
}

static int parts_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    const int D = cu_padded(p->sizes.D), E = cu_padded(p->sizes.Dv);
    *out = s->programs[CU_MAIN].form;
    out->tile = cu_part_tile(&out->tile, D, E, cu_group_bytes(out, &s->facts));
    return rung == 0 && s->family == CU_SM90 && p->is_invariant == SACCADE_INVARIANT
           && !p->has_rows && !p->is_ragged && !p->weight;
}

static int one_piece_form(const cu_state *s, const plan_problem *p, int rung, cu_form *out)
{
    *out = s->programs[CU_MAIN].form;
    return rung == 0 && s->family == CU_SM90 && !s->has_large_heads
           && cu_collects(p, &out->tile);
}

/* ---- shared memory ---- */

static int tile_shared(const cu_state *s, const plan_problem *p, const cu_form *form)
{
    return cu_shared_bytes(form, &s->facts, p);
}

/* What a run takes grows with its spans, or with tables of a capture. */
static int shared_most(const cu_state *s, const plan_problem *p, const cu_form *form)
{
    (void)p;
    (void)form;
    return cu_shared_there(s);
}

/* ---- the table ---- */

#define TILES                             \
    {                                     \
        "fwd_sm90", "fwd_sm80", "fwd_f32" \
    }

const cu_program_kind cu_program_kinds[CU_PROGRAMS] = {
    [CU_DECODE_HALF] = {.name = "decode, two to a multiprocessor",
                        .operation = CU_OP_DECODE,
                        .kernel = {"decode"},
                        .other = "decode_end",
                        .choose = decode_half_form,
                        .write = cu_write_forward,
                        .is_optional = 1,
                        .has_maxima = 1,
                        .is_packed = 1,
                        .has_one_span = 1,
                        .wants_alignment = 1,
                        .shared = shared_most},
    [CU_LATENT] = {.name = "latent decode",
                   .operation = CU_OP_DECODE,
                   .kernel = {"latent"},
                   .other = "decode_end",
                   .choose = latent_form,
                   .write = cu_write_forward,
                   .is_optional = 1,
                   .spill_most = 80, /* of the careful path, over codes */
                   .has_maxima = 1,
                   .is_packed = 1,
                   .wants_alignment = 1,
                   .shared = shared_most},
    [CU_DECODE_WIDE] = {.name = "decode, wide spans",
                        .operation = CU_OP_DECODE,
                        .kernel = {"decode"},
                        .other = "decode_end",
                        .choose = decode_wide_form,
                        .write = cu_write_forward,
                        .is_optional = 1,
                        .spill_most = 80, /* of addresses, read where spans begin */
                        .has_maxima = 1,
                        .is_packed = 1,
                        .wants_alignment = 1,
                        .shared = shared_most},
    [CU_DECODE] = {.name = "decode",
                   .operation = CU_OP_DECODE,
                   .kernel = {"decode"},
                   .other = "decode_end",
                   .choose = decode_form,
                   .write = cu_write_forward,
                   .has_maxima = 1,
                   .is_packed = 1,
                   .wants_alignment = 1,
                   .shared = shared_most},
    [CU_DENSE] = {.name = "dense",
                  .operation = CU_OP_FORWARD,
                  .kernel = {"fwd_sm90"},
                  .choose = dense_form,
                  .write = cu_write_forward,
                  .is_optional = 1,
                  .spill_most = 24, /* of the loads, mostly */
                  .wants_alignment = 1,
                  .runs = CU_WITHOUT_MAXIMA,
                  .shared = tile_shared},
    [CU_FEW] = {.name = "few keys",
                .operation = CU_OP_SMALL,
                .kernel = {"fwd_few"},
                .choose = few_form,
                .write = cu_write_forward,
                .is_optional = 1,
                .may_be_lazy = 1,
                .wants_alignment = 1,
                .runs = CU_WITHOUT_MAXIMA,
                .shared = tile_shared},
    [CU_PAIR] = {.name = "pair",
                 .operation = CU_OP_SMALL,
                 .kernel = {"fwd_small"},
                 .choose = pair_form,
                 .write = cu_write_forward,
                 .is_optional = 1,
                 .may_be_lazy = 1,
                 .wants_alignment = 1,
                 .runs = CU_WITHOUT_MAXIMA,
                 .shared = tile_shared},
    [CU_SMALL] = {.name = "small",
                  .operation = CU_OP_SMALL,
                  .kernel = {"fwd_small"},
                  .choose = small_form,
                  .write = cu_write_forward,
                  .is_optional = 1,
                  .may_be_lazy = 1,
                  .wants_alignment = 1,
                  .runs = CU_WITHOUT_MAXIMA,
                  .shared = tile_shared},
    [CU_PARTS] = {.name = "parts",
                  .operation = CU_OP_PARTS,
                  .kernel = {"fwd_sm90"},
                  .other = "join_parts",
                  .choose = parts_form,
                  .write = cu_write_forward,
                  .follows_main = 1,
                  .is_optional = 1,
                  .has_maxima = 1,
                  .is_packed = 1,
                  .wants_alignment = 1,
                  .shared = tile_shared},
    [CU_ONE_PIECE] = {.name = "one piece",
                      .operation = CU_OP_FORWARD,
                      .kernel = {"fwd_sm90"},
                      .choose = one_piece_form,
                      .write = cu_write_forward,
                      .follows_main = 1,
                      .is_optional = 1,
                      .may_be_lazy = 1,
                      .has_one_piece = 1,
                      .wants_alignment = 1,
                      .runs = CU_WITHOUT_MAXIMA,
                      .shared = tile_shared},
    [CU_MAIN] = {.name = "forward",
                 .operation = CU_OP_FORWARD,
                 .kernel = TILES,
                 .choose = main_form,
                 .write = cu_write_forward,
                 .may_be_lazy = 1,
                 .wants_alignment = 1,
                 .runs = CU_WITHOUT_MAXIMA,
                 .shared = tile_shared},
    [CU_EXACT] = {.name = "exact",
                  .operation = CU_OP_FORWARD,
                  .kernel = TILES,
                  .choose = exact_form,
                  .write = cu_write_forward,
                  .follows_main = 1,
                  .has_maxima = 1,
                  .wants_alignment = 1,
                  .runs = CU_WITH_MAXIMA,
                  .shared = tile_shared},
    /* Row maxima cost little beside rows that are copied by the element. */
    [CU_UNALIGNED] = {.name = "unaligned",
                      .operation = CU_OP_FORWARD,
                      .kernel = TILES,
                      .choose = unaligned_form,
                      .write = cu_write_forward,
                      .has_maxima = 1,
                      .shared = tile_shared},
    [CU_CAREFUL] = {.name = "careful",
                    .operation = CU_OP_AGAIN,
                    .kernel = {"careful", "careful", "careful"},
                    .other = "begin",
                    .choose = careful_form,
                    .write = cu_write_forward,
                    .follows_main = 1},
    [CU_COLLECT] = {.name = "collect keys",
                    .operation = CU_OP_KEYS,
                    .kernel = {"collect_keys"},
                    .choose = one_piece_form,
                    .write = cu_write_forward,
                    .follows_main = 1},
    [CU_BWD_TILES] = {.name = "backward tiles",
                      .operation = CU_OP_BACKWARD,
                      .kernel = {"bwd_sm90"},
                      .choose = cu_backward_tiles_form,
                      .write = cu_write_backward,
                      .is_optional = 1,
                      .spill_most = 48,
                      .shared = cu_backward_shared},
    [CU_BWD_SHORT] = {.name = "backward short",
                      .operation = CU_OP_BACKWARD,
                      .kernel = {"bwd_sm90"},
                      .choose = cu_backward_short_form,
                      .write = cu_write_backward,
                      .is_optional = 1,
                      .shared = cu_backward_shared},
    [CU_BWD_DENSE] = {.name = "backward dense",
                      .operation = CU_OP_BACKWARD,
                      .kernel = {"bwd_sm90"},
                      .choose = cu_backward_dense_form,
                      .write = cu_write_backward,
                      .is_optional = 1,
                      .spill_most = 48,
                      .shared = cu_backward_shared},
    [CU_BWD_FEW] = {.name = "backward few",
                    .operation = CU_OP_BACKWARD,
                    .kernel = {"bwd_wide_keys"},
                    .file = "bwd_wide",
                    .other = "bwd_wide_queries",
                    .choose = cu_backward_few_form,
                    .write = cu_write_backward,
                    .is_optional = 1,
                    .shared = cu_backward_shared,
                    .other_has_shared = 1},
    [CU_BWD_WIDE] = {.name = "backward wide",
                     .operation = CU_OP_BACKWARD,
                     .kernel = {"bwd_wide_keys"},
                     .file = "bwd_wide",
                     .other = "bwd_wide_queries",
                     .choose = cu_backward_wide_form,
                     .write = cu_write_backward,
                     .is_optional = 1,
                     .shared = cu_backward_shared,
                     .other_has_shared = 1},
    [CU_BWD_F32] = {.name = "backward f32",
                    .operation = CU_OP_BACKWARD,
                    .kernel = {"bwd_f32_keys"},
                    .file = "bwd_f32",
                    .other = "bwd_f32_queries",
                    .choose = cu_backward_f32_form,
                    .write = cu_write_backward,
                    .is_optional = 1,
                    .spill_most = 8, /* an address of the loads, and one of the sums */
                    .shared = cu_backward_shared,
                    .other_has_shared = 1},
    [CU_BWD_SPLIT] = {.name = "backward split",
                      .operation = CU_OP_BACKWARD,
                      .kernel = {"bwd_split"},
                      .choose = cu_backward_split_form,
                      .write = cu_write_backward,
                      .follows_tiles = 1},
    [CU_BWD_PLAIN] = {.name = "backward plain",
                      .operation = CU_OP_BACKWARD,
                      .kernel = {"bwd_keys", "bwd_keys", "bwd_keys"},
                      .file = "bwd_sm80",
                      .other = "bwd_queries",
                      .choose = cu_backward_plain_form,
                      .write = cu_write_backward,
                      .shared = cu_backward_shared,
                      .other_has_shared = 1},
    [CU_BWD_PREPARE] = {.name = "backward prepare",
                        .operation = CU_OP_BACKWARD,
                        .kernel = {"bwd_prepare", "bwd_prepare", "bwd_prepare"},
                        .other = "bwd_bounds",
                        .choose = cu_backward_prepare_form,
                        .write = cu_write_backward,
                        .follows_tiles = 1},
    [CU_BWD_FINISH] = {.name = "backward finish",
                       .operation = CU_OP_BACKWARD,
                       .kernel = {"bwd_finish"},
                       .choose = cu_backward_finish_form,
                       .write = cu_write_backward,
                       .follows_tiles = 1},
    [CU_BWD_JOIN] = {.name = "backward join",
                     .operation = CU_OP_BACKWARD,
                     .kernel = {"bwd_join", "bwd_join", "bwd_join"},
                     .choose = cu_backward_join_form,
                     .write = cu_write_backward,
                     .follows_tiles = 1},
    [CU_BWD_SINKS] = {.name = "backward sinks",
                      .operation = CU_OP_BACKWARD,
                      .kernel = {"bwd_sinks", "bwd_sinks", "bwd_sinks"},
                      .choose = cu_backward_sinks_form,
                      .write = cu_write_backward},
    [CU_BWD_CAPTURES] = {.name = "backward captures",
                         .operation = CU_OP_BACKWARD,
                         .kernel = {"bwd_captures", "bwd_captures", "bwd_captures"},
                         .other = "bwd_captures_end",
                         .choose = cu_backward_captures_form,
                         .write = cu_write_backward,
                         .shared = shared_most},
    [CU_BWD_ELEMENTS] = {.name = "backward elements",
                         .operation = CU_OP_BACKWARD,
                         .kernel = {"bwd_elements", "bwd_elements", "bwd_elements"},
                         .choose = cu_backward_elements_form,
                         .write = cu_write_backward,
                         .shared = cu_backward_shared},
    [CU_BWD_ELEMENTS90] = {.name = "backward elements by wgmma",
                           .operation = CU_OP_BACKWARD,
                           .kernel = {"bwd_elements90"},
                           .choose = cu_backward_elements90_form,
                           .write = cu_write_backward,
                           .follows_tiles = 1, /* rows are prepared as those take them */
                           .is_optional = 1,
                           .spill_most = 64, /* of what keys bring beside */
                           .shared = cu_backward_shared},
    [CU_BWD_PAGES] = {.name = "backward pages",
                      .operation = CU_OP_BACKWARD,
                      .kernel = {"bwd_pages_begin", "bwd_pages_begin", "bwd_pages_begin"},
                      .file = "bwd_pages",
                      .other = "bwd_pages_sum",
                      .choose = cu_backward_pages_form,
                      .write = cu_write_backward},
};

/* ---- loading ---- */

static saccade_status load_one(const cu_driver *d, const cu_program_kind *kind, cu_loaded *l,
                               saccade_error *err)
{
    TRY(cu_check(d, d->library_load(&l->library, l->image.code, NULL, NULL, 0, NULL, NULL, 0),
                 "cuLibraryLoadData", err));
    TRY(cu_check(d, d->library_kernel(&l->kernel, l->library, kind->kernel[l->form.family]),
                 "cuLibraryGetKernel", err));
    if (!kind->other)
        return SACCADE_OK;
    return cu_check(d, d->library_kernel(&l->other, l->library, kind->other),
                    "cuLibraryGetKernel", err);
}

saccade_status cu_load_programs(cu_state *s, const cu_driver *driver, saccade_error *err)
{
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (s->programs[i].image.code)
            TRY(load_one(driver, &cu_program_kinds[i], &s->programs[i], err));
    return SACCADE_OK;
}

void cu_free_programs(cu_state *s)
{
    const cu_driver *driver;
    for (int i = 0; i < CU_PROGRAMS; i++) {
        cu_loaded *l = &s->programs[i];
        if (l->library && cu_get_driver(&driver, NULL) == SACCADE_OK)
            driver->library_unload(l->library);
        free(l->image.code);
        *l = (cu_loaded){0};
    }
}
