/* Which kernel a run gets, and block masks in its blocks: lists of live blocks are made when a
 * mask is prepared, for every kernel that may come, and found again when one does. */
#include "cuda/run.h"

enum { DECODE_BLOCK_Q = 64 }; /* block masks for decode have one row of blocks */

/* Blocks of a mask as a kernel walks them: rows, keys, and heads that share a tile. */
typedef struct blocks {
    int rows, keys, group;
} blocks;

/* form: of the tiles; NULL: decode */
static blocks blocks_for(const cu_state *s, const cu_form *form, const saccade_block_mask *mask,
                         const saccade_sizes *sizes)
{
    const int imported = mask_get_view(mask)->imported_block_q;
    blocks x = {DECODE_BLOCK_Q, s->decode.keys, (int)(sizes->H / sizes->Hkv)};
    if (form)
        x = (blocks){run_rows(form), form->tile.keys, 1};
    if (imported >= sizes->Q && x.rows >= sizes->Q) /* one row of blocks holds all queries */
        x.rows = imported;
    return x;
}

/* A kernel takes blocks of an imported mask whole or in parts. Its lists may say what no mod
 * does, and a group's heads see the same of them only where they are the same. */
static int is_suited(const cu_state *s, const cu_form *form, const saccade_block_mask *mask,
                     const saccade_sizes *sizes)
{
    const mask_view *view = mask ? mask_get_view(mask) : NULL;
    if (!mask || !view->imported_block_q)
        return 1;
    const blocks x = blocks_for(s, form, mask, sizes);
    const mask_runs *own =
        mask_runs_ready(mask, view->imported_block_q, view->imported_block_kv, 0);
    return own && own->block_q % x.rows == 0 && own->block_kv % x.keys == 0
           && (x.group == 1 || own->H == 1);
}

static saccade_status unsuited(const cu_state *s, const saccade_block_mask *mask,
                               saccade_error *err)
{
    const mask_view *view = mask_get_view(mask);
    const cu_form *form = s->plain.tile.groups ? &s->plain : &s->form;
    FAIL_AT(1, SACCADE_EINVAL, "block_mask", 0, 0,
            "got imported blocks of %d x %d, expected multiples of %d x %d",
            view->imported_block_q, view->imported_block_kv, run_rows(form), form->tile.keys);
}

static saccade_status make_runs(const saccade_plan *plan, const saccade_block_mask *mask,
                                int device, const saccade_sizes *sizes, saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_form *const forms[] = {NULL, &s->form, &s->peaks, &s->plain};
    const cu_driver *driver;
    int n = 0, has_decode = 0;
    TRY(cu_get_driver(&driver, err));
    for (int i = 0; i < 4; i++) {
        const int is_there = forms[i] ? forms[i]->tile.groups > 0 : run_is_decode(s, sizes);
        if (!is_there || !is_suited(s, forms[i], mask, sizes))
            continue;
        if (has_decode && forms[i] != &s->plain)
            continue; /* few rows are tiles only where they are plain */
        has_decode |= !forms[i];
        const blocks x = blocks_for(s, forms[i], mask, sizes);
        TRY(cu_runs_make(driver, device, mask, x.rows, x.keys, x.group, sizes,
                         (size_t)s->device.l2_bytes, err));
        n++;
    }
    return n ? SACCADE_OK : unsuited(s, mask, err);
}

saccade_status cu_prepare(const saccade_plan *plan, const saccade_block_mask *mask,
                          saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_driver *driver;
    void *context = NULL;
    int device = 0;
    FAIL_IF(!s->is_present, SACCADE_EBACKEND, "cuda: no device here runs %s", s->arch);
    TRY(cu_get_driver(&driver, err));
    driver->context_current(&context);
    if (context)
        driver->context_device(&device);
    saccade_sizes sizes = mask_get_view(mask)->sizes;
    if (sizes.B == 1 && plan->problem.sizes.B > 1) /* one mask for a batch the plan hints at */
        sizes.B = plan->problem.sizes.B;
    sizes.H = plan->problem.sizes.H;
    sizes.Hkv = plan->problem.sizes.Hkv;
    sizes.D = plan->problem.sizes.D;
    sizes.Dv = plan->problem.sizes.Dv;
    return make_runs(plan, mask, device, &sizes, err);
}

saccade_status run_find_runs(const cu_state *s, const plan_run *run, const cu_form *form,
                             const cu_runs **out, saccade_error *err)
{
    const int device = run->q->device.index;
    *out = NULL;
    if (!run->block_mask)
        return SACCADE_OK;
    const blocks x = blocks_for(s, form, run->block_mask, &run->sizes);
    *out = cu_runs_find(device, run->block_mask, x.rows, x.keys, x.group, &run->sizes);
    FAIL_IF(!*out, SACCADE_EINVAL,
            "cuda: got a block mask that has no copy on device %d for this batch, expected "
            "saccade_plan_prepare first",
            device);
    return SACCADE_OK;
}

/* Only the sm_90a kernels need aligned rows. */
saccade_status run_choose_form(const cu_state *s, const plan_run *run, const cu_form **out,
                               saccade_error *err)
{
    const int is_free = s->form.family != CU_SM90 || run_is_aligned(run);
    const cu_form *const forms[] = {NULL, run->row_max ? &s->peaks : &s->form, &s->plain};
    const int may[] = {is_free && run_is_decode(s, &run->sizes), is_free,
                       s->plain.tile.groups > 0};
    for (int i = 0; i < 3; i++)
        if (may[i] && is_suited(s, forms[i], run->block_mask, &run->sizes)) {
            *out = forms[i];
            return SACCADE_OK;
        }
    return unsuited(s, run->block_mask, err);
}
