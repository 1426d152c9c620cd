/* Few rows with the bits that they have among many, put on a stream: items of packed rows and
 * parts of the keys, then a kernel that joins the parts (kern/items.cuh, join_parts.cuh). */
#include "cuda/run/run.h"

/* Items have the tiles of a KV head's rows next to each other: these read the same keys. */
static void fill_items(const cu_state *s, const plan_run *run, int E, cu_fwd *p)
{
    const saccade_sizes *sizes = &run->sizes;
    cu_decode *f = &p->decode;
    f->group = cu_group(sizes);
    f->rows = f->group * (int)sizes->Q;
    f->tiles = (f->rows + CU_PART_ROWS - 1) / CU_PART_ROWS;
    f->spans = (int)(sizes->B * sizes->Hkv) * f->tiles;
    p->n_split = (int)run_parts(s, sizes);
    p->n_tiles = f->spans * p->n_split;
    p->part_o = (float *)((char *)run->workspace + RUN_COUNTER_BYTES);
    p->part_ml = p->part_o + sizes->B * sizes->H * sizes->Q * p->n_split * E;
    p->redo = NULL;
}

/* As many share items evenly. */
static int item_ctas(const cu_state *s, int items)
{
    const int most = cu_reading_ctas(s->device.n_sm);
    return items < most ? items : most;
}

saccade_status run_launch_parts(const saccade_plan *plan, const plan_run *run, run_args *a,
                                saccade_error *err)
{
    cu_state *s = plan->state;
    const cu_loaded *program = &s->programs[CU_PARTS];
    const cu_form *form = &program->form;
    const int E = cu_padded(plan->problem.sizes.Dv);
    void *parameters[] = {&a->p, a->captures, &a->maps[0], &a->maps[1], &a->maps[2]};
    fill_items(s, run, E, &a->p);
    const int box = run_place_box(run, 0, &form->tile, &a->p.chunks);
    TRY(run_encode_map(a->driver, run->k, box, PROMOTE_NONE, &a->maps[1], err));
    TRY(run_encode_map(a->driver, run->v, box, PROMOTE_NONE, &a->maps[2], err));
    a->maps[0] = a->maps[1]; /* Q comes by loads */
    /* Items are dealt out in turn where they are alike, else drawn, from a counter set to 0. */
    const int grid = item_ctas(s, a->p.n_tiles);
    const int is_drawn = a->p.kv_len.by_batch && a->p.n_tiles > grid;
    if (is_drawn)
        TRY(run_start(a, s->programs[CU_CAREFUL].other, 1, 1, 0, parameters, err));
    else
        a->p.counter = NULL;
    const int threads = cu_tile_threads(form->family, &form->tile, E);
    const int shared = cu_shared_bytes(form, &s->facts, &plan->problem);
    TRY((is_drawn ? run_start_next : run_start)(a, program->kernel, grid, threads, shared,
                                                parameters, err));
    const int64_t rows = run->sizes.B * run->sizes.H * run->sizes.Q;
    return run_start_next(a, program->other, (rows + 3) / 4, 128, 0, parameters, err);
}
