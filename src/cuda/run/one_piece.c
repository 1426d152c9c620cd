/* Keys in small pages brought into one piece of the workspace before forward's tiles read them.
 * A tile reads every key of its rows; a copy of less than 32 keys costs tiles as much as one of
 * many (docs/lab/032), so a head whose keys several tiles read is copied once. Runs whose keys
 * take more than CU_COLLECT_BYTES keep to copies from the pages themselves. */
#include "cuda/run/run.h"

enum {
    COLLECT_BOX = 32,    /* copy first where a tensor copy takes at most so many keys */
    COLLECT_TILES = 4,   /* tiles that must read a head's keys, copies of up to 16 keys */
    COLLECT_MORE = 32,   /* likewise, copies of 17 to 32 */
    COLLECT_KEYS = 1024, /* shortest KV worth a launch */
    COLLECT_FAR = 64,    /* KV at most so many times Q */
    COLLECT_NEAR = 8     /* likewise where a mask may hide the first keys */
};

int cu_collects(const plan_problem *p, const cu_tile *tile)
{
    const int has_small = p->page < 0 || cu_keys_in_both(p->page, tile->keys) <= COLLECT_BOX;
    return p->page && has_small && !p->is_ragged && !cu_codes(p) && !p->has_rows
           && !p->is_invariant;
}

/* Whether rows may see their last keys alone; those of a causal mask begin with the first. */
static int hides_left(const plan_problem *p)
{
    const pass_limits *limits = plan_limits(p);
    return p->mask && !(limits && limits->fn->nodes[limits->node[0]].op == OP_INT);
}

/* Bytes of K, or of V with the other dim. */
static size_t bytes_of(const plan_problem *p, const saccade_sizes *s, int64_t dim)
{
    return cu_aligned((size_t)(s->B * s->Hkv * s->KV) * (size_t)dim
                   * saccade_dtype_bytes(p->kv_dtype));
}

static size_t keys_bytes(const plan_problem *p, const saccade_sizes *s)
{
    return bytes_of(p, s, p->sizes.D) + bytes_of(p, s, p->sizes.Dv)
           + cu_aligned((size_t)s->B * sizeof(int));
}

/* Tiles that read a head's keys. */
static int64_t readers(const cu_form *form, const saccade_sizes *s)
{
    const int64_t rows = run_rows(form);
    return (s->Q + rows - 1) / rows * cu_group(s);
}

int run_collects(const saccade_plan *plan, const plan_run *run)
{
    const cu_state *s = plan->state;
    const plan_problem *p = &plan->problem;
    const saccade_sizes *sizes = &run->sizes;
    const cu_form *form = &s->programs[CU_ONE_PIECE].form;
    const int box = run->chunks ? cu_keys_in_both(run->chunks->size, form->tile.keys) : 0;
    const int64_t most = hides_left(p) || run->block_mask ? COLLECT_NEAR : COLLECT_FAR;
    return run->chunks && !run->between && box <= COLLECT_BOX && sizes->KV >= COLLECT_KEYS
           && sizes->KV <= most * sizes->Q
           && readers(form, sizes) >= (box <= 16 ? COLLECT_TILES : COLLECT_MORE)
           && keys_bytes(p, sizes) <= CU_COLLECT_BYTES;
}

size_t run_keys_space(const saccade_plan *plan, const saccade_sizes *sizes)
{
    const cu_state *s = plan->state;
    const cu_form *form = &s->programs[CU_ONE_PIECE].form;
    if (!form->tile.groups || readers(form, sizes) < COLLECT_TILES || sizes->KV < COLLECT_KEYS)
        return 0;
    const size_t bytes = keys_bytes(&plan->problem, sizes);
    return bytes < CU_COLLECT_BYTES ? bytes : CU_COLLECT_BYTES;
}

saccade_tensor run_in_one_piece(const plan_run *run, void *data, saccade_dtype dtype,
                                int64_t dim)
{
    const saccade_sizes *s = &run->sizes;
    const int64_t shape[4] = {s->B, s->Hkv, s->KV, dim};
    saccade_tensor t = saccade_tensor_of(data, dtype, 4, shape);
    t.device = run->k->device;
    return t;
}

saccade_status run_collect_keys(const saccade_plan *plan, const plan_run *run, run_args *a,
                                saccade_error *err)
{
    const cu_state *s = plan->state;
    const plan_problem *p = &plan->problem;
    const saccade_sizes *sizes = &run->sizes;
    const int tile_keys = s->programs[CU_ONE_PIECE].form.tile.keys;
    const int64_t blocks = (sizes->KV + PAGES_ROWS - 1) / PAGES_ROWS;
    char *const room = (char *)run->workspace + run_programs_space(plan, sizes);
    char *const values = room + bytes_of(p, sizes, p->sizes.D);
    int *const lens = (int *)(void *)(values + bytes_of(p, sizes, p->sizes.Dv));
    const saccade_tensor k = run_in_one_piece(run, room, run->k->dtype, p->sizes.D);
    const saccade_tensor v = run_in_one_piece(run, values, run->v->dtype, p->sizes.Dv);
    cu_collected to = {.k = room, .v = values, .lens = run->positions.pages ? lens : NULL};
    void *parameters[] = {&a->p, &to};
    TRY(run_start(a, s->programs[CU_COLLECT].kernel, sizes->B * sizes->Hkv * blocks,
                  PAGES_COPIERS, 0, parameters, err));
    a->p.k = k.data;
    a->p.v = v.data;
    a->p.ks = run_strides(&k);
    a->p.vs = run_strides(&v);
    if (to.lens)
        a->p.kv_len = (cu_position){.by_batch = lens, .step = 1};
    TRY(run_encode_map(a->driver, &k, tile_keys, PROMOTE_128, &a->maps[1], err));
    return run_encode_map(a->driver, &v, tile_keys, PROMOTE_128, &a->maps[2], err);
}
