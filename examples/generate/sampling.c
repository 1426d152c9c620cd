/* sampling.c: candidates are kept in a heap whose first is the least, so that n logits of which
 * k count take n log k steps. */
#include "sampling.h"

#include <math.h>

/* Of equal logits the lower token comes first. */
static int is_less(candidate a, candidate b)
{
    return a.logit != b.logit ? a.logit < b.logit : a.token > b.token;
}

static void sink(candidate *heap, int64_t n, candidate x)
{
    int64_t i = 0;
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && is_less(heap[child + 1], heap[child]))
            child++;
        if (!is_less(heap[child], x))
            break;
        heap[i] = heap[child];
    }
    heap[i] = x;
}

static void rise(candidate *heap, int64_t i, candidate x)
{
    for (; i > 0 && is_less(x, heap[(i - 1) / 2]); i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = x;
}

/* The k largest, largest first. */
static void take_largest(const float *logits, int64_t n, int64_t k, candidate *room)
{
    for (int64_t i = 0; i < n; i++) {
        const candidate x = {isnan(logits[i]) ? -INFINITY : logits[i], (int32_t)i};
        if (i < k)
            rise(room, i, x);
        else if (is_less(room[0], x))
            sink(room, k, x);
    }
    for (int64_t left = k - 1; left > 0; left--) {
        const candidate least = room[0];
        sink(room, left, room[left]);
        room[left] = least;
    }
}

/* splitmix64: 53 bits of it as a number from 0 to below 1 */
static double uniform(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return (double)((x ^ x >> 31) >> 11) * 0x1p-53;
}

int32_t sample(sampler *s, const float *logits, int64_t n, candidate *room)
{
    const int is_greedy = s->temperature <= 0;
    const int64_t k = is_greedy ? 1 : s->top_k > 0 && s->top_k < n ? s->top_k : n;
    take_largest(logits, n, k, room);
    if (is_greedy)
        return room[0].token;
    const double most = room[0].logit;
    double all = 0, kept = 0;
    int64_t used = 0;
    for (int64_t i = 0; i < k; i++)
        all += exp((room[i].logit - most) / s->temperature);
    while (used < k && (used == 0 || kept < s->top_p * all))
        kept += exp((room[used++].logit - most) / s->temperature);
    double left = uniform(&s->state) * kept;
    for (int64_t i = 0; i < used; i++) {
        left -= exp((room[i].logit - most) / s->temperature);
        if (left < 0)
            return room[i].token;
    }
    return room[0].token; /* rounding left a little */
}
