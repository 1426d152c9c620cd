/* What a CUDA plan is, in lines of `name: value`: the main program's tile and why it was taken,
 * what ptxas said of every program, then the text made from the user's mod. Registers, spills
 * and waits are the worst of the plan's programs. */
#include "cuda/backward/cuda_backward.h"

#include <string.h>

static cu_report worst_of(const cu_state *s)
{
    cu_report worst = {0};
    for (int i = 0; i < CU_PROGRAMS; i++) {
        const cu_report *r = &s->programs[i].image.report;
        worst.registers = r->registers > worst.registers ? r->registers : worst.registers;
        worst.spill_bytes =
            r->spill_bytes > worst.spill_bytes ? r->spill_bytes : worst.spill_bytes;
        worst.is_serialised |= r->is_serialised;
    }
    return worst;
}

static void put_programs(const cu_state *s, strbuf *out)
{
    for (int i = 0; i < CU_PROGRAMS; i++) {
        const cu_image *image = &s->programs[i].image;
        const cu_report *r = &image->report;
        if (!image->code)
            continue;
        strbuf_printf(out, "program %s: %d registers, %d spill bytes, %zu bytes of code, ",
                      cu_program_kinds[i].name, r->registers, r->spill_bytes, image->bytes);
        if (r->from_cache)
            strbuf_puts(out, "from the cache\n");
        else
            strbuf_printf(out, "compiled in %.2f s\n", r->seconds);
    }
}

static int has_one_form(const saccade_plan *plan, cu_program i)
{
    cu_form second;
    return !cu_program_kinds[i].choose(plan->state, &plan->problem, 1, &second);
}

/* Where a program is not what was hoped for, and what was done about it. */
static void put_program_notes(const saccade_plan *plan, cu_program i, strbuf *out)
{
    const cu_state *s = plan->state;
    const cu_loaded *l = &s->programs[i];
    const cu_report *r = &l->image.report;
    const char *name = cu_program_kinds[i].name;
    if (s->is_like_another && cu_program_kinds[i].operation != CU_OP_BACKWARD)
        return;
    if (l->rung)
        strbuf_printf(out, "%s note: %d larger tile%s spilled more\n", name, l->rung,
                      l->rung == 1 ? "" : "s");
    if (r->spill_bytes > cu_program_kinds[i].spill_most || r->is_serialised)
        strbuf_printf(out, "program note: %s spills or waits%s\n", name,
                      has_one_form(plan, i) ? "" : " in every tile");
}

static void put_notes(const saccade_plan *plan, strbuf *out)
{
    const cu_state *s = plan->state;
    const int rung = s->programs[CU_MAIN].rung;
    const cu_report *main = &s->programs[CU_MAIN].image.report;
    if (s->is_like_another)
        strbuf_puts(out, "tile note: forward's tiles are those of all rows of a sequence whose "
                         "keys lie in one piece\n");
    else if (main->spill_bytes || main->is_serialised)
        strbuf_puts(out, "tile note: every tile spills or waits; the first is kept\n");
    else if (rung)
        strbuf_printf(out, "tile note: %d larger tile%s spilled or waited\n", rung,
                      rung == 1 ? "" : "s");
    if (strncmp(s->arch, "compute_", 8) == 0)
        strbuf_puts(out, "target note: PTX, of which only the driver knows the registers\n");
    for (int i = 0; i < CU_PROGRAMS; i++)
        if (i != CU_MAIN && s->programs[i].image.code)
            put_program_notes(plan, (cu_program)i, out);
}

/* That sums of dQ in fixed point have no bound, where tiles would need one, or NULL. */
static const char *why_unbounded(const cu_state *s, const plan_problem *p)
{
    cu_form form;
    const int D = cu_padded(p->sizes.D), E = cu_padded(p->sizes.Dv);
    return cu_backward_tile_choice(D, E, 0, &form) && !cu_backward_is_bounded(s, p)
               ? "no bound of the score's slope is proven, which sums in fixed point need"
               : NULL;
}

/* Why backward is not done by tiles, or NULL. */
static const char *why_plain(const cu_state *s, const plan_problem *p)
{
    const char *why = why_unbounded(s, p);
    if (cu_backward_has_tiles(s))
        return NULL;
    if (s->family == CU_F32)
        return "tiles of f32 need sm_90a, head dims to 128 and no dropout";
    if (s->family != CU_SM90)
        return "tiles need sm_90a and head dims that are multiples of 8";
    return why ? why : "every tile spills or waits";
}

