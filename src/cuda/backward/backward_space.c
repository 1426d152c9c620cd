/* Workspace of a backward run: where lie what bwd_prepare leaves of the rows, sums of dQ, parts
 * of dK and dV, bf16 numbers of f32. */
#include "cuda/backward/cuda_backward.h"

#include "base/integers.h"
#include "cuda/emit/emit.h"

/* Ragged queries of all sequences, or 0 where they are not known. */
static int64_t packed_rows(const saccade_plan *plan, const plan_gradients *g)
{
    const int is_packed = plan->problem.is_ragged && g && g->d_out;
    return is_packed && g->d_out->shape[0] == 1 ? g->d_out->shape[2] : 0;
}

int64_t cu_backward_packed_blocks(const saccade_plan *plan, const saccade_sizes *s,
                                  const plan_gradients *gradients)
{
    const int64_t rows = packed_rows(plan, gradients);
    const int64_t packed = rows / BWD_ROWS + s->B;
    return rows && packed < s->B * cu_backward_query_blocks(s) ? packed : 0;
}

/* Bytes from a tensor's first element to its last; all of them are its own, or 0. */
static size_t dense_bytes(const saccade_tensor *t)
{
    int64_t count = 1, extent = 1;
    for (int i = 0; i < t->rank; i++) {
        if (t->shape[i] > 1 && t->stride[i] <= 0)
            return 0;
        count *= t->shape[i];
        extent += (t->shape[i] - 1) * t->stride[i];
    }
    return count == extent ? (size_t)count * saccade_dtype_bytes(t->dtype) : 0;
}

/* Whether lse and delta of the rows, two numbers each, lie in dQ until it is written by the
 * run's last kernel, which reads neither. */
static int rows_fit_result(const saccade_plan *plan, size_t each, const plan_gradients *g)
{
    const plan_problem *p = &plan->problem;
    return cu_backward_has_tiles(plan->state) && g && g->dq && !p->is_ragged && !plan->rows
           && !cu_has_captures(p) && !(g->added & SACCADE_GRADIENT_Q)
           && dense_bytes(g->dq) >= 2 * each;
}

/* Columns of a row in whole panels. */
static int64_t panel_columns(int64_t dim)
{
    return (cu_padded(dim) + 63) / 64 * 64;
}

void cu_backward_thirds_shape(const saccade_plan *plan, const saccade_sizes *s, int which,
                              int64_t (*shape)[4])
{
    const int is_query = which == 0 || which == 3;
    const int64_t dim = which < 2 ? plan->problem.sizes.D : plan->problem.sizes.Dv;
    (*shape)[0] = s->B;
    (*shape)[1] = is_query ? s->H : s->Hkv;
    (*shape)[2] = is_query ? s->Q : s->KV;
    (*shape)[3] = 3 * panel_columns(dim);
}

static void add_thirds(const saccade_plan *plan, const saccade_sizes *s, cu_backward_space *x)
{
    for (int i = 0; i < 4; i++) {
        int64_t n[4];
        cu_backward_thirds_shape(plan, s, i, &n);
        x->thirds[i] = cu_aligned(x->bytes);
        x->bytes = x->thirds[i] + (size_t)(n[0] * n[1] * n[2] * n[3]) * sizeof(uint16_t);
    }
}

/* Keys of the largest tile that a run may take. */
static int tile_keys_most(const cu_state *s)
{
    int keys = 1;
    for (int i = CU_BWD_TILES; i <= CU_BWD_PLAIN; i++)
        keys = (int)larger(keys, s->programs[i].form.tile.keys);
    return keys;
}

int cu_backward_parts_most(const saccade_plan *plan, const saccade_sizes *s)
{
    const cu_state *state = plan->state;
    const int n_sm = state->device.n_sm, group = cu_backward_cut_heads(&plan->problem);
    const int64_t tiles = s->B * s->Hkv * ceil_div(s->KV, tile_keys_most(state));
    const int heads = cu_head_parts_most(n_sm, group, tiles);
    const int rows =
        cu_backward_cuts_rows(&plan->problem)
            ? cu_row_parts_most(n_sm, tiles * group, cu_backward_query_blocks(s))
            : 1;
    return (int)larger(heads, rows > 1 ? rows * group : 1);
}

