/* Which program a run takes, and block masks in that program's blocks. Lists of live blocks are
 * made when a mask is prepared, for every program that may run, and looked up by each run. */
#include "cuda/run/run.h"

#include "base/integers.h"

enum { DECODE_BLOCK_Q = 64 }; /* block masks for decode have one row of blocks */

/* Blocks of a mask as a program walks them: rows, keys, and heads that share a tile. */
typedef struct blocks {
    int rows, keys, group;
} blocks;

static blocks blocks_for(const cu_state *s, cu_program program, const saccade_block_mask *mask,
                         const saccade_sizes *sizes)
{
    const int imported = mask_get_view(mask)->imported_block_q;
    const cu_form *form = &s->programs[program].form;
    const int is_decode = cu_program_kinds[program].operation == CU_OP_DECODE;
    const int is_small = cu_program_kinds[program].operation == CU_OP_SMALL;
    blocks x = {is_decode ? DECODE_BLOCK_Q : run_rows(form),
                is_small ? PIECE_UNIT : form->tile.keys, is_decode ? cu_group(sizes) : 1};
    if (s->has_large_heads)
        x.rows = (int)larger(x.rows, sizes->Q); /* decode of any number of queries */
    if (!s->has_rows && imported >= sizes->Q
        && x.rows >= sizes->Q) /* one row of blocks holds all queries */
        x.rows = imported;
    return x;
}

static int has_empty_list(const mask_runs *r)
{
    for (int64_t row = 0; row < r->B * r->H * r->rows; row++)
        if (!r->row_live[row])
            return 1;
    return 0;
}

/* A program takes blocks of an imported mask whole or in parts. Its lists may say what no mod
 * does, and a group's heads see the same of them only where they are the same. Decode looks at
 * one block of every list, and leaves it to the mod to hide it; what is selected on a device is
 * not known here. */
static int is_suited(const cu_state *s, cu_program program, const saccade_block_mask *mask,
                     const saccade_sizes *sizes)
{
    const mask_view *view = mask ? mask_get_view(mask) : NULL;
    if (!mask || !view->imported_block_q)
        return 1;
    if (cu_program_kinds[program].operation == CU_OP_PARTS
        || (s->has_fixed_pieces && cu_program_kinds[program].operation == CU_OP_DECODE))
        return 0; /* they evaluate masks, and lists may say what no mod does */
    const blocks x = blocks_for(s, program, mask, sizes);
    const mask_runs *own =
        mask_runs_ready(mask, view->imported_block_q, view->imported_block_kv, 0);
    return own && own->block_q % x.rows == 0 && own->block_kv % x.keys == 0
           && (x.group == 1 || own->H == 1)
           && !(cu_program_kinds[program].operation == CU_OP_DECODE
                && (view->selection.most || has_empty_list(own)));
}

static saccade_status unsuited(const cu_state *s, const saccade_block_mask *mask,
                               saccade_error *err)
{
    const mask_view *view = mask_get_view(mask);
    const int has_unaligned = s->programs[CU_UNALIGNED].form.tile.groups > 0;
    const cu_form *form = &s->programs[has_unaligned ? CU_UNALIGNED : CU_MAIN].form;
    FAIL_AT(1, SACCADE_EINVAL, "block_mask", 0, 0,
            "got imported blocks of %d x %d, expected multiples of %d x %d",
            view->imported_block_q, view->imported_block_kv, run_rows(form), form->tile.keys);
}

int run_wants_wide(const cu_state *s, const saccade_sizes *sizes)
{
    const int takes_narrow = run_takes_decode(s, CU_DECODE, sizes);
    return run_takes_decode(s, CU_DECODE_WIDE, sizes)
           && (!takes_narrow || cu_decode_wide_pays(s->device.n_sm, s->is_in_pieces, sizes));
}

