/* One instance of a program: its generated headers, and the way from them to machine code. */
#include "cuda/program/program.h"

#include <stdio.h>
#include <string.h>

int cu_codes(const plan_problem *p)
{
    switch (p->kv_dtype) {
    case SACCADE_E4M3:
    case SACCADE_E5M2:
    case SACCADE_I8:
    case SACCADE_I4:
        return (int)p->kv_dtype;
    default:
        return 0;
    }
}

int cu_copies_codes_by_boxes(const cu_state *s, const plan_problem *p)
{
    const int is_sm90 = strcmp(s->arch, "sm_90a") == 0;
    return is_sm90 && cu_codes(p) && cu_key_bits(p) == 8 && !p->has_chunks && p->sizes.D == 128
           && p->sizes.Dv == 128;
}

int cu_key_bits(const plan_problem *p)
{
    return p->kv_dtype == SACCADE_I4 ? 4 : 8 * (int)saccade_dtype_bytes(p->kv_dtype);
}

int cu_has_whole_codes(const plan_problem *p)
{
    const int64_t bits = cu_key_bits(p);
    return p->sizes.D * bits % 128 == 0 && p->sizes.Dv * bits % 128 == 0;
}

int cu_value_columns(const plan_problem *p)
{
    return cu_padded_values(p->sizes.D, p->sizes.Dv, cu_key_bits(p));
}

int cu_is_monotone(const pass_limits *limits)
{
    int is_known = limits != NULL;
    for (int i = 0; is_known && i < 2; i++) {
        const pass_slope s = limits->slope[limits->node[i]];
        is_known = pass_slope_is_known(s) && (s.lo >= 0 || s.hi <= 0);
    }
    return is_known;
}

/* Whether limits are the same for all heads. */
static int are_alike(const pass_limits *limits)
{
    return limits
           && !((limits->fn->nodes[limits->node[0]].deps
                 | limits->fn->nodes[limits->node[1]].deps)
                & DEP_H);
}

void cu_put_constants(const cu_constant *rows, size_t n, strbuf *out)
{
    strbuf_puts(out, "/* generated: constants of this instance */\n#pragma once\n");
    for (size_t k = 0; k < n; k++)
        strbuf_printf(out, "#define CFG_%s %d\n", rows[k].name, rows[k].value);
}

/* A thread's, in the warps that load and in those that multiply; of latent decode in those that
 * add up values, and in those that make scores. */
typedef struct registers {
    int producer, consumer, scores;
} registers;

/* Of decode with warps that load: 128 threads of them and 256 of the others begin with 168
 * each, and have no more than these together, else they wait for ever. */
static registers decode_registers(const plan_problem *p)
{
    return p->has_chunks ? (registers){56, 224, 0} : (registers){40, 232, 0};
}

static registers registers_of(const plan_problem *p, const cu_form *form, int is_small,
                              int gathers)
{
    if (form->latent_panels)
        return cu_codes(p) ? (registers){48, 176, 112} : (registers){32, 176, 128};
    if (form->span_rows)
        return decode_registers(p);
    if (is_small)
        return form->teams == 2 ? (registers){40, 232, 0} : (registers){56, 152, 0};
    if (form->tile.groups == 1)
        return (registers){56, 256, 0};
    if (form->tile.groups == 2)
        return gathers ? (registers){56, 224, 0} : (registers){40, 232, 0};
    return (registers){32, 160, 0};
}