/* Where each gradient of a capture is made. */
static void put_captures(const cu_state *s, const plan_problem *p, strbuf *out)
{
    static const char *const places[] = {
        [CU_TERM_NONE] = "by a kernel that makes scores again",
        [CU_TERM_DIAGONAL] = "sums of diagonals in the tiles",
        [CU_TERM_ELEMENT] = "stored by the tiles",
        [CU_TERM_SCALE] = "from the sums of dQ",
        [CU_TERM_LINE] = "sums of rows beside dQ in the tiles",
        [CU_TERM_KEY] = "sums of keys in the tiles",
        [CU_TERM_ROW] = "0, but for dlse's, which a kernel makes that makes scores again",
    };
    cu_reads_found reads;
    cu_find_reads(p, &reads);
    for (int i = 0; i < reads.n; i++) {
        const int is_first = i < CU_READS && cu_backward_has_tiles(s);
        const int term = is_first ? s->backward_facts.term[i] : CU_TERM_NONE;
        const pass_read *read = reads.read[i];
        const int is_shared =
            cu_read_has_elements(read) && !cu_read_is_own(read, p->sizes.B, p->sizes.H);
        strbuf_printf(out, "gradient of %s: %s\n", p->score->captures[read->capture].name,
                      is_shared ? "summed over batches and heads by a kernel that makes "
                                  "scores again"
                                : places[term]);
    }
}

static void put_backward(const saccade_plan *plan, strbuf *out)
{
    const cu_state *s = plan->state;
    const plan_problem *p = &plan->problem;
    const cu_form *tiles = &s->programs[CU_BWD_TILES].form;
    const cu_form *plain = &s->programs[CU_BWD_PLAIN].form;
    const cu_form *wide = &s->programs[CU_BWD_WIDE].form;
    const cu_form *few = &s->programs[CU_BWD_FEW].form;
    const cu_form *f32 = &s->programs[CU_BWD_F32].form;
    const char *why = why_plain(s, p), *unbounded = why_unbounded(s, p);
    if (!p->gradients)
        return;
    if (cu_backward_has_wide(s))
        strbuf_printf(out,
                      "backward: scores twice, dK and dV by %d keys, dQ by %d queries; "
                      "unaligned rows the same by %d%s%s\n",
                      wide->tile.keys, wide->backward.stay, BWD_ROWS, unbounded ? "; " : "",
                      unbounded ? unbounded : "");
    else if (cu_backward_has_f32(s))
        strbuf_printf(out,
                      "backward: scores twice, dK and dV by %d keys, dQ by %d queries, of "
                      "operands in three bf16 numbers; unaligned rows the same as they are\n",
                      f32->tile.keys, f32->backward.stay);
    else if (why)
        strbuf_printf(out,
                      "backward: scores twice, dK and dV by %d keys, dQ by %d queries; %s\n",
                      plain->tile.keys, BWD_ROWS, why);
    else
        strbuf_printf(out,
                      "backward: tiles of %d keys x %d queries, %s; unaligned rows: scores "
                      "twice\n",
                      tiles->tile.keys, BWD_ROWS,
                      !(p->gradients & SACCADE_GRADIENT_Q) ? "no dQ"
                      : p->is_relaxed                      ? "dQ summed in any order"
                                                           : "dQ summed in fixed point");
    if (few->tile.groups)
        strbuf_printf(
            out,
            "backward where rows see few keys: scores twice, dK and dV by %d keys, dQ "
            "by %d queries\n",
            few->tile.keys, few->backward.stay);
    put_captures(s, p, out);
    if (!plan_has_lengths(p))
        return;
    const int parts = cu_backward_parts_most(plan, &p->sizes);
    if (parts > 1)
        strbuf_printf(out,
                      "backward: queries of a KV head in up to %d parts, by the lengths of "
                      "tiles\n",
                      parts);
    strbuf_printf(out, "backward workspace: %zu bytes\n",
                  cu_backward_workspace(plan, &p->sizes, NULL));
}

/* How keys in pages come into shared memory. */
static void put_page_copies(const plan_problem *p, cu_program reader, const cu_form *form,
                            strbuf *out)
{
    const int keys = form->tile.keys;
    const int box = p->page < 0 ? keys : cu_keys_in_both(p->page, keys);
    strbuf_printf(out, "pages, %s: ", cu_program_kinds[reader].name);
    if (form->family != CU_SM90 || cu_codes(p)
        || cu_gathers(reader == CU_DECODE, &form->tile, box))
        strbuf_puts(out, "copied by 16 bytes or less\n");
    else if (p->page < 0)
        strbuf_printf(out, "tensor copies of as many keys as divide a page and %d%s\n", keys,
                      reader == CU_DECODE ? "; few by 16 bytes" : "");
    else
        strbuf_printf(out, "tensor copies of %d keys\n", box);
}

