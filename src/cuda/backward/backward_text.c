/* Text that backward's programs are written with: constants and products. */
#include "cuda/backward/cuda_backward.h"

static void put_config(const plan_problem *p, const cu_form *form, const cu_mod_text *facts,
                       strbuf *out)
{
    const int is_sm90 = form->family == CU_SM90,
              has_tiles = is_sm90 && !cu_backward_is_elements90(form);
    /* a slope of the head: applied to the sums of dQ and dK by Hopper's tiles */
    const int is_late = has_tiles && facts->is_head_slope && !form->backward.value_stages;
    const cu_constant rows[] = {
        {"SM", is_sm90 ? 90 : 80},
        {"F16", p->dtype == SACCADE_F16},
        {"F32", p->dtype == SACCADE_F32},
        {"OUT_F32", p->out_dtype != p->dtype},
        {"D", cu_padded(p->sizes.D)},
        {"E", cu_padded(p->sizes.Dv)},
        {"D_REAL", (int)p->sizes.D},
        {"E_REAL", (int)p->sizes.Dv},
        {"WGS", form->tile.groups},
        {"KEYS", form->tile.keys},
        {"STAGES", form->tile.stages},
        {"VALUE_STAGES", form->backward.value_stages},
        {"STAY", form->backward.stay},
        {"CTAS_KEYS", form->backward.ctas[0]},
        {"CTAS_QUERIES", form->backward.ctas[1]},
        {"HELPERS", form->backward.has_helpers},
        {"PASSES", form->backward.passes},
        {"FIXED", cu_backward_is_fixed(p, form)},
        {"REGS_CONSUMER", form->backward.registers[0]},
        {"REGS_DQ", form->backward.registers[1]},
        {"REGS_HELPERS", form->backward.registers[2]},
        {"DQ", (p->gradients & SACCADE_GRADIENT_Q) != 0},
        {"DK", (p->gradients & SACCADE_GRADIENT_K) != 0},
        {"DV", (p->gradients & SACCADE_GRADIENT_V) != 0},
        {"CAPTURES", form->backward.is_captures},
        {"KEPT", form->backward.kept},
        {"SHARES", has_tiles && !form->backward.value_stages && cu_has_shares(facts)},
        {"TERMS", has_tiles && facts->n_terms > 0},
        {"TAKES_MANY", has_tiles && cu_backward_takes_many(facts, p)},
        {"GROUP", p->group},
        {"CUTS_QUERIES", cu_backward_has_parts(p)},
        {"LATE_SLOPE", is_late},
        {"TM", form->backward.rows},
        {"TN", form->backward.rows},
        {"TILE_ROWS", form->tile.keys},
        {"DENSE", form->dense_bytes > 0},
        {"ROW_WARPS", form->backward.parts},
        {"THIRDS", form->backward.is_thirds},
        {"DROP", p->weight != NULL},
        {"ROWS", p->has_rows},
        {"Q_SHARED", 0},
        {"SCALE_FIRST", 0},
        {"CODES", 0},
        {"PAGES", p->has_chunks},
        {"RAGGED", p->is_ragged},
        {"MONOTONE", cu_is_monotone(plan_limits(p))},
        {"SINKS", (int)p->sinks_dtype},
    };
    cu_put_constants(rows, sizeof rows / sizeof rows[0], out);
}

/* One wgmma of 64 rows by n columns: A from registers, or from shared memory, turned (rows
 * along the sum) or not; B likewise. add: 0 overwrites. */
static void put_product(const char *name, int n, const char *type, int is_a_registers,
                        int is_a_turned, int is_b_turned, strbuf *out)
{
    const int count = n / 2, words = is_a_registers ? 4 : 1;
    strbuf_printf(out, "DEVICE void %s(float (&d)[%d], %s, u64 b, int add)\n{\n", name, count,
                  is_a_registers ? "u32 a0, u32 a1, u32 a2, u32 a3" : "u64 a");
    strbuf_printf(out,
                  "    asm volatile(\"{.reg .pred p; setp.ne.b32 p, %%%d, 0;\\n\"\n"
                  "        \"wgmma.mma_async.sync.aligned.m64n%dk16.f32.%s.%s {",
                  count + words + 1, n, type, type);
    for (int i = 0; i < count; i++)
        strbuf_printf(out, "%s%%%d", i ? ", " : "", i);
    strbuf_puts(out, is_a_registers ? "}, {" : "}, ");
    for (int i = 0; i < words; i++)
        strbuf_printf(out, "%s%%%d", i ? ", " : "", count + i);
    strbuf_printf(out, "%s, %%%d, p, 1, 1, ", is_a_registers ? "}" : "", count + words);
    if (!is_a_registers)
        strbuf_printf(out, "%d, ", is_a_turned);
    strbuf_printf(out, "%d;}\"\n        : ", is_b_turned);
    for (int i = 0; i < count; i++)
        strbuf_printf(out, "%s\"+f\"(d[%d])", i ? ", " : "", i);
    strbuf_printf(out, "\n        : %s, \"l\"(b), \"r\"(add));\n}\n\n",
                  is_a_registers ? "\"r\"(a0), \"r\"(a1), \"r\"(a2), \"r\"(a3)" : "\"l\"(a)");
}

static void put_products(const cu_form *form, int D, int E, int is_f16, strbuf *out)
{
    const char *type = is_f16 ? "f16" : "bf16";
    const int rest = D % 64; /* columns of dQ beside whole parts of 64 */
    strbuf_puts(out, "/* generated: the products of backward */\n#pragma once\n\n");
    if (cu_backward_is_f32_wgmma(form)) {
        put_product("wgmma_scores", form->backward.rows, type, 0, 0, 0, out);
        put_product("wgmma_sum", 64, type, 1, 0, 1, out);
        return;
    }
    put_product("wgmma_scores", cu_backward_is_elements90(form) ? form->tile.keys : BWD_ROWS,
                type, 0, 0, 0, out);
    put_product("wgmma_dv", E, type, 1, 0, 1, out);
    put_product("wgmma_dk", D, type, 1, 0, 1, out);
    if (D >= 64)
        put_product("wgmma_dq", 64, type, 0, 1, 1, out);
    if (rest)
        put_product("wgmma_dq", rest, type, 0, 1, 1, out);
    put_product("wgmma_lines", 8, type, 0, 1, 0, out);
    put_product("wgmma_key_sums", 8, type, 1, 0, 0, out);
}

void cu_write_backward(const cu_state *s, const plan_problem *p, const cu_program_kind *kind,
                       const cu_form *form, cu_headers *out)
{
    (void)kind;
    put_config(p, form, &s->backward_facts, &out->config);
    put_products(form, cu_padded(p->sizes.D), cu_padded(p->sizes.Dv), p->dtype == SACCADE_F16,
                 &out->products);
    out->mod = s->backward_text;
}
