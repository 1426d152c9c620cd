/* Chunk to rank. Every rank gets as many chunks as any other, give or take one or two, and as
 * much area as can be. Three ways are tried, from the one whose keys travel least: neighbouring
 * chunks; the first with the last, the second with the last but one (even under causal); and
 * the largest first to the rank with the least (Graham's rule, with a bound on the count). Each
 * is looked at as it is and after exchanges of chunks between the heaviest and the lightest
 * rank. Of those that are even enough the one with the least traffic is taken, of others the
 * evenest. */
#include "dist/shard.h"

#include "base/status.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Largest area / mean at which exchanging ends, and up to which less traffic is worth more. */
static const double even_aim = 1.008, even_enough = 1.02;

/* Room for one try. */
typedef struct trial {
    const shard_source *s;
    int32_t *owner;
    double *load;           /* [ranks] */
    int64_t *heavy, *light; /* [chunks] each: chunks of a rank by area */
    int64_t *order, *count; /* [chunks], [ranks] */
} trial;

/* ---- first deals ---- */

static void deal_neighbours(trial *t)
{
    const int64_t n = t->s->chunks, ranks = t->s->ranks;
    for (int64_t r = 0; r < ranks; r++)
        for (int64_t c = r * n / ranks; c < (r + 1) * n / ranks; c++)
            t->owner[c] = (int32_t)r;
}

static void deal_ends(trial *t)
{
    const int64_t n = t->s->chunks, pieces = 2 * (int64_t)t->s->ranks;
    for (int64_t p = 0; p < pieces; p++)
        for (int64_t c = p * n / pieces; c < (p + 1) * n / pieces; c++)
            t->owner[c] = (int32_t)(p < pieces / 2 ? p : pieces - 1 - p);
}

/* By falling area, equal ones by place. */
static int is_before(const double *area, int64_t a, int64_t b)
{
    return area[a] > area[b] || (area[a] == area[b] && a < b);
}

static void sift(const double *area, int64_t *heap, int64_t at, int64_t n)
{
    for (;;) {
        int64_t last = at;
        for (int64_t child = 2 * at + 1; child <= 2 * at + 2 && child < n; child++)
            if (is_before(area, heap[last], heap[child]))
                last = child;
        if (last == at)
            return;
        const int64_t held = heap[at];
        heap[at] = heap[last];
        heap[last] = held;
        at = last;
    }
}

static void sort(const double *area, int64_t *list, int64_t n)
{
    for (int64_t i = n / 2 - 1; i >= 0; i--)
        sift(area, list, i, n);
    for (int64_t last = n - 1; last > 0; last--) {
        const int64_t held = list[0];
        list[0] = list[last];
        list[last] = held;
        sift(area, list, 0, last);
    }
}

/* The rank with the least that has room. */
static int32_t lightest_with_room(const trial *t, int64_t most)
{
    int32_t best = -1;
    for (int32_t r = 0; r < t->s->ranks; r++)
        if (t->count[r] < most && (best < 0 || t->load[r] < t->load[best]))
            best = r;
    return best;
}

static void deal_largest(trial *t)
{
    const int64_t n = t->s->chunks, most = (n + t->s->ranks - 1) / t->s->ranks;
    for (int64_t c = 0; c < n; c++)
        t->order[c] = c;
    sort(t->s->area, t->order, n);
    memset(t->count, 0, (size_t)t->s->ranks * sizeof *t->count);
    memset(t->load, 0, (size_t)t->s->ranks * sizeof *t->load);
    for (int64_t i = 0; i < n; i++) {
        const int64_t c = t->order[i];
        const int32_t r = lightest_with_room(t, most);
        t->owner[c] = r;
        t->load[r] += t->s->area[c];
        t->count[r]++;
    }
}

/* ---- exchanging ---- */

static double add_loads(trial *t)
{
    double all = 0;
    memset(t->load, 0, (size_t)t->s->ranks * sizeof *t->load);
    for (int64_t c = 0; c < t->s->chunks; c++) {
        t->load[t->owner[c]] += t->s->area[c];
        all += t->s->area[c];
    }
    return all / t->s->ranks;
}

static int32_t heaviest(const trial *t)
{
    int32_t best = 0;
    for (int32_t r = 1; r < t->s->ranks; r++)
        if (t->load[r] > t->load[best])
            best = r;
    return best;
}

static int32_t lightest(const trial *t)
{
    int32_t best = 0;
    for (int32_t r = 1; r < t->s->ranks; r++)
        if (t->load[r] < t->load[best])
            best = r;
    return best;
}

static int64_t list_of(const trial *t, int32_t rank, int64_t *list)
{
    int64_t n = 0;
    for (int64_t c = 0; c < t->s->chunks; c++)
        if (t->owner[c] == rank)
            list[n++] = c;
    sort(t->s->area, list, n);
    return n;
}