/* Keys of all parts of a run with any mask; gradients NULL: or of a smaller one, whose fewer
 * tiles may have more parts. */
static int64_t part_rows(const saccade_plan *plan, const saccade_sizes *s,
                         const plan_gradients *gradients)
{
    const cu_state *state = plan->state;
    const int parts = cu_backward_parts_most(plan, s);
    if (gradients)
        return parts > 1 ? s->B * s->Hkv * parts * s->KV : 0;
    return cu_part_rows_most(state->device.n_sm, cu_backward_cut_heads(&plan->problem),
                             cu_backward_cuts_rows(&plan->problem), s->B * s->Hkv, s->KV,
                             cu_backward_query_blocks(s), tile_keys_most(state));
}

/* dK and dV of parts of a KV head's queries. */
static void add_parts(const saccade_plan *plan, const saccade_sizes *s,
                      const plan_gradients *gradients, cu_backward_space *x)
{
    const int64_t dims[2] = {plan->problem.sizes.D, plan->problem.sizes.Dv};
    const int64_t rows = part_rows(plan, s, gradients);
    for (int i = 0; i < 2; i++) {
        x->parts[i] = cu_aligned(x->bytes);
        if (rows)
            x->bytes = x->parts[i] + (size_t)(rows * dims[i]) * sizeof(float);
    }
}

/* gradients: those of a run, or NULL: enough for any. Kernels that own rows of dQ make no sums
 * and read lse and delta while it is written: their place is then that of the sums. */
cu_backward_space cu_backward_space_of(const saccade_plan *plan, const saccade_sizes *s,
                      const plan_gradients *gradients)
{
    const int64_t packed = cu_backward_packed_blocks(plan, s, gradients);
    const int64_t blocks = packed ? packed : s->B * cu_backward_query_blocks(s);
    const size_t rows = (size_t)(s->H * blocks) * BWD_ROWS;
    const size_t columns = (size_t)cu_padded(plan->problem.sizes.D);
    const size_t bounds = (size_t)(s->B * s->Hkv) * BWD_CHUNKS * 2 * sizeof(unsigned);
    const size_t each = cu_aligned(rows * sizeof(float));
    cu_backward_space x = {.is_in_result = rows_fit_result(plan, each, gradients)};
    x.minus_delta = each;
    x.precision = x.is_in_result ? 0 : 2 * each;
    x.bounds = x.precision + each;
    x.tiles_taken = x.bounds + cu_aligned(bounds);
    x.dq_sum = x.tiles_taken + cu_aligned(sizeof(unsigned));
    x.bytes = x.dq_sum;
    if (cu_backward_has_tiles(plan->state) && plan->problem.gradients & SACCADE_GRADIENT_Q) {
        x.dq_steps = x.dq_sum + rows * columns * sizeof(float);
        x.bytes = x.dq_steps + rows / BWD_ROWS * sizeof(unsigned);
    }
    if (cu_backward_has_f32(plan->state))
        add_thirds(plan, s, &x);
    add_parts(plan, s, gradients, &x);
    return x;
}

/* But for what keys in chunks take. */
size_t cu_backward_whole_workspace(const saccade_plan *plan, const saccade_sizes *sizes,
                              const plan_gradients *gradients)
{
    return cu_aligned(cu_backward_space_of(plan, sizes, gradients).bytes)
           + cu_aligned(cu_captures_workspace(plan, sizes, gradients));
}

size_t cu_backward_workspace(const saccade_plan *plan, const saccade_sizes *sizes,
                             const plan_gradients *gradients)
{
    const saccade_sizes local = cu_local_sizes(plan, sizes);
    return cu_backward_whole_workspace(plan, &local, gradients)
           + cu_pages_workspace(plan, &local);
}