/* Whether the plan has the program and, if it is decode, these sizes suit it. */
static int takes_sizes(const cu_state *s, cu_program program, const saccade_sizes *sizes)
{
    const cu_operation operation = cu_program_kinds[program].operation;
    return s->programs[program].form.tile.groups > 0
           && (operation == CU_OP_FORWARD || operation == CU_OP_SMALL
               || (operation == CU_OP_DECODE
                   && (program == CU_DECODE_WIDE ? run_wants_wide(s, sizes)
                                                 : run_takes_decode(s, program, sizes)))
               || (operation == CU_OP_PARTS && run_is_in_parts(s, sizes)));
}

/* All heads' blocks, or with keys their pieces of so many. */
static cu_amount amount_of(const mask_runs *r, int keys, const saccade_sizes *sizes)
{
    const int64_t stored = r->B * r->H, times = sizes->B * sizes->H / stored;
    cu_amount x = {stored * r->rows * times, 0, 0};
    for (int64_t row = 0; row < stored * r->rows; row++) {
        const int64_t n = keys ? cu_cut_row(r, row, keys, NULL) : r->row_live[row];
        x.blocks += n * times;
        x.longest = n > x.longest ? n : x.longest;
    }
    return x;
}

/* Pieces of small tiles are of the mask's first heads: a plan of later ones has none. */
static int has_other_heads(const saccade_plan *plan, const saccade_block_mask *mask)
{
    return plan->problem.h_offset && mask_get_view(mask)->sizes.H > 1;
}

/* A piece's first key and its flags are one int. */
static int has_far_keys(const saccade_sizes *sizes)
{
    return sizes->KV >= 1 << (30 - PIECE_FLAGS);
}

/* Whether small tiles pay where there is a block mask. */
static saccade_status small_pays(const saccade_plan *plan, const saccade_block_mask *mask,
                                 int device, const saccade_sizes *sizes, int *out,
                                 saccade_error *err)
{
    const cu_state *s = plan->state;
    const cu_tile *small = &s->programs[CU_SMALL].form.tile;
    const mask_view *view = mask_get_view(mask);
    const mask_runs *r;
    *out = 0;
    if (mask_is_imported(mask) || has_other_heads(plan, mask)
        || has_far_keys(&view->sizes) || s->tiles == 'l')
        return SACCADE_OK;
    *out = s->tiles != 0;
    if (*out)
        return SACCADE_OK;
    const blocks x = blocks_for(s, CU_MAIN, mask, sizes);
    TRY(mask_runs_for(mask, x.rows, x.keys, 0, &r, err));
    const cu_amount large = amount_of(r, 0, sizes);
    if (large.blocks > large.tiles * SMALL_BLOCKS)
        return SACCADE_OK;
    TRY(mask_runs_for(mask, ROW_BLOCK, PIECE_UNIT, 0, &r, err));
    const cu_amount pieces = amount_of(r, small->keys, sizes);
    const int dim = (int)larger(sizes->D, sizes->Dv);
    const int is_evaluated =
        s->facts.mask == CU_MASK_GENERAL && !cu_limits_find(device, mask, plan).of_row;
    *out = cu_small_pays(s->device.n_sm, dim, is_evaluated, small, pieces,
                         &s->programs[CU_MAIN].form.tile, large);
    return SACCADE_OK;
}

static saccade_status make_pieces(const saccade_plan *plan, const saccade_block_mask *mask,
                                  const cu_driver *driver, int device,
                                  const saccade_sizes *sizes, saccade_error *err)
{
    const cu_state *s = plan->state;
    int pays = 0;
    TRY(cu_limits_make(driver, device, mask, plan, err));
    if (takes_sizes(s, CU_SMALL, sizes))
        TRY(small_pays(plan, mask, device, sizes, &pays, err));
    if (!pays)
        return SACCADE_OK;
    TRY(cu_runs_make(driver, device, mask, ROW_BLOCK, PIECE_UNIT, 1, sizes, plan, err));
    return cu_pieces_make(driver, device, mask, s->programs[CU_SMALL].form.tile.keys, sizes,
                          plan, err);
}

