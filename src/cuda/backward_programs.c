/* What a plan compiles for backward. */
#include "cuda/cuda_backward.h"

#include "cuda/emit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static saccade_status compile_one(const saccade_plan *plan, const cu_backward *b,
                                  const char *entry, int is_sm90, cu_image *out,
                                  saccade_error *err)
{
    const cu_state *s = plan->state;
    const plan_problem *p = &plan->problem;
    strbuf config, products;
    strbuf_init(&config, 0);
    strbuf_init(&products, 0);
    cu_backward_config(b, p, is_sm90, &config);
    cu_backward_products(cu_padded(p->sizes.D), cu_padded(p->sizes.Dv),
                         p->dtype == SACCADE_F16, &products);
    const cu_source generated[] = {{"cfg.cuh", strbuf_text(&config)},
                                   {"mod.cuh", b->mod_text},
                                   {"wgmma.cuh", strbuf_text(&products)}};
    saccade_status status = strbuf_status(&config, err);
    if (status == SACCADE_OK)
        status = strbuf_status(&products, err);
    if (status == SACCADE_OK)
        status = cu_compile(entry, generated, 3, s->arch, out, err);
    strbuf_free(&config);
    strbuf_free(&products);
    return status;
}

static int is_clean(const cu_report *r)
{
    return r->spill_bytes == 0 && !r->is_serialised;
}

/* The first tile that neither spills nor waits for its products one by one; else none. */
static saccade_status choose_tile(const saccade_plan *plan, cu_backward *b, saccade_error *err)
{
    const cu_state *s = plan->state;
    cu_image *image = &b->programs[CU_BWD_TILES].image;
    const int D = cu_padded(plan->problem.sizes.D), E = cu_padded(plan->problem.sizes.Dv);
    if (s->family != CU_SM90 || (!b->is_relaxed && !isfinite(b->facts.slope_most)))
        return SACCADE_OK;
    for (int rung = 0; cu_backward_tile_choice(D, E, rung, &b->tile); rung++) {
        TRY(compile_one(plan, b, "bwd_sm90.cu", 1, image, err));
        if (is_clean(&image->report))
            return SACCADE_OK;
        free(image->code);
        *image = (cu_image){0};
    }
    b->tile = (cu_backward_tile){0};
    return SACCADE_OK;
}

static saccade_status emit(const saccade_plan *plan, arena *scratch, cu_backward *b,
                           saccade_error *err)
{
    strbuf text;
    strbuf_init(&text, 0);
    const saccade_status status =
        cu_emit_backward_mod(&plan->problem, scratch, &text, &b->facts, err);
    b->mod_text = strbuf_steal(&text);
    FAIL_IF_NULL(status == SACCADE_OK ? b->mod_text : "");
    return status;
}

static saccade_status load_all(const cu_state *s, cu_backward *b, saccade_error *err)
{
    static const char *const names[CU_BWD_PROGRAMS][2] = {{"bwd_prepare", "bwd_bounds"},
                                                          {"bwd_finish", NULL},
                                                          {"bwd_sm90", NULL},
                                                          {"bwd_keys", "bwd_queries"}};
    const cu_driver *driver;
    if (!s->is_present)
        return SACCADE_OK;
    TRY(cu_get_driver(&driver, err));
    for (int i = 0; i < CU_BWD_PROGRAMS; i++) {
        cu_loaded *l = &b->programs[i];
        if (!l->image.code)
            continue;
        TRY(cu_check(
            driver,
            driver->library_load(&l->library, l->image.code, NULL, NULL, 0, NULL, NULL, 0),
            "cuLibraryLoadData", err));
        TRY(cu_check(driver, driver->library_kernel(&l->kernel, l->library, names[i][0]),
                     "cuLibraryGetKernel", err));
        if (names[i][1])
            TRY(cu_check(driver, driver->library_kernel(&l->other, l->library, names[i][1]),
                         "cuLibraryGetKernel", err));
    }
    return SACCADE_OK;
}

saccade_status cu_backward_create(const saccade_plan *plan, int is_relaxed, arena *scratch,
                                  cu_backward *out, saccade_error *err)
{
    const plan_problem *p = &plan->problem;
    const int D = cu_padded(p->sizes.D), E = cu_padded(p->sizes.Dv);
    memset(out, 0, sizeof *out);
    FAIL_AT(p->dtype == SACCADE_F32, SACCADE_EBACKEND, "backward", 0, 0,
            "got f32, expected bf16 or f16 on the CUDA back end");
    out->is_relaxed = is_relaxed;
    out->pass = cu_backward_pass_choice(D, E);
    TRY(emit(plan, scratch, out, err));
    TRY(choose_tile(plan, out, err));
    TRY(compile_one(plan, out, "bwd_prepare.cu", out->tile.groups > 0,
                    &out->programs[CU_BWD_PREPARE].image, err));
    if (out->tile.groups)
        TRY(compile_one(plan, out, "bwd_finish.cu", 1, &out->programs[CU_BWD_FINISH].image,
                        err));
    TRY(compile_one(plan, out, "bwd_sm80.cu", 0, &out->programs[CU_BWD_PLAIN].image, err));
    return load_all(plan->state, out, err);
}

void cu_backward_destroy(cu_backward *b)
{
    const cu_driver *driver;
    for (int i = 0; i < CU_BWD_PROGRAMS; i++) {
        if (b->programs[i].library && cu_get_driver(&driver, NULL) == SACCADE_OK)
            driver->library_unload(b->programs[i].library);
        free(b->programs[i].image.code);
    }
    free(b->mod_text);
}
