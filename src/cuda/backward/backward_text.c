/* Backward's instances: which tile, and the text that depends on it. Numbers: one H200,
 * docs/lab. */
#include "cuda/backward/cuda_backward.h"

/* Three consumer groups as long as dK and dV of 64 keys leave room for them. Wider heads have
 * two, and, where dQ has two parts, loads and sums by warps of their own; if a score function
 * wants registers, those of the helpers go to the consumers. */
int cu_backward_tile_choice(int D, int E, int rung, cu_form *out)
{
    enum { KEYS = 64 }; /* of a group */
    typedef struct choice {
        int groups, stages, is_split, registers[3];
    } choice;
    static const choice small[] = {{3, 4, 0, {144, 80, 0}}, {2, 3, 0, {200, 104, 0}}};
    static const choice wide[] = {{2, 3, 1, {208, 64, 32}}, {2, 3, 0, {216, 72, 0}}};
    const int dim = D > E ? D : E;
    rung += dim > 64 && D <= 64; /* dQ of one part: none for warps of their own */
    if (dim > 128 || rung > 1)
        return 0;
    const choice *row = (dim <= 64 ? small : wide) + rung;
    *out = (cu_form){
        .family = CU_SM90,
        .tile = {.groups = row->groups, .keys = row->groups * KEYS, .stages = row->stages},
        .backward = {.rows = BWD_ROWS, .parts = 1, .is_split = row->is_split}};
    for (int i = 0; i < 3; i++)
        out->backward.registers[i] = row->registers[i];
    return 1;
}

/* Two stages are enough where consumers say when they are done with one (FREES_EARLY). */
int cu_backward_fit_dense(int D, int E, cu_form *form)
{
    enum { STAGES_MOST = 3 }; /* dense reads have two places */
    const int least = STAGES_MOST - form->backward.is_split;
    form->tile.stages = STAGES_MOST;
    while (form->tile.stages > least
           && cu_backward_shared_bytes(form, D, E) > cu_shared_most(90))
        form->tile.stages--;
    return cu_backward_shared_bytes(form, D, E) <= cu_shared_most(90);
}

/* A key takes 1.15 times as long where two groups share a step as where three do (b1 h32 q15360
 * d64, docs/lab/021). */
int cu_backward_is_short(const cu_form *first, const cu_form *second,
                         const saccade_sizes *sizes, int n_sm, int group, int cuts_rows,
                         int has_mask)
{
    const cu_form *const form[2] = {first, second};
    double each[2];
    int64_t tiles[2];
    if (n_sm <= 0)
        return 0;
    for (int i = 0; i < 2; i++) {
        const cu_tile_lengths all =
            cu_equal_tiles(sizes->B * sizes->Hkv, sizes->KV, form[i]->tile.groups,
                           form[i]->backward.passes, cu_backward_query_blocks(sizes));
        cu_query_parts(n_sm, group, cuts_rows, &all, &each[i]);
        tiles[i] = all.n;
        each[i] *= (double)form[i]->tile.keys * (i ? 1.15 : 1);
    }
    const int is_even = group > 1 && tiles[0] * group >= n_sm; /* by parts, whatever the mask */
    return each[1] < each[0] && (!has_mask || (tiles[1] * group <= n_sm && !is_even));
}

/* Five products and sums of dQ in memory take longer than seven products without, with two
 * CTAs and more to a multiprocessor, where blocks of queries meet few blocks of 64 keys: 1.06
 * to 1.27 times as long up to 5 of them, 0.95 times with 7 (docs/lab/061). */
int cu_backward_sees_few(int64_t blocks, int64_t lists, int64_t Q, int most)
{
    return blocks > 0 && blocks <= most * lists * ((Q + BWD_ROWS - 1) / BWD_ROWS);
}

static int wide_shared(const cu_form *f, int D, int E);

/* Stages as shared memory allows: those of K and Q come first, which are held for longer. */
int cu_backward_wide_choice(int D, int E, int rung, cu_form *out)
{
    const int most = cu_shared_most(90);
    if (rung > 0)
        return 0;
    *out = (cu_form){.family = CU_SM90,
                     .tile = {.groups = 2, .keys = 64, .stages = 3},
                     .backward = {.rows = BWD_ROWS,
                                  .parts = 1,
                                  .value_stages = 2,
                                  .stay = BWD_WIDE_ROWS,
                                  .ctas = {1, 1},
                                  .registers = {240, 24, 0}}};
    if (wide_shared(out, D, E) > most)
        out->tile.stages = 2;
    if (wide_shared(out, D, E) > most)
        out->backward.value_stages = 1;
    return 1;
}