/* Whether decode, by whichever spans it has for these sizes, is faster than tiles of a kind. */
static int decode_pays(const cu_state *s, const cu_tile *tile, int is_small,
                       const saccade_sizes *sizes)
{
    const int is_wide = takes_sizes(s, CU_DECODE_WIDE, sizes);
    return cu_decode_pays(s->device.n_sm, is_wide ? CU_WIDE_ROWS : CU_SPAN_ROWS, tile, is_small,
                          sizes);
}

/* Whether tiles of either kind are faster than decode for these sizes. Those of ragged runs are
 * bounds, and codes are made numbers in decode. */
static int may_leave_decode(const saccade_plan *plan, const saccade_sizes *sizes)
{
    const cu_state *s = plan->state;
    const cu_tile *small = &s->programs[CU_SMALL].form.tile;
    const cu_tile *large = &s->programs[CU_MAIN].form.tile;
    return !s->has_fixed_pieces && !s->is_ragged && !cu_codes(&plan->problem) && large->groups
           && !s->stays_decode && run_is_decode(s, sizes)
           && (!decode_pays(s, large, 0, sizes)
               || (small->groups && !decode_pays(s, small, 1, sizes)));
}

static saccade_status make_runs(const saccade_plan *plan, const saccade_block_mask *mask,
                                const cu_driver *driver, int device,
                                const saccade_sizes *sizes, saccade_error *err)
{
    const cu_state *s = plan->state;
    int n = 0, has_decode = 0;
    for (int i = 0; i < CU_PROGRAMS; i++) {
        const cu_program_kind *kind = &cu_program_kinds[i];
        if (!takes_sizes(s, (cu_program)i, sizes) || !is_suited(s, (cu_program)i, mask, sizes)
            || kind->operation == CU_OP_SMALL || kind->operation == CU_OP_PARTS
            || i == CU_DECODE_HALF)
            continue;
        if (has_decode && kind->wants_alignment && s->family == CU_SM90
            && !may_leave_decode(plan, sizes))
            continue; /* decode takes all aligned rows of these sizes */
        has_decode |= kind->operation == CU_OP_DECODE && i != CU_LATENT;
        const blocks x = blocks_for(s, (cu_program)i, mask, sizes);
        TRY(cu_runs_make(driver, device, mask, x.rows, x.keys, x.group, sizes, plan, err));
        n++;
    }
    return n ? SACCADE_OK : unsuited(s, mask, err);
}

saccade_status run_make_runs(const saccade_plan *plan, const saccade_block_mask *mask,
                             const cu_driver *driver, int device, const saccade_sizes *sizes,
                             saccade_error *err)
{
    TRY(make_runs(plan, mask, driver, device, sizes, err));
    return make_pieces(plan, mask, driver, device, sizes, err);
}

saccade_status run_find_runs(const saccade_plan *plan, const plan_run *run, cu_program program,
                             const cu_runs **out, saccade_error *err)
{
    const cu_state *s = plan->state;
    const int device = run->q->device.index;
    *out = NULL;
    if (!run->block_mask || cu_program_kinds[program].operation == CU_OP_PARTS)
        return SACCADE_OK;
    const blocks x = blocks_for(s, program, run->block_mask, &run->sizes);
    *out = cu_runs_find(device, run->block_mask, x.rows, x.keys, x.group, &run->sizes, plan);
    FAIL_IF(!*out, SACCADE_EINVAL,
            "cuda: got a block mask that has no copy on device %d for this batch, expected "
            "saccade_plan_prepare first",
            device);
    return SACCADE_OK;
}

