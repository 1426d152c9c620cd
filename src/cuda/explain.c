/* What a CUDA plan is, in lines of `name: value`: the tile and why it, what ptxas said of every
 * program, then the text made from the user's mod. The first figures are the worst over the
 * plan's programs. */
#include "cuda/cuda.h"

#include <string.h>

static const char *const program_names[CU_PROGRAMS] = {"forward", "row maxima", "careful",
                                                       "plain", "decode"};

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
                      program_names[i], r->registers, r->spill_bytes, image->bytes);
        if (r->from_cache)
            strbuf_puts(out, "from the cache\n");
        else
            strbuf_printf(out, "compiled in %.2f s\n", r->seconds);
    }
}

/* Where a program is not what was hoped for, and what was done about it. */
static void put_notes(const cu_state *s, strbuf *out)
{
    if (s->given_up)
        strbuf_puts(out, "tile note: every tile spills or waits; the first is kept\n");
    else if (s->rung)
        strbuf_printf(out, "tile note: %d larger tile%s spilled or waited\n", s->rung,
                      s->rung == 1 ? "" : "s");
    if (strncmp(s->arch, "compute_", 8) == 0)
        strbuf_puts(out, "target note: PTX, of which only the driver knows the registers\n");
    if (s->peaks_rung)
        strbuf_printf(out, "row maxima note: %d larger tile%s spilled more\n", s->peaks_rung,
                      s->peaks_rung == 1 ? "" : "s");
    if (s->plain_rung)
        strbuf_printf(out, "plain note: %d larger tile%s spilled more\n", s->plain_rung,
                      s->plain_rung == 1 ? "" : "s");
    if (s->decode_rung)
        strbuf_printf(out, "decode note: %d larger tile%s spilled more\n", s->decode_rung,
                      s->decode_rung == 1 ? "" : "s");
    for (int i = CU_MAIN + 1; i < CU_PROGRAMS; i++) {
        const cu_report *r = &s->programs[i].image.report;
        if (r->spill_bytes || r->is_serialised)
            strbuf_printf(out, "program note: %s spills or waits%s\n", program_names[i],
                          i == CU_CAREFUL                              ? ""
                          : i == CU_PEAKS && s->form.family == CU_SM90 ? ", in the main tile"
                                                                       : " in every tile");
    }
}

saccade_status cu_explain(const saccade_plan *plan, strbuf *out, saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_report worst = worst_of(s);
    strbuf_printf(out, "arch: %s\n", s->arch);
    strbuf_printf(out, "tile: %dx%d\n", cu_tile_rows(s->form.family, &s->form.tile),
                  s->form.tile.keys);
    strbuf_printf(out, "pipeline stages: %d\n", s->form.tile.stages);
    strbuf_printf(out, "registers: %d\n", worst.registers);
    strbuf_printf(out, "spill bytes: %d\n", worst.spill_bytes);
    strbuf_printf(out, "shared memory: %d\n",
                  cu_shared_bytes(&s->form, &s->facts, &plan->problem));
    strbuf_printf(out, "serialised products: %s\n", worst.is_serialised ? "yes" : "no");
    strbuf_printf(out, "offsets: %s\n", s->is_lazy ? "late, with a second pass" : "exact");
    put_notes(s, out);
    put_programs(s, out);
    strbuf_puts(out, "code:\n");
    strbuf_puts(out, s->mod_text);
    return strbuf_status(out, err);
}