/* Blocks that pass have as many rows as leave room for two of them; both kernels' stages. */
int cu_backward_f32_choice(int D, int E, int rung, cu_form *out)
{
    const int dim = D > E ? D : E, most = cu_shared_most(90);
    if (dim > 128 || rung > 0)
        return 0;
    *out = (cu_form){.family = CU_SM90,
                     .tile = {.groups = 2, .keys = 64, .stages = 3},
                     .backward = {.rows = dim > 64 ? 32 : 64,
                                  .parts = 1,
                                  .is_thirds = 1,
                                  .value_stages = dim > 64 ? 2 : 3,
                                  .stay = BWD_ROWS,
                                  .ctas = {1, 1},
                                  .registers = {240, 24, 0}}};
    if (cu_backward_shared_bytes(out, D, E) > most)
        out->tile.stages = 2;
    return 1;
}

/* CTAs share a multiprocessor: some load and store while others multiply. Loads have one warp,
 * and no registers are handed over: with 18 and 15 warps to a multiprocessor, whose four parts
 * have 5 and 4 of them, a thread has 96 and 128. */
int cu_backward_few_choice(int D, int E, int rung, cu_form *out)
{
    if ((D > E ? D : E) > 64 || rung > 0)
        return 0;
    *out = (cu_form){
        .family = CU_SM90,
        .tile = {.groups = 2, .keys = 64, .stages = 3},
        .backward = {
            .rows = BWD_ROWS, .parts = 1, .value_stages = 2, .stay = BWD_ROWS, .ctas = {2, 3}}};
    return 1;
}

/* Blocks as long as registers allow: scores of 16 rows by a block lie there twice. Two stages
 * fit the 99 KB of shared memory that every GPU has. */
cu_form cu_backward_pass_choice(int D, int E)
{
    const int is_wide = (D > E ? D : E) > 128;
    return (cu_form){.family = CU_SM80,
                     .tile = {.groups = 4, .keys = 64, .stages = 2},
                     .backward = {.rows = is_wide ? 16 : 32, .parts = is_wide ? 2 : 1}};
}

/* f32: operands in three bf16 numbers up to head dims of 64, else products of split operands.
 * Two CTAs to a multiprocessor up to head dims of 128, whose stages fit 99 KB. */
cu_form cu_backward_pass32_choice(int D, int E)
{
    const int dim = D > E ? D : E;
    return (cu_form){.family = CU_F32,
                     .tile = {.groups = 4, .keys = 64, .stages = dim > 128 ? 1 : 2},
                     .backward = {.rows = dim > 64 ? 16 : 32,
                                  .parts = dim > 128 ? 2 : 1,
                                  .is_thirds = dim <= 64}};
}

/* Blocks of CU_BWD_PLAIN, so that both programs walk the same runs; no sums of wide rows, so
 * one warp to 16. What is summed in shared memory leaves room for one stage of wide rows. f32
 * multiplies split operands at any head dim: thirds would take that room. */
cu_form cu_backward_captures_choice(int D, int E, int is_f32)
{
    cu_form form = is_f32 ? cu_backward_pass32_choice(D, E) : cu_backward_pass_choice(D, E);
    form.tile.stages = form.backward.rows == 32 ? 2 : 1;
    form.backward.parts = 1;
    form.backward.is_thirds = 0;
    form.backward.is_captures = 1;
    return form;
}

/* Blocks as those that CU_BWD_CAPTURES walks. A CTA leaves room for a second one, whose copies
 * its products hide; two stages are worth less than more keys, which every copy of the queries
 * serves. Tells how many CTAs fit, 0 if none does. */
static int fit_elements(int D, int E, int most, cu_form *form)
{
    static const struct {
        int blocks, stages;
    } choices[] = {{4, 2}, {4, 1}, {2, 1}, {1, 1}};
    for (int ctas = 2; ctas > 0; ctas--)
        for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
            form->backward.blocks = choices[i].blocks;
            form->tile.keys = choices[i].blocks * form->backward.rows;
            form->tile.stages = choices[i].stages;
            if (ctas * (cu_backward_shared_bytes(form, D, E) + 1024) <= most + 1024)
                return ctas;
        }
    return 0;
}

/* What is kept costs a stage, but no blocks and no CTA. */
cu_form cu_backward_elements_choice(int D, int E, int is_f32, int kept, int most)
{
    cu_form plain = cu_backward_captures_choice(D, E, is_f32), keeping = plain;
    keeping.backward.kept = kept;
    const int ctas = fit_elements(D, E, most, &plain);
    return fit_elements(D, E, most, &keeping) == ctas
                   && keeping.backward.blocks == plain.backward.blocks
               ? keeping
               : plain;
}