/* Where keys are few: a mask's pieces are made where they pay. */
static int suits_small(const saccade_plan *plan, const plan_run *run)
{
    const cu_state *s = plan->state;
    const saccade_block_mask *mask = run->block_mask;
    if ((mask && has_other_heads(plan, mask)) || has_far_keys(&run->sizes))
        return 0;
    if (mask)
        return cu_pieces_find(run->q->device.index, mask, s->programs[CU_SMALL].form.tile.keys,
                              &run->sizes, plan)
               != NULL;
    if (s->tiles)
        return s->tiles != 'l';
    const cu_form *small = &s->programs[CU_SMALL].form, *large = &s->programs[CU_MAIN].form;
    /* whichever the whole sequence takes: results are the same bits */
    const saccade_sizes x = cu_whole_sizes(plan, &run->sizes);
    const int dim = (int)larger(x.D, x.Dv);
    const int64_t n_small = run_tiles(small, &x), n_large = run_tiles(large, &x);
    const int64_t of_small = (x.KV + small->tile.keys - 1) / small->tile.keys;
    const int64_t of_large = (x.KV + large->tile.keys - 1) / large->tile.keys;
    const cu_amount pieces = {n_small, n_small * of_small, of_small};
    const cu_amount blocks = {n_large, n_large * of_large, of_large};
    return cu_small_pays(s->device.n_sm, dim, s->facts.mask == CU_MASK_GENERAL, &small->tile,
                         pieces, &large->tile, blocks);
}

/* Whether a small tile walks so few keys in the mean that it is faster than larger ones for
 * which tensors come as tiles: docs/lab/117. */
static int walks_few(const saccade_plan *plan, const plan_run *run)
{
    enum { FEW_KEYS = 256 };
    const cu_state *s = plan->state;
    if (!run->block_mask)
        return run->sizes.KV <= FEW_KEYS;
    const cu_pieces *p =
        cu_pieces_find(run->q->device.index, run->block_mask,
                       s->programs[CU_SMALL].form.tile.keys, &run->sizes, plan);
    return p && p->keys <= FEW_KEYS;
}

/* Whether two teams to a CTA are to make small tiles. */
static int suits_pair(const saccade_plan *plan, const plan_run *run)
{
    const cu_state *s = plan->state;
    const saccade_sizes x = cu_whole_sizes(plan, &run->sizes);
    return !run->block_mask
           && (s->tiles == 'p'
               || cu_pair_pays(s->device.n_sm, run_tiles(&s->programs[CU_PAIR].form, &x),
                               x.KV));
}

/* Whether a head's keys are to stay while its queries pass. */
static int suits_few(const saccade_plan *plan, const plan_run *run)
{
    const cu_state *s = plan->state;
    const cu_tile *few = &s->programs[CU_FEW].form.tile;
    const cu_tile *small = &s->programs[CU_SMALL].form.tile;
    const saccade_sizes x = cu_whole_sizes(plan, &run->sizes);
    const int is_there = !run->block_mask && x.KV <= (int64_t)few->keys * few->stages;
    if (s->tiles)
        return is_there && s->tiles == 's';
    return is_there && small->keys && cu_few_pays(few, small, (int)larger(x.D, x.Dv), &x);
}

/* Whether spans are enough for two to every multiprocessor, of whatever lengths. */
static int suits_half(const cu_state *s, const plan_run *run)
{
    return !run->block_mask
           && cu_decode_half_pays(s->device.n_sm, cu_decode_spans(&run->sizes, CU_SPAN_ROWS));
}

/* Whether one tensor has, along the first n dimensions, the elements of the other. */
static int is_same(const saccade_tensor *a, const saccade_tensor *b, int n)
{
    int yes = a->data == b->data;
    for (int d = 0; d < n; d++)
        yes = yes && a->shape[d] == b->shape[d]
              && (a->stride[d] == b->stride[d] || a->shape[d] == 1);
    return yes;
}

