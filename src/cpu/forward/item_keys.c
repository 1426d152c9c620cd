/* Packed K and V as items read them. Either they are packed ahead, once for all items of a
 * head; or, where each block of keys is read by few items (narrow windows), by the thread that
 * needs them, into memory that stays in its cache. Items next to each other then run on one
 * thread, one after the other, and find most of their blocks there. */
#include "cpu/forward/item.h"

#include <assert.h>
#include <string.h>

static cpu_packed block_of(const cpu_geometry *g, cpu_packed first, int64_t block)
{
    return (cpu_packed){first.k + (size_t)block * g->k_bytes,
                        first.v + (size_t)block * g->v_bytes, first.nonfinite + block};
}

static cpu_packed ahead(const cpu_job *job, int64_t head)
{
    const cpu_geometry *g = &job->g;
    char *k = job->packed + (size_t)(head * g->key_blocks) * (g->k_bytes + g->v_bytes);
    return (cpu_packed){k, k + (size_t)g->key_blocks * g->k_bytes,
                        job->nonfinite + head * g->key_blocks};
}

/* room: memory to gather a block of K and a block of V in, where they lie in chunks. */
static void pack(const cpu_job *job, int64_t b, int64_t g, int64_t block, void *const room[2],
                 cpu_packed to)
{
    const cpu_kernels *kernels = cpu_state_of(job->plan)->needs.kernels;
    const plan_run *run = job->run;
    const int64_t j0 = block * CPU_BLOCK_KEYS;
    const int64_t left = plan_position_of(&run->positions, run->sizes.KV, b).kv_len - j0;
    if (left <= 0)
        return;
    const int32_t n = (int32_t)(left < CPU_BLOCK_KEYS ? left : CPU_BLOCK_KEYS);
    const kv_view all_k = cpu_keys_of(job, 0, b, g), all_v = cpu_keys_of(job, 1, b, g);
    const cpu_rows k = kv_block(&all_k, j0, n, room[0]), v = kv_block(&all_v, j0, n, room[1]);
    kernels->pack_keys(&k, n, CPU_BLOCK_KEYS, to.k);
    *to.nonfinite = (char)kernels->pack_values(&v, n, CPU_BLOCK_KEYS, to.v);
}

void cpu_pack_block(const cpu_job *job, int64_t index, int thread)
{
    const int64_t head = index / job->g.key_blocks, block = index % job->g.key_blocks;
    const int64_t all = job->head0 + head, heads = job->run->sizes.Hkv;
    pack(job, all / heads, all % heads, block, item_worker_of(job, thread)->room,
         block_of(&job->g, ahead(job, head), block));
}

/* Forgets the blocks before `first`; the others move to the beginning. */
static void drop_before(const cpu_geometry *g, item_keys *own, int64_t first)
{
    const cpu_packed from = block_of(g, own->at, first - own->first);
    const size_t n = (size_t)(own->past - first);
    memmove(own->at.k, from.k, n * g->k_bytes);
    memmove(own->at.v, from.v, n * g->v_bytes);
    memmove(own->at.nonfinite, from.nonfinite, n);
    own->first = first;
}

cpu_packed item_packed(cpu_worker *w, int64_t first, int64_t past)
{
    const cpu_geometry *g = &w->job->g;
    const int64_t head = w->item.b * w->job->run->sizes.Hkv + w->item.g;
    item_keys *own = &w->own;
    if (!w->job->is_local)
        return block_of(g, ahead(w->job, w->item.head), first);
    assert(past - first <= g->own_blocks);
    if (own->head != head || first < own->first || first > own->past) {
        own->head = head;
        own->first = own->past = first;
    }
    const int64_t room =
        3 * (past - first) < g->own_blocks ? 3 * (past - first) : g->own_blocks;
    if (past > own->past && past - own->first > room)
        drop_before(g, own, first);
    for (; own->past < past; own->past++)
        pack(w->job, w->item.b, w->item.g, own->past, w->room,
             block_of(g, own->at, own->past - own->first));
    return block_of(g, own->at, first - own->first);
}