int cu_backward_query_threads(const cu_form *f)
{
    return f->backward.stay * 2 + (f->backward.registers[0] ? 128 : 32);
}

int cu_backward_threads(const cu_form *f)
{
    if (f->backward.value_stages && !f->backward.registers[0])
        return f->tile.groups * 128 + 32;
    return f->family == CU_SM90 ? (f->tile.groups + 1 + f->backward.is_split) * 128
                                : f->tile.groups * f->backward.parts * 32;
}

static int panels(int dim)
{
    return (dim + 63) / 64;
}

/* as carve() of bwd_sm90.cu lays it out */
static int tile_shared(const cu_form *f, int columns)
{
    const int keys = f->tile.keys, stages = f->tile.stages;
    const int frees_early = f->backward.is_split && stages == 2;
    const int stats = 2 * BWD_ROWS * 4, steps = 10 * 16;
    const int barriers = 8 * (9 + (2 + frees_early) * stages);
    const int stagings = 2 * BWD_ROWS * 64 * 4, lines = keys * 4 + 96 + 160;
    const int dense = CU_DENSE_STAGES * BWD_ROWS * keys * f->dense_bytes;
    return columns * keys * 128 + stages * (columns * BWD_ROWS * 128 + stats) + 2 * keys * 128
           + stagings + dense + steps + lines + barriers;
}

/* as keys_carve() of bwd_wide.cu lays it out */
static int wide_key_bytes(const cu_form *f, int d, int e)
{
    const int stages = f->tile.stages, weights = 64 * BWD_ROWS * 3; /* of 3 bytes at most */
    const int step = stages * (16 + 2 * BWD_ROWS * 4), barriers = 8 * (6 + 4 * stages);
    return (1 + stages) * (d + e) + 2 * weights + step + barriers;
}

/* as queries_carve() does */
static int wide_query_bytes(const cu_form *f, int d, int e)
{
    const int stages = f->tile.stages, values = f->backward.value_stages;
    const int own = f->backward.stay / 64, barriers = 8 * (2 + 2 * stages + 2 * values);
    return (own + stages) * d + (own + values) * e + stages * 16 + barriers;
}

static int larger(int a, int b)
{
    return a > b ? a : b;
}

static int is_elements90(const cu_form *f)
{
    return f->family == CU_SM90 && f->backward.blocks;
}

/* as elements_carve() of bwd_elements90.cu lays it out; pairs of tiles in flight: stages */
static int elements90_shared(const cu_form *f, int panels)
{
    const int tile = (f->backward.stay + f->tile.keys) * 128, visits = (f->tile.stages + 2) / 2;
    return f->tile.stages * (panels * tile + 2 * 8)
           + f->backward.stay * f->tile.keys * f->backward.kept
           + visits * (2 * f->backward.stay * 4 + 16);
}

enum { PAIRS_MOST = 6, PAIRS_LEAST = 2 };

/* Up to six pairs: three visits, two of them on their way. */
static int fit_pairs(cu_form *f, int panels)
{
    f->tile.stages = PAIRS_MOST;
    while (f->tile.stages >= PAIRS_LEAST && elements90_shared(f, panels) > cu_shared_most(90))
        f->tile.stages--;
    return f->tile.stages >= PAIRS_LEAST;
}

int cu_backward_elements90_choice(int D, int E, int kept, cu_form *out)
{
    const int dim = larger(D, E);
    if (dim > 128)
        return 0;
    *out = (cu_form){.family = CU_SM90,
                     .tile = {.groups = 2, .keys = 128},
                     .backward = {.rows = cu_backward_pass_choice(D, E).backward.rows,
                                  .parts = 1,
                                  .is_captures = 1,
                                  .blocks = 1,
                                  .kept = kept,
                                  .stay = 2 * BWD_ROWS,
                                  .registers = {240, 24, 0}}};
    if (!fit_pairs(out, panels(dim))) { /* loads are made again, not kept */
        out->backward.kept = 0;
        return fit_pairs(out, panels(dim));
    }
    return 1;
}

static int wide_shared(const cu_form *f, int D, int E)
{
    const int tile = 64 * 128, d = panels(D) * tile, e = panels(E) * tile;
    return larger(wide_key_bytes(f, d, e), wide_query_bytes(f, d, e));
}

/* as keys_carve() and queries_carve() of bwd_f32.cu lay it out */
static int f32_key_bytes(const cu_form *f, int columns)
{
    const int rows = f->backward.rows, stages = f->tile.stages;
    const int step = stages * (16 + 2 * rows * 4), barriers = 8 * (6 + 4 * stages);
    return 3 * columns * 128 * (64 + stages * rows) + 2 * 64 * rows * 4 + step + barriers;
}

