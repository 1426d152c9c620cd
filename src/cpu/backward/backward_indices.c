/* Which elements of captures positions read whose gradients are added position by position:
 * their indices by rows of keys, made by the strip interpreter from a program of them alone. */
#include "cpu/backward/backward.h"

#include "cpu/schedule/layout.h"

#include <string.h>

static int has_sums(const backward_read *read)
{
    for (int d = 0; d < read->rank; d++)
        if (read->sum[d] == PASS_NO_NODE)
            return 0;
    return 1;
}

saccade_status backward_compile_indices(const mod_fn *score, backward_read *reads, uint32_t n,
                                        arena *arena, saccade_error *err)
{
    for (uint32_t k = 0; k < n; k++) {
        backward_read *read = &reads[k];
        const mod_node *load = &score->nodes[read->node];
        if (read->axis != BACKWARD_PLACE)
            continue;
        TRY(eval_compile_results(score, score->args + load->args, load->n_args, arena,
                                 &read->indices, err));
        if (has_sums(read))
            TRY(eval_compile_results(score, read->sum, load->n_args, arena, &read->sums, err));
    }
    return SACCADE_OK;
}

static size_t state_bytes(const eval_prog *prog)
{
    return prog ? eval_state_bytes(prog) : 0;
}

size_t backward_indices_bytes(const cpu_backward_plan *backward)
{
    size_t bytes = 0;
    for (uint32_t n = 0; n < backward->n_reads; n++) {
        const backward_read *read = &backward->reads[n];
        bytes += state_bytes(read->indices) + state_bytes(read->sums);
        bytes += read->sums ? bytes64(1, sizeof(backward_by_key)) : 0;
    }
    return bytes ? bytes + bytes64(backward->n_reads, sizeof(backward_index)) : 0;
}

void backward_begin_indices(backward_worker *w, char *memory)
{
    const cpu_backward_plan *backward = w->job->backward;
    if (!backward_indices_bytes(backward))
        return;
    w->indices = (backward_index *)(void *)memory;
    memory += bytes64(backward->n_reads, sizeof *w->indices);
    for (uint32_t n = 0; n < backward->n_reads; n++) {
        const backward_read *read = &backward->reads[n];
        backward_index *index = &w->indices[n];
        *index = (backward_index){.head = -1};
        if (!read->indices)
            continue;
        index->all = eval_begin(read->indices, &w->job->run->score_env, memory);
        memory += eval_state_bytes(read->indices);
        if (!read->sums)
            continue;
        index->sums = eval_begin(read->sums, &w->job->run->score_env, memory);
        memory += eval_state_bytes(read->sums);
        index->by_key = (backward_by_key *)(void *)memory;
        memory += bytes64(1, sizeof(backward_by_key));
    }
}

/* Integers of each dimension at keys [from, from + count) of the tile and the state's row. */
static void find_integers(const backward_worker *w, eval_state *state, int rank, int32_t from,
                          int32_t count, int32_t (*to)[BACKWARD_KEYS])
{
    int32_t *index[SACCADE_MAX_RANK];
    for (int d = 0; d < rank; d++)
        index[d] = to[d];
    eval_integers(state, (int32_t)w->j0 + from + w->at.kv_offset, count, index);
}

/* Differences along keys, of any row: that of the state, which cancels. */
static void find_by_key(const backward_worker *w, uint32_t n, const int64_t *stride)
{
    const int rank = w->job->backward->reads[n].rank;
    backward_by_key *by_key = w->indices[n].by_key;
    int32_t index[SACCADE_MAX_RANK][BACKWARD_KEYS];
    if (by_key->j0 == w->j0)
        return;
    *by_key = (backward_by_key){.j0 = w->j0};
    find_integers(w, w->indices[n].sums, rank, 0, w->n, index);
    for (int d = 0; d < rank; d++)
        for (int32_t j = 0; j < w->n; j++) {
            const int32_t x = (int32_t)((uint32_t)index[d][j] - (uint32_t)index[d][0]);
            by_key->least[d] = smaller(by_key->least[d], x);
            by_key->most[d] = larger(by_key->most[d], x);
            by_key->element[j] += x * stride[d];
        }
}

