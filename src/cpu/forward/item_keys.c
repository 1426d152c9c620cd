/* Packed K and V as items read them. Either they are packed once for all items of a head, each
 * block by the thread that first needs it: another that needs it too packs blocks after it
 * meanwhile. Or, where each block of keys is read by few items (narrow windows), and where
 * heads are many and short, by each thread into memory that stays in its cache. Items next to
 * each other then run on one thread, one after the other, and find most blocks there. */
#include "cpu/forward/item.h"

#include "base/relax.h"

#include <assert.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

/* OPEN -> TAKEN -> PACKED, by one thread; a block may be read once it is PACKED. */
typedef enum cpu_block_state { OPEN, TAKEN, PACKED } cpu_block_state;

/* Steps of flows take FLOW_KEYS at a time, narrow ones up to a whole block; kernels take keys
 * by sixteens and panels. */
int32_t item_padded(const cpu_job *job, int64_t n)
{
    enum { PANELS = 32 };
    const cpu_state *state = cpu_state_of(job->plan);
    const int is_narrow = state->code && flow_code_narrow(state->code);
    const int32_t to = is_narrow ? CPU_BLOCK_KEYS : state->code ? FLOW_KEYS : PANELS;
    return n < CPU_BLOCK_KEYS ? (int32_t)((n + to - 1) / to) * to : CPU_BLOCK_KEYS;
}

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
    const int32_t padded = item_padded(job, n);
    const kv_view all_k = cpu_keys_of(job, 0, b, g), all_v = cpu_keys_of(job, 1, b, g);
    const cpu_rows k = kv_block(&all_k, j0, n, room[0]), v = kv_block(&all_v, j0, n, room[1]);
    kernels->pack_keys(&k, n, padded, to.k);
    *to.nonfinite = (char)kernels->pack_values(&v, n, padded, to.v);
}

/* ---- once for all threads ---- */

void cpu_open_wave(const cpu_job *job)
{
    const int64_t blocks = job->n_heads * job->g.key_blocks;
    const int64_t rows = job->n_heads * job->g.head_items / job->g.splits;
    if (job->g.is_shared && !job->is_local)
        for (int64_t n = 0; n < blocks; n++)
            atomic_init(&job->states[n], OPEN);
    for (int64_t n = 0; n < rows && job->g.splits > 1; n++)
        atomic_init(&job->left[n], (int32_t)job->g.splits);
}

/* Packs a block of the item's head unless another thread does or has. */
static int pack_open(cpu_worker *w, _Atomic uint8_t *states, int64_t block)
{
    const cpu_job *job = w->job;
    uint8_t seen = OPEN;
    if (atomic_load_explicit(&states[block], memory_order_relaxed) != OPEN
        || !atomic_compare_exchange_strong(&states[block], &seen, TAKEN))
        return 0;
    pack(job, w->item.b, w->item.g, block, w->room,
         block_of(&job->g, ahead(job, w->item.head), block));
    atomic_store_explicit(&states[block], PACKED, memory_order_release);
    return 1;
}

static int is_packed(_Atomic uint8_t *states, int64_t block)
{
    return atomic_load_explicit(&states[block], memory_order_acquire) == PACKED;
}

/* Until the thread that packs a block is done: packs those after it, then waits. */
static void await(cpu_worker *w, _Atomic uint8_t *states, int64_t block)
{
    enum { LOOKS = 4096 }; /* before the CPU is left to a thread that may have none */
    const int64_t past = (w->at.kv_len - 1) / CPU_BLOCK_KEYS + 1;
    int64_t next = block + 1;
    while (!is_packed(states, block) && next < past)
        pack_open(w, states, next++);
    for (int n = 1; !is_packed(states, block); n++) {
        cpu_relax();
        if (n % LOOKS == 0)
            sched_yield();
    }
}

static void share_blocks(cpu_worker *w, int64_t first, int64_t past)
{
    _Atomic uint8_t *states = w->job->states + w->item.head * w->job->g.key_blocks;
    for (int64_t block = first; block < past; block++)
        if (!is_packed(states, block) && !pack_open(w, states, block))
            await(w, states, block);
}

/* ---- for one thread ---- */

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
    if (!w->job->is_local) {
        share_blocks(w, first, past);
        return block_of(g, ahead(w->job, w->item.head), first);
    }
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