static void put_one_piece(const saccade_plan *plan, strbuf *out)
{
    const cu_state *s = plan->state;
    if (s->programs[CU_ONE_PIECE].image.code)
        strbuf_printf(
            out,
            "pages, long runs: keys into one piece of the workspace first, where they "
            "take at most %d MiB\n",
            CU_COLLECT_BYTES >> 20);
}

static void put_pages(const saccade_plan *plan, strbuf *out)
{
    static const cu_program readers[] = {CU_DECODE, CU_MAIN};
    const cu_state *s = plan->state;
    for (int i = 0; i < 2 && plan->problem.page; i++) {
        const cu_loaded *l = &s->programs[readers[i]];
        if (l->image.code)
            put_page_copies(&plan->problem, readers[i], &l->form, out);
    }
    put_one_piece(plan, out);
}

/* Tensors that come as tiles where a run's strides allow it. */
static void put_dense(const char *what, const cu_loaded *l, const cu_mod_text *facts, int rows,
                      int columns, const plan_problem *p, strbuf *out)
{
    if (!l->image.code)
        return;
    strbuf_printf(out, "%s:", what);
    for (int r = 0; r < facts->n_dense; r++) {
        const mod_fn *fn = r < facts->n_dense_score ? p->score : p->mask;
        strbuf_printf(out, "%s %s", r ? "," : "", fn->captures[facts->dense[r].capture].name);
    }
    strbuf_printf(out, ", in tiles of %dx%d where keys or queries lie side by side\n", rows,
                  columns);
}

static void put_all_dense(const cu_state *s, const plan_problem *p, strbuf *out)
{
    const cu_loaded *forward = &s->programs[CU_DENSE], *backward = &s->programs[CU_BWD_DENSE];
    put_dense("dense reads", forward, &s->facts, cu_tile_rows(CU_SM90, &forward->form.tile),
              forward->form.tile.keys, p, out);
    put_dense("dense reads, backward", backward, &s->backward_facts, BWD_ROWS,
              backward->form.tile.keys, p, out);
}

/* What is made once for many scores: see emit_shares.c. */
static void put_shares(const char *what, const cu_mod_text *facts, strbuf *out)
{
    static const char *const names[] = {"query", "key", "diagonal"};
    const cu_shares *s = &facts->shares;
    const int n[] = {s->n_rows, s->n_keys, s->n_diagonals};
    if (!cu_has_shares(facts))
        return;
    strbuf_printf(out, "%s:", what);
    for (int i = 0, any = 0; i < 3; i++)
        if (n[i])
            strbuf_printf(out, "%s %d of each %s", any++ ? "," : "", n[i], names[i]);
    strbuf_puts(out, "\n");
}

saccade_status cu_explain(const saccade_plan *plan, strbuf *out, saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_form *form = &s->programs[s->has_large_heads ? CU_DECODE_WIDE : CU_MAIN].form;
    const cu_report worst = worst_of(s);
    strbuf_printf(out, "arch: %s\n", s->arch);
    strbuf_printf(out, "tile: %dx%d\n",
                  form->span_rows ? form->span_rows : cu_tile_rows(form->family, &form->tile),
                  form->tile.keys);
    strbuf_printf(out, "pipeline stages: %d\n", form->tile.stages);
    strbuf_printf(out, "registers: %d\n", worst.registers);
    strbuf_printf(out, "spill bytes: %d\n", worst.spill_bytes);
    strbuf_printf(out, "shared memory: %d\n", cu_shared_bytes(form, &s->facts, &plan->problem));
    strbuf_printf(out, "serialised products: %s\n", worst.is_serialised ? "yes" : "no");
    strbuf_printf(out, "offsets: %s\n",
                  form->tile.is_lazy ? "late, with a second pass" : "exact");
    put_all_dense(s, &plan->problem, out);
    if (s->family == CU_SM90) {
        put_shares("shared values", &s->facts, out);
        if (cu_backward_has_tiles(s))
            put_shares("shared values, backward", &s->backward_facts, out);
    }
    put_pages(plan, out);
    put_notes(plan, out);
    put_backward(plan, out);
    put_programs(s, out);
    strbuf_puts(out, "code:\n");
    strbuf_puts(out, s->mod_text);
    if (s->backward_text) {
        strbuf_puts(out, "code for gradients:\n");
        strbuf_puts(out, s->backward_text);
    }
    return strbuf_status(out, err);
}