/* Whether the row's sums all lie inside the tensor, so that none wraps or is clamped: each is
 * that of the tile's first key and what it gains from there. *first: that key's element. */
static int find_first(const backward_worker *w, uint32_t n, const int64_t *shape,
                      const int64_t *stride, int64_t *first)
{
    const int rank = w->job->backward->reads[n].rank;
    const backward_by_key *by_key = w->indices[n].by_key;
    int32_t index[SACCADE_MAX_RANK][BACKWARD_KEYS];
    find_integers(w, w->indices[n].sums, rank, 0, 1, index);
    *first = 0;
    for (int d = 0; d < rank; d++) {
        if (index[d][0] + by_key->least[d] < 0 || index[d][0] + by_key->most[d] >= shape[d])
            return 0;
        *first += index[d][0] * stride[d];
    }
    return 1;
}

/* What an index adds to the place of its element, clamped as kernels read it. */
static inline int64_t place_of(int32_t index, int64_t last, int64_t stride)
{
    const int64_t x = index < 0 ? 0 : index;
    return (x > last ? last : x) * stride;
}

/* Of the dimensions that vary with the key; returns what the others add to all of them. */
static int64_t add_indices(const backward_worker *w, uint32_t n, int32_t count,
                           const int64_t *stride, int32_t (*index)[BACKWARD_KEYS],
                           int64_t *element)
{
    const backward_read *read = &w->job->backward->reads[n];
    const mod_fn *score = w->job->plan->problem.score;
    const int64_t *shape = w->job->run->score_env.tensors[read->capture].shape;
    int64_t first = 0;
    int is_first = 1;
    for (int d = 0; d < read->rank; d++) {
        const uint32_t node = score->args[score->nodes[read->node].args + (uint32_t)d];
        const int64_t last = shape[d] - 1, step = stride[d];
        if (!(score->nodes[node].deps & (DEP_KV | DEP_SCORE))) {
            first += place_of(index[d][0], last, step);
            continue;
        }
        for (int32_t j = 0; j < count; j++)
            element[j] = (is_first ? 0 : element[j]) + place_of(index[d][j], last, step);
        is_first = 0;
    }
    if (is_first)
        memset(element, 0, (size_t)count * sizeof *element);
    return first;
}

static void begin_head(backward_worker *w, uint32_t n)
{
    const int64_t head = w->b * w->job->run->sizes.H + w->h;
    if (w->indices[n].head == head)
        return;
    w->indices[n].head = head;
    eval_head(w->indices[n].all, (int32_t)w->b, (int32_t)w->h);
    if (w->indices[n].sums) {
        eval_head(w->indices[n].sums, (int32_t)w->b, (int32_t)w->h);
        w->indices[n].by_key->j0 = -1;
    }
}

int64_t backward_find_elements(backward_worker *w, uint32_t n, int32_t r, int32_t from,
                               int32_t past, const int64_t *stride, const int64_t **element)
{
    const backward_read *read = &w->job->backward->reads[n];
    const int64_t *shape = w->job->run->score_env.tensors[read->capture].shape;
    const int32_t q = (int32_t)(w->i0 + r) + w->at.q_offset;
    int32_t index[SACCADE_MAX_RANK][BACKWARD_KEYS];
    int64_t first;
    begin_head(w, n);
    if (read->sums) {
        eval_row(w->indices[n].sums, q);
        find_by_key(w, n, stride);
        *element = w->indices[n].by_key->element;
        if (find_first(w, n, shape, stride, &first))
            return first;
    }
    eval_row(w->indices[n].all, q);
    find_integers(w, w->indices[n].all, read->rank, from, past - from, index);
    *element = w->element;
    return add_indices(w, n, past - from, stride, index, w->element + from);
}
