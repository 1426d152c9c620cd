/* Dropout of an item's weights, between softmax and values: sums have all weights, O those that
 * are kept. Where a weight lies follows from what the kernels' softmax leaves. */
#include "cpu/forward/item.h"

static void drop_bf16(uint16_t *p, const uint16_t *keep, int32_t n)
{
    int32_t j = 0;
    for (; j + CPU_DROP_BLOCK <= n; j += CPU_DROP_BLOCK)
        for (int32_t i = 0; i < CPU_DROP_BLOCK; i++)
            p[j + i] &= keep[j + i];
    for (; j < n; j++)
        p[j] &= keep[j];
}

/* 32 high parts, 32 low ones */
static void drop_split(uint16_t *p, const uint16_t *keep, int32_t n)
{
    for (int32_t j = 0; j < n; j++) {
        p[j / 32 * 64 + j % 32] &= keep[j];
        p[j / 32 * 64 + 32 + j % 32] &= keep[j];
    }
}

void item_drop(cpu_worker *w, const item_tile *t, int32_t r0, int32_t n_rows)
{
    const cpu_job *job = w->job;
    uint16_t room[CPU_DROP_ROOM(CPU_BLOCK_KEYS)];
    cpu_drop drop = {0};
    int64_t head = -1;
    if (!job->run->dropout.is_on)
        return;
    for (int32_t i = 0; i < n_rows; i++) {
        float *row = w->s + (int64_t)i * CPU_BLOCK_KEYS;
        if (head != item_head_of(w, r0 + i)) {
            head = item_head_of(w, r0 + i);
            drop = cpu_drop_of(job->plan, job->run, w->item.b, head);
        }
        const int32_t q = (int32_t)item_index_of(w, r0 + i) + w->at.q_offset;
        const uint16_t *keep =
            cpu_drop_row(&drop, q, (int32_t)t->j0 + w->at.kv_offset, t->n, room);
        if (w->kernels->is_split)
            drop_split((uint16_t *)(void *)row, keep, t->n);
        else if (w->kernels->element == 4)
            cpu_drop_f32(row, keep, t->n);
        else
            drop_bf16((uint16_t *)(void *)row, keep, t->n);
    }
}