/* Exchanges the pair whose difference is nearest to half of the two ranks'; 0: none helps. */
static int exchange(trial *t, int32_t from, int32_t to)
{
    const double *area = t->s->area;
    const double gap = t->load[from] - t->load[to];
    const int64_t n_heavy = list_of(t, from, t->heavy), n_light = list_of(t, to, t->light);
    int64_t best_heavy = -1, best_light = -1;
    double best = gap / 2 * (1 - 1e-9);
    for (int64_t i = 0, j = 0; i < n_heavy && j < n_light;) {
        const double moved = area[t->heavy[i]] - area[t->light[j]];
        if (fabs(moved - gap / 2) < best) {
            best = fabs(moved - gap / 2);
            best_heavy = t->heavy[i];
            best_light = t->light[j];
        }
        if (moved > gap / 2)
            i++; /* a smaller one of the heavy rank's */
        else
            j++; /* or of the light rank's */
    }
    if (best_heavy < 0)
        return 0;
    t->owner[best_heavy] = to;
    t->owner[best_light] = from;
    t->load[from] += area[best_light] - area[best_heavy];
    t->load[to] += area[best_heavy] - area[best_light];
    return 1;
}

/* Largest / mean; 1 where nothing is live. */
static double evenness(trial *t)
{
    const double mean = add_loads(t);
    return mean > 0 ? t->load[heaviest(t)] / mean : 1;
}

/* Exchanges chunks until loads are even enough or no exchange helps; returns evenness(). */
static double make_even(trial *t)
{
    const double mean = add_loads(t);
    for (int64_t left = 16 + 4 * (int64_t)t->s->ranks; mean > 0 && left > 0; left--) {
        const int32_t from = heaviest(t);
        if (t->load[from] <= even_aim * mean || !exchange(t, from, lightest(t)))
            break;
    }
    return evenness(t);
}

/* ---- choosing ---- */

/* Keys lie with their rows where there are as many; else in as many neighbouring chunks. */
static void deal_keys(const shard_source *s, const int32_t *owner, int32_t *key_owner)
{
    const int64_t n = s->key_chunks;
    if (s->Q == s->KV) {
        memcpy(key_owner, owner, (size_t)n * sizeof *owner);
        return;
    }
    for (int64_t r = 0; r < s->ranks; r++)
        for (int64_t c = r * n / s->ranks; c < (r + 1) * n / s->ranks; c++)
            key_owner[c] = (int32_t)r;
}

static int is_better(double even, int64_t traffic, double best_even, int64_t best_traffic)
{
    if (even <= even_enough && best_even <= even_enough)
        return traffic < best_traffic;
    return even < best_even; /* also the first, whose best is infinite */
}

static saccade_status open_trial(const shard_source *s, trial *t, saccade_error *err)
{
    const size_t n = (size_t)s->chunks, ranks = (size_t)s->ranks;
    t->s = s;
    t->owner = calloc(n, sizeof *t->owner);
    t->load = calloc(ranks, sizeof *t->load);
    t->heavy = calloc(3 * n, sizeof *t->heavy);
    t->count = calloc(ranks, sizeof *t->count);
    FAIL_IF(!t->owner || !t->load || !t->heavy || !t->count, SACCADE_ENOMEM, "out of memory");
    t->light = t->heavy + n;
    t->order = t->light + n;
    return SACCADE_OK;
}

static void close_trial(trial *t)
{
    free(t->owner);
    free(t->load);
    free(t->heavy);
    free(t->count);
}

saccade_status shard_balance(const shard_source *s, int32_t *owner, int32_t *key_owner,
                             saccade_error *err)
{
    static void (*const deals[])(trial *) = {deal_neighbours, deal_ends, deal_largest};
    saccade_status status = SACCADE_OK;
    trial t = {0};
    double best_even = INFINITY;
    int64_t best_traffic = INT64_MAX;
    const int64_t units = (s->KV + s->unit - 1) / s->unit;
    int32_t *keys = calloc((size_t)s->key_chunks, sizeof *keys);
    int32_t *scratch = malloc((size_t)(units + 1) * sizeof *scratch);
    FAIL_IF_GOTO(!keys || !scratch, SACCADE_ENOMEM, "out of memory");
    TRY_GOTO(open_trial(s, &t, err));
    for (size_t i = 0; i < 2 * sizeof deals / sizeof *deals; i++) {
        deals[i / 2](&t);
        const double even = i % 2 ? make_even(&t) : evenness(&t);
        if (even > even_enough && even >= best_even)
            continue;
        deal_keys(s, t.owner, keys);
        const int64_t traffic = shard_traffic(s, t.owner, keys, scratch);
        if (!is_better(even, traffic, best_even, best_traffic))
            continue;
        best_even = even;
        best_traffic = traffic;
        memcpy(owner, t.owner, (size_t)s->chunks * sizeof *owner);
        memcpy(key_owner, keys, (size_t)s->key_chunks * sizeof *keys);
    }
out:
    close_trial(&t);
    free(keys);
    free(scratch);
    return status;
}
