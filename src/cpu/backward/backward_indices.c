/* Which elements of captures positions read whose gradients are added position by position:
 * their indices by rows of keys, made by the strip interpreter from a program of them alone. */
#include "cpu/backward/backward.h"

#include "cpu/schedule/layout.h"

saccade_status backward_compile_indices(const mod_fn *score, backward_read *reads, uint32_t n,
                                        arena *arena, saccade_error *err)
{
    for (uint32_t k = 0; k < n; k++) {
        const mod_node *load = &score->nodes[reads[k].node];
        if (reads[k].axis == BACKWARD_PLACE)
            TRY(eval_compile_results(score, score->args + load->args, load->n_args, arena,
                                     &reads[k].indices, err));
    }
    return SACCADE_OK;
}

size_t backward_indices_bytes(const cpu_backward_plan *backward)
{
    size_t bytes = 0;
    for (uint32_t n = 0; n < backward->n_reads; n++)
        if (backward->reads[n].indices)
            bytes += eval_state_bytes(backward->reads[n].indices);
    return bytes;
}

void backward_begin_indices(backward_worker *w, char *memory)
{
    const cpu_backward_plan *backward = w->job->backward;
    for (uint32_t n = 0; n < backward->n_reads; n++) {
        const eval_prog *indices = backward->reads[n].indices;
        if (!indices)
            continue;
        w->indices[n] = eval_begin(indices, &w->job->run->score_env, memory);
        w->index_head[n] = -1;
        memory += eval_state_bytes(indices);
    }
}

/* Clamped as kernels read it. */
static void add_index(const int32_t *index, int64_t last, int64_t stride, int64_t *element,
                      int32_t n)
{
    for (int32_t j = 0; j < n; j++) {
        const int64_t x = index[j] < 0 ? 0 : index[j];
        element[j] += (x > last ? last : x) * stride;
    }
}

void backward_find_elements(backward_worker *w, uint32_t n, int32_t r, int32_t from,
                            int32_t past, const int64_t *stride)
{
    const plan_run *run = w->job->run;
    const mod_node *load = &w->job->plan->problem.score->nodes[w->job->backward->reads[n].node];
    const saccade_tensor *t = &run->score_env.tensors[load->imm.i];
    const int64_t head = w->b * run->sizes.H + w->h;
    int32_t room[SACCADE_MAX_RANK][BACKWARD_KEYS], *index[SACCADE_MAX_RANK];
    for (uint32_t d = 0; d < load->n_args; d++)
        index[d] = room[d];
    if (w->index_head[n] != head)
        eval_head(w->indices[n], (int32_t)w->b, (int32_t)w->h);
    w->index_head[n] = head;
    eval_row(w->indices[n], (int32_t)(w->i0 + r) + w->at.q_offset);
    eval_integers(w->indices[n], (int32_t)w->j0 + from + w->at.kv_offset, past - from, index);
    for (int32_t j = from; j < past; j++)
        w->element[j] = 0;
    for (uint32_t d = 0; d < load->n_args; d++)
        add_index(index[d], t->shape[d] - 1, stride[d], w->element + from, past - from);
}