/* Whether a key's codes have one scale for K and for V. */
static int has_one_scale(const plan_run *run)
{
    const saccade_tensor *k = run->k_scale, *v = run->v_scale;
    if (!k || !v)
        return k == v;
    return is_same(k, v, 3) && k->dtype == v->dtype
           && (k->stride[3] == v->stride[3] || v->shape[3] == 1);
}

/* Whether values are the first columns of their keys: codes, or what comes in tensor copies. */
static int suits_latent(const saccade_plan *plan, const plan_run *run)
{
    const cu_state *s = plan->state;
    cu_chunks chunks;
    if (!is_same(run->k, run->v, 3))
        return 0;
    if (cu_codes(&plan->problem))
        return has_one_scale(run);
    run_place_box(run, 1, &s->programs[CU_LATENT].form.tile, &chunks);
    return !chunks.is_small;
}

static int takes_run(const saccade_plan *plan, cu_program program, const plan_run *run)
{
    const cu_state *s = plan->state;
    const cu_program_kind *kind = &cu_program_kinds[program];
    return takes_sizes(s, program, &run->sizes)
           && (!kind->wants_alignment || s->programs[program].form.family != CU_SM90
               || run_is_aligned(run))
           && (kind->runs == CU_ANY_RUN || (kind->runs == CU_WITH_MAXIMA) == !!run->row_max)
           && (program != CU_DENSE
               || (run_takes_dense(plan, run, CU_DENSE)
                   && !(takes_sizes(s, CU_SMALL, &run->sizes) && suits_small(plan, run)
                        && walks_few(plan, run))))
           && (program != CU_ONE_PIECE || run_collects(plan, run))
           && (program == CU_FEW ? suits_few(plan, run)
                                 : kind->operation != CU_OP_SMALL || suits_small(plan, run))
           && (program != CU_DECODE_HALF || suits_half(s, run))
           && (program != CU_LATENT || suits_latent(plan, run))
           && (program != CU_PAIR || suits_pair(plan, run))
           && (kind->operation != CU_OP_PARTS || !run->between);
}

/* The first program of the table that takes the run, or 0. In the place of decode only what
 * copies tensors is asked. */
static int find_program(const saccade_plan *plan, const plan_run *run, int passes_decode,
                        cu_program *out)
{
    for (int i = 0; i < CU_PROGRAMS; i++) {
        const cu_program_kind *kind = &cu_program_kinds[i];
        const int is_passed =
            passes_decode && (kind->operation == CU_OP_DECODE || !kind->wants_alignment);
        if (!is_passed && takes_run(plan, (cu_program)i, run)
            && is_suited(plan->state, (cu_program)i, run->block_mask, &run->sizes)) {
            *out = (cu_program)i;
            return 1;
        }
    }
    return 0;
}

/* Whether the tiles that the run would have are faster; those with row maxima are not timed. An
 * imported mask's blocks may suit decode alone. */
static int leaves_decode(const saccade_plan *plan, const plan_run *run)
{
    const cu_state *s = plan->state;
    const int is_small = takes_sizes(s, CU_SMALL, &run->sizes) && suits_small(plan, run);
    const cu_tile *tile = &s->programs[is_small ? CU_SMALL : CU_MAIN].form.tile;
    return !run->row_max && may_leave_decode(plan, &run->sizes)
           && !decode_pays(s, tile, is_small, &run->sizes);
}

saccade_status run_choose_program(const saccade_plan *plan, const plan_run *run,
                                  cu_program *out, saccade_error *err)
{
    if ((leaves_decode(plan, run) && find_program(plan, run, 1, out))
        || find_program(plan, run, 0, out))
        return SACCADE_OK;
    const cu_state *s = plan->state;
    FAIL_IF(
        s->has_large_heads, SACCADE_EBACKEND,
        "cuda: got a run with head dims above 256 whose rows do not lie on 16 bytes, with an "
        "imported mask that its blocks do not suit or of too many rows, expected another");
    return unsuited(plan->state, run->block_mask, err);
}