static int f32_query_bytes(const cu_form *f, int columns)
{
    const int stages = f->backward.value_stages;
    return 3 * columns * 128 * (64 + stages * f->backward.rows) + stages * 16
           + 8 * (1 + 3 * stages);
}

static int is_f32_wgmma(const cu_form *f)
{
    return f->family == CU_SM90 && f->backward.is_thirds;
}

int cu_backward_query_shared(const cu_form *f, int D, int E)
{
    if (is_f32_wgmma(f))
        return f32_query_bytes(f, panels(D) + panels(E));
    const int tile = 64 * 128;
    return wide_query_bytes(f, panels(D) * tile, panels(E) * tile);
}

/* of 32 columns: each part has its own */
static int panels32(int dim, int parts)
{
    return (dim + 32 * parts - 1) / (32 * parts) * parts;
}

static int pass_shared(const cu_form *f, int columns)
{
    const int rows = f->backward.rows, stages = f->tile.stages, keys = f->tile.keys;
    if (f->backward.blocks)
        return columns * (BWD_ROWS + keys) * 128 * stages + BWD_ROWS * keys * f->backward.kept;
    const int stats = (keys + stages * rows) * 8;
    const int sums = (keys * (rows + 1) + keys + rows + 4 * rows + 4 + 4 * CU_READS)
                     * 4; /* captures' scratch */
    return columns * (keys + stages * rows) * 128 + (f->backward.is_captures ? sums : stats);
}

/* bytes of the pieces of a block that passes, of whole threads */
static int piece_bytes(const cu_form *f, int dim)
{
    const int threads = cu_backward_threads(f);
    return (f->backward.rows * dim / 8 + threads - 1) / threads * threads * 32;
}

/* three copies of the tiles, and a block on its way */
static int thirds_shared(const cu_form *f, int D, int E)
{
    const int rows = f->backward.rows, stats = (f->tile.keys + f->tile.stages * rows) * 8;
    return 3 * 2 * (f->tile.keys + rows) * 128 + piece_bytes(f, D) + piece_bytes(f, E) + stats;
}

int cu_backward_shared_bytes(const cu_form *f, int D, int E)
{
    const int columns = panels(D) + panels(E);
    if (is_f32_wgmma(f))
        return larger(f32_key_bytes(f, columns), f32_query_bytes(f, columns));
    if (is_elements90(f))
        return elements90_shared(f, panels(larger(D, E)));
    if (f->backward.is_thirds)
        return thirds_shared(f, D, E);
    if (f->backward.value_stages)
        return wide_shared(f, D, E);
    if (f->family == CU_F32)
        return pass_shared(f, panels32(D, f->backward.parts) + panels32(E, f->backward.parts));
    return f->family == CU_SM90 ? tile_shared(f, columns) : pass_shared(f, columns);
}

static void put_config(const plan_problem *p, const cu_form *form, const cu_mod_text *facts,
                       strbuf *out)
{
    const int is_sm90 = form->family == CU_SM90, has_tiles = is_sm90 && !is_elements90(form);
    /* a slope of the head: applied to the sums of dQ and dK by Hopper's tiles */
    const int is_late = has_tiles && facts->is_head_slope && !form->backward.value_stages;
    const cu_constant rows[] = {
        {"SM", is_sm90 ? 90 : 80},
        {"F16", p->dtype == SACCADE_F16},
        {"F32", p->dtype == SACCADE_F32},
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
        {"SPLIT", form->backward.is_split},
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
        {"IN_PARTS", cu_backward_has_parts(p)},
        {"LATE_SLOPE", is_late},
        {"TM", form->backward.rows},
        {"TN", form->backward.rows},
        {"TILE_ROWS", form->tile.keys},
        {"DENSE", form->dense_bytes > 0},
        {"PARTS", form->backward.parts},
        {"THIRDS", form->backward.is_thirds},
        {"DROP", p->weight != NULL},
        {"ROWS", p->has_rows},
        {"Q_SHARED", 0},
        {"SCALE_FIRST", 0},
        {"CODES", 0},
        {"PAGES", p->has_chunks},
        {"RAGGED", p->is_ragged},
        {"MONOTONE", cu_is_monotone(plan_limits(p))},
        {"SINKS", cu_sinks_code(p)},
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
    if (is_f32_wgmma(form)) {
        put_product("wgmma_scores", form->backward.rows, type, 0, 0, 0, out);
        put_product("wgmma_sum", 64, type, 1, 0, 1, out);
        return;
    }
    put_product("wgmma_scores", is_elements90(form) ? form->tile.keys : BWD_ROWS, type, 0, 0, 0,
                out);
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