/* The constants of a forward program. */
static void put_config(const cu_state *s, const plan_problem *p, const cu_program_kind *kind,
                       const cu_form *form, strbuf *out)
{
    const int is_f32 = p->dtype == SACCADE_F32, groups = form->tile.groups;
    const int is_by_parts = kind->operation == CU_OP_PARTS;
    const int has_producer =
        (kind->operation == CU_OP_FORWARD || is_by_parts) && form->family == CU_SM90;
    const int gathers =
        has_producer && !kind->has_one_piece && p->page > 0
        && cu_gathers(0, &form->tile, cu_keys_in_both(p->page, form->tile.keys));
    const int E = cu_value_columns(p), parts = is_f32 ? cu_parts(E) : 1;
    const int is_small = kind->operation == CU_OP_SMALL;
    const int whole = 32 * parts; /* columns of O in panels */
    const registers regs = registers_of(p, form, is_small, gathers);
    const cu_constant rows[] = {
        {"SM", form->family == CU_SM90 ? 90 : 80},
        {"F16", p->dtype == SACCADE_F16},
        {"F32", is_f32},
        {"OUT_F32", p->out_dtype != p->dtype},
        {"D", cu_padded(p->sizes.D)},
        {"E", is_f32 ? (E + whole - 1) / whole * whole : E},
        {"D_REAL", (int)p->sizes.D},
        {"E_REAL", (int)p->sizes.Dv},
        {"WGS", groups},
        {"ROW_WARPS", parts},
        {"TN", form->tile.keys},
        {"STAGES", form->tile.stages},
        {"PINGPONG", form->tile.is_pingpong},
        {"LAZY", kind->may_be_lazy && form->tile.is_lazy},
        {"ROWMAX", kind->has_maxima},
        {"PACKED", kind->is_packed},
        {"INVARIANT", p->is_invariant},
        {"BY_PARTS", is_by_parts},
        {"PART_KEYS", has_producer && p->is_invariant == SACCADE_INVARIANT
                          ? cu_part_keys(&form->tile, s->part_dim)
                          : 0},
        {"CHUNKS", p->has_chunks && !kind->has_one_piece},
        {"GATHERS", gathers},
        {"RAGGED", p->is_ragged},
        {"MONOTONE", cu_is_monotone(plan_limits(p))},
        {"ALIKE", are_alike(plan_limits(p))},
        {"TILE_ROWS", cu_tile_rows(form->family, &form->tile)},
        {"SINKS", (int)p->sinks_dtype},
        {"DROP", p->weight != NULL},
        {"ROWS", p->has_rows},
        {"ONE_SPAN", kind->has_one_span},
        {"SPAN_ROWS", form->span_rows},
        {"COLUMN_PARTS", form->column_parts ? form->column_parts : 1},
        {"LATENT", form->latent_panels},
        {"CODES", cu_codes(p)},
        {"CODE_BOXES", cu_copies_codes_by_boxes(s, p)},
        {"K_TOKENS", p->k_groups.tokens},
        {"K_CHANNELS", p->k_groups.channels},
        {"V_TOKENS", p->v_groups.tokens},
        {"V_CHANNELS", p->v_groups.channels},
        {"SMALL", is_small},
        {"TEAMS", is_small ? form->teams : 1},
        {"AHEAD", is_small && form->teams == 2},
        {"BUFFERS", form->buffers},
        {"QS", form->buffers ? FEW_QUERIES
               : is_small    ? cu_small_buffers(cu_padded(p->sizes.D), E)
                             : 1},
        {"LIMITS", ((has_producer && !is_by_parts) || is_small) && !p->is_ragged},
        {"Q_SHARED", cu_is_q_shared((int)p->sizes.D, (int)p->sizes.Dv)},
        {"SCALE_FIRST", p->scale <= 0 && s->facts.score != CU_SCORE_GENERAL},
        {"DENSE", form->dense_bytes > 0},
        {"SHARES", ((has_producer && !is_by_parts) || is_small) && cu_has_shares(&s->facts)},
        {"REGS_PRODUCER", regs.producer},
        {"REGS_CONSUMER", regs.consumer},
        {"REGS_SCORES", regs.scores},
        {"FIRST_WARP", has_producer ? 4 : 0},
    };
    cu_put_constants(rows, sizeof rows / sizeof rows[0], out);
}

void cu_write_forward(const cu_state *s, const plan_problem *p, const cu_program_kind *kind,
                      const cu_form *form, cu_headers *out)
{
    put_config(s, p, kind, form, &out->config);
    const int columns = form->latent_panels ? 64 * form->latent_panels : cu_padded(p->sizes.Dv);
    cu_emit_products(&form->tile, columns, p->dtype == SACCADE_F16, &out->products);
    out->mod = s->mod_text;
}

saccade_status cu_compile_instance(const cu_state *s, const plan_problem *p, cu_program which,
                                   const cu_form *form, cu_image *out, saccade_error *err)
{
    const cu_program_kind *kind = &cu_program_kinds[which];
    char entry[32];
    cu_headers headers;
    strbuf_init(&headers.config, 0);
    strbuf_init(&headers.products, 0);
    snprintf(entry, sizeof entry, "%s.cu",
             kind->file ? kind->file : kind->kernel[form->family]);
    kind->write(s, p, kind, form, &headers);
    const cu_source generated[] = {{"cfg.cuh", strbuf_text(&headers.config)},
                                   {"mod.cuh", headers.mod},
                                   {"wgmma.cuh", strbuf_text(&headers.products)}};
    saccade_status status = strbuf_status(&headers.config, err);
    if (status == SACCADE_OK)
        status = strbuf_status(&headers.products, err);
    if (status == SACCADE_OK)
        status = cu_compile(entry, generated, 3, s->arch, out, err);
    strbuf_free(&headers.config);
    strbuf_free(&headers.products);
    return status;
}
