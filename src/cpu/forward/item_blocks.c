/* An item's rows against one block of keys, strip by strip, a few rows at a time, so that
 * scores are made, changed, masked, exponentiated and multiplied into O without leaving the
 * first-level cache:
 *
 *     K, V block --pack--> | per strip: scores -> score mod -> mask -> softmax -> values |
 *
 * Few rows (decode) take K and V unpacked, all rows in one strip. */
#include "cpu/forward/item.h"

#include "base/convert.h"
#include "cpu/kv/prefetch.h"

#include <math.h>
#include <string.h>

static float probability(const cpu_worker *w, int32_t i, int32_t j)
{
    const float *row = w->s + (int64_t)i * CPU_BLOCK_KEYS;
    const uint16_t *parts = (const uint16_t *)(const void *)row;
    if (w->kernels->is_split)
        return bf16_to_f32(parts[j / 32 * 64 + j % 32])
               + bf16_to_f32(parts[j / 32 * 64 + 32 + j % 32]);
    return w->kernels->element == 4 ? row[j] : bf16_to_f32(parts[j]);
}

static void scale_rows(cpu_worker *w, int32_t r0, int32_t n_rows)
{
    const int32_t o_ld = w->job->g.o_ld;
    for (int32_t i = 0; i < n_rows; i++)
        for (int32_t d = 0; d < o_ld; d++)
            w->o[(int64_t)(r0 + i) * o_ld + d] *= w->alpha[i];
}

/* O += P V where V holds infinities or NaN: keys that are dead in a row must not touch it, not
 * even by 0 * NaN. Keys from `first` on; live [n_rows][CPU_BLOCK_KEYS]. */
static void careful_values(cpu_worker *w, const item_tile *t, int32_t r0, int32_t n_rows,
                           int32_t first)
{
    const int32_t o_ld = w->job->g.o_ld, E = w->values.rows.dim;
    const cpu_rows from = kv_block(&w->values, t->j0, t->n, w->room[1]);
    for (int32_t j = first; j < t->n; j++) {
        convert_to_f32(from.dtype, cpu_rows_from(from, j).base, w->row, E);
        for (int32_t i = 0; i < n_rows; i++) {
            const float p = probability(w, i, j);
            for (int32_t d = 0; d < E && w->live[i * CPU_BLOCK_KEYS + j]; d++)
                w->o[(int64_t)(r0 + i) * o_ld + d] += p * w->row[d];
        }
    }
}

static void note_live(cpu_worker *w, int32_t n_rows, const float *s)
{
    for (int32_t n = 0; n < n_rows * CPU_BLOCK_KEYS; n++)
        w->live[n] = s[n] != -INFINITY;
}

enum { MOST_STRETCHES = CPU_BLOCK_KEYS / JIT_GROUP };

/* What a strip of rows sees of a tile: stretches of its keys, whose scores lie one after the
 * other. Keys between them are dead. */
typedef struct strip_keys {
    cpu_stretch at[MOST_STRETCHES];
    uint8_t is_full[MOST_STRETCHES];
    int32_t n, total; /* stretches; keys of them all */
    int32_t block;    /* as tiles of stretches have it */
} strip_keys;

static void add_stretch(strip_keys *keys, int32_t from, int32_t past, int is_full)
{
    keys->at[keys->n] = (cpu_stretch){from, past, keys->total};
    keys->is_full[keys->n++] = (uint8_t)is_full;
    keys->total += past - from;
}

/* Whether what follows scores can do without the keys between stretches. */
static int can_part(const cpu_worker *w, const item_tile *t)
{
    return w->kernels->values_of && !t->is_nonfinite && !w->job->run->dropout.is_on;
}

/* Stretches of groups of which cells leave some; one around them all where it has to be. */
static void find_stretches(const cpu_worker *w, const cpu_box *box, const item_tile *t,
                           strip_keys *keys)
{
    _Static_assert(MOST_STRETCHES < 32, "a bit for each group, and one that is 0");
    const cpu_groups groups = cpu_groups_of(&w->job->live, JIT_GROUP, box);
    const int is_parted = can_part(w, t);
    uint32_t left = groups.some;
    keys->block = t->n;
    while (left) {
        const int first = __builtin_ctz(left);
        const uint32_t from_first = left >> first;
        const int n = is_parted ? __builtin_ctz(~from_first) : 32 - __builtin_clz(from_first);
        const uint32_t these = ((UINT32_C(1) << n) - 1) << first;
        const int32_t past = (first + n) * JIT_GROUP;
        add_stretch(keys, first * JIT_GROUP, past < t->n ? past : t->n,
                    (groups.every & these) == these);
        left &= ~these;
    }
}

/* The part of a tile that a strip of rows needs: whole panels from the first live key on, no
 * key past the last. */
static void find_keys_of_strip(const cpu_worker *w, int32_t r0, int32_t n_rows,
                               const item_tile *t, strip_keys *keys)
{
    const cpu_live *live = &w->job->live;
    cpu_box box = item_box_of(w, r0, n_rows, t->j0, t->j0 + t->n);
    keys->n = keys->total = keys->block = 0;
    if (t->is_full) {
        add_stretch(keys, 0, t->n, 1);
        return;
    }
    if (live->by != CPU_BY_LIMITS && live->cells) {
        find_stretches(w, &box, t, keys);
        return;
    }
    cpu_limits l = w->limits;
    if (live->by == CPU_BY_LIMITS)
        cpu_limit_rows(&l, r0, n_rows);
    const cpu_cover cover = cpu_narrow(live, &l, JIT_GROUP, &box);
    if (cover != CPU_EMPTY)
        add_stretch(keys, (int32_t)(box.j0 - t->j0), (int32_t)(box.j1 - t->j0),
                    cover == CPU_FULL);
}

static item_tile part_of(const item_tile *t, const strip_keys *keys, int32_t i)
{
    item_tile part = *t;
    part.first = keys->at[i].from;
    part.j0 += part.first;
    part.n = keys->at[i].past - part.first;
    part.is_full = keys->is_full[i];
    part.block = keys->block;
    return part;
}

/* Scores of the strip's keys; the rows' maxima where known. */
static const float *make_scores(cpu_worker *w, const item_tile *t, const strip_keys *keys,
                                int32_t r0, int32_t n_rows)
{
    const cpu_kernels *k = w->kernels;
    const int32_t D = (int32_t)w->job->run->q->shape[3];
    const size_t element = (size_t)k->element;
    /* of these kernels: keys of careful ones may lie closer than g says */
    const size_t key_pitch = (size_t)((D + k->depth - 1) / k->depth * k->depth) * element;
    const char *q = (const char *)w->queries + (size_t)r0 * (size_t)w->queries_ld * element;
    const float *most = NULL;
    float *s = w->s;
    for (int32_t i = 0; i < keys->n; i++) {
        const item_tile part = part_of(t, keys, i);
        k->scores(q, w->queries_ld, (const char *)t->k + (size_t)part.first * key_pitch, D,
                  n_rows, item_columns_of(w, &part), item_scale_of(w, &part), s,
                  CPU_BLOCK_KEYS);
        most = item_change_scores(w, &part, r0, n_rows, s);
        s += part.n;
    }
    return keys->n == 1 ? most : NULL;
}

/* O = alpha O + P V of the strip's keys. */
static void add_values(cpu_worker *w, const item_tile *t, strip_keys *keys, int32_t r0,
                       int32_t n_rows)
{
    const cpu_kernels *k = w->kernels;
    const cpu_geometry *g = &w->job->g;
    const int32_t panels = g->o_ld / k->panel, first = keys->at[0].from;
    const int32_t more = k->element == 4 && !k->is_split ? 0 : -keys->total & 15;
    float *o = w->o + (int64_t)r0 * g->o_ld;
    if (keys->n > 1) {
        keys->at[keys->n - 1].past += more;
        k->values_of(w->s, CPU_BLOCK_KEYS, t->v, keys->at, keys->n, t->padded, n_rows, panels,
                     w->alpha, o, g->o_ld);
        return;
    }
    const size_t columns = (size_t)(k->is_by_keys ? g->o_ld : k->panel);
    k->values(w->s, CPU_BLOCK_KEYS,
              (const char *)t->v + (size_t)first * columns * (size_t)k->element,
              keys->total + more, t->padded, n_rows, panels, w->alpha, o, g->o_ld);
}

void item_run_strip(cpu_worker *w, item_tile t, int32_t r0, int32_t n_rows)
{
    strip_keys keys;
    find_keys_of_strip(w, r0, n_rows, &t, &keys);
    if (!keys.n)
        return;
    const float *most = make_scores(w, &t, &keys, r0, n_rows);
    if (t.is_nonfinite)
        note_live(w, n_rows, w->s);
    w->kernels->softmax(w->s, CPU_BLOCK_KEYS, n_rows, (keys.total + 15) / 16 * 16, most,
                        w->m + r0, w->l + r0, w->alpha);
    const item_tile whole = part_of(&t, &keys, 0); /* not of those with several */
    item_drop(w, &whole, r0, n_rows);
    if (t.is_nonfinite) {
        scale_rows(w, r0, n_rows);
        careful_values(w, &whole, r0, n_rows, 0);
        return;
    }
    add_values(w, &t, &keys, r0, n_rows);
}

_Static_assert(KV_GROUP * KV_GROUPS >= CPU_BLOCK_KEYS, "places for all groups of a tile");

enum { PIECE = 64, DECODE_ROWS = 32 }; /* keys; rows that kernels in f32 take */

/* Keys of a tile that products take at a time: quantised ones so few that what becomes of them
 * stays in L1. Where P is bf16 all keys: it lies in no pieces then. */
static int32_t piece_of(const cpu_worker *w, const item_tile *t, const kv_view *keys)
{
    return keys->codes.convert && w->kernels->element == 4 ? PIECE : t->n;
}

/* Kernels in f32 take codes as they are, and scores and weights take the scales of rows. */
static int is_raw(const cpu_worker *w, const kv_view *keys)
{
    return w->kernels->element == 4 && kv_is_by_row(keys);
}

static cpu_keys take_piece(const cpu_worker *w, const kv_view *keys, int64_t j, int32_t n,
                           void *room, float by_row[PIECE], const char *groups[KV_GROUPS])
{
    if (is_raw(w, keys))
        return (cpu_keys){kv_raw(keys, j, n, room, by_row), NULL};
    return kv_keys(keys, j, n, room, groups);
}

/* to[i] = x[i] * by[i], four at a time. */
static void multiply(const float *restrict x, const float *restrict by, int32_t n,
                     float *restrict to)
{
    int32_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (int32_t t = i; t < i + 4; t++)
            to[t] = x[t] * by[t];
    for (; i < n; i++)
        to[i] = x[i] * by[i];
}

static void scale_scores(const float *by_row, int32_t n, int32_t rows, float *s)
{
    float scaled[PIECE];
    for (int32_t r = 0; r < rows; r++, s += CPU_BLOCK_KEYS) {
        multiply(s, by_row, n, scaled);
        memcpy(s, scaled, (size_t)n * sizeof *s);
    }
}

/* Weights of dead keys stay 0, whatever their scales are. to: rows of PIECE. */
static void scale_weights(const float *by_row, int32_t n, int32_t rows, const float *p,
                          float *to)
{
    float zero = 0;
    for (int32_t i = 0; i < n; i++)
        zero += by_row[i] * 0;
    for (int32_t r = 0; r < rows; r++, p += CPU_BLOCK_KEYS, to += PIECE) {
        multiply(p, by_row, n, to);
        for (int32_t i = 0; i < n && zero != 0; i++)
            to[i] = p[i] == 0 ? 0 : to[i];
    }
}

/* Scores of a tile whose few rows read K where it lies, into s. V is prefetched meanwhile. */
static const float *decode_scores(cpu_worker *w, const item_tile *t, int is_prefetching,
                                  float *s)
{
    const kv_view *k = &w->keys, *v = &w->values;
    const int32_t piece = piece_of(w, t, k);
    for (int32_t j = 0; j < t->n; j += piece) {
        const int32_t n = t->n - j < piece ? t->n - j : piece;
        float by_row[PIECE];
        const char *groups[KV_GROUPS], *ahead[KV_GROUPS];
        const cpu_keys keys = take_piece(w, k, t->j0 + j, n, w->room[0], by_row, groups);
        cpu_prefetch next = {0};
        if (is_prefetching)
            next = kv_prefetch(v, t->j0 + j, n, w->kernels->prefetch_parts, ahead);
        w->kernels->decode_qk(w->q, w->job->g.q_ld, &keys, n, w->rows, item_scale_of(w, t),
                              s + j, CPU_BLOCK_KEYS, &next);
        if (is_raw(w, k))
            scale_scores(by_row, n, w->rows, s + j);
    }
    return item_change_scores(w, t, 0, w->rows, s);
}

/* Finds which keys are live after the scores have become P, for tiles where that turns out to
 * matter late. Scores are made again, in the memory that packed keys would use. */
static void find_live_late(cpu_worker *w, const item_tile *t)
{
    decode_scores(w, t, 0, w->k);
    note_live(w, w->rows, w->k);
}

/* Softmax of a tile, two rows at a time, with prefetches between. */
static void decode_softmax(cpu_worker *w, const item_tile *t, const float *most,
                           cpu_prefetch *next)
{
    const int32_t n = (t->n + 15) / 16 * 16, share = prefetch_share(next, (w->rows + 1) / 2);
    for (int32_t r = 0; r < w->rows; r += 2) {
        const int32_t n_rows = r + 1 < w->rows ? 2 : 1;
        prefetch_lines(next, w->kernels->prefetch_parts, share);
        w->kernels->softmax(w->s + (int64_t)r * CPU_BLOCK_KEYS, CPU_BLOCK_KEYS, n_rows, n,
                            most ? most + r : NULL, w->m + r, w->l + r, w->alpha + r);
    }
}

/* Keys of the tile that comes next. After the last one that is the next head's first, where
 * heads lie one after the other, which has no more keys than this head. */
static int32_t next_keys(const cpu_worker *w)
{
    const int64_t keys = w->job->run->sizes.KV;
    return keys < CPU_BLOCK_KEYS ? (int32_t)keys : CPU_BLOCK_KEYS;
}

/* P V of a tile; the keys that are done: all, or those before the first that are not finite.
 * K from key `ahead` of the next tile on is prefetched meanwhile. */
static int32_t decode_values(cpu_worker *w, const item_tile *t, int32_t ahead)
{
    const kv_view *k = &w->keys, *v = &w->values;
    const int32_t piece = piece_of(w, t, v);
    for (int32_t j = 0; j < t->n; j += piece) {
        const int32_t n = t->n - j < piece ? t->n - j : piece;
        float by_row[PIECE], scaled[DECODE_ROWS * PIECE];
        const char *groups[KV_GROUPS], *beyond[KV_GROUPS];
        const cpu_keys keys = take_piece(w, v, t->j0 + j, n, w->room[1], by_row, groups);
        if (is_raw(w, v))
            scale_weights(by_row, n, w->rows, w->s + j, scaled);
        const int32_t first = j > ahead ? j : ahead;
        const int32_t past = j + piece < t->n ? j + piece : next_keys(w);
        cpu_prefetch next = {0};
        if (first < past)
            next = kv_prefetch(k, t->j0 + t->n + first, past - first,
                               w->kernels->prefetch_parts, beyond);
        const float *p = is_raw(w, v) ? scaled : w->s + j;
        const int32_t p_ld = is_raw(w, v) ? PIECE : CPU_BLOCK_KEYS;
        const int32_t done = w->kernels->decode_pv(p, p_ld, &keys, n, w->rows, w->alpha, w->o,
                                                   w->job->g.o_ld, &next);
        if (done < n)
            return j + done;
        for (int32_t r = 0; r < w->rows; r++)
            w->alpha[r] = 1;
    }
    return t->n;
}

/* The tile's V is prefetched while its K is used, the next K while V is used, and a sixth of
 * that during softmax: memory would be idle in a phase without prefetches. */
static void run_decode(cpu_worker *w, const item_tile *t)
{
    enum { EARLY = 3 * KV_GROUP };
    const int parts = w->kernels->prefetch_parts;
    const int32_t ahead = EARLY < next_keys(w) ? EARLY : next_keys(w);
    const char *groups[KV_GROUPS];
    cpu_prefetch early = kv_prefetch(&w->keys, t->j0 + t->n, ahead, parts, groups);
    decode_softmax(w, t, decode_scores(w, t, 1, w->s), &early);
    item_drop(w, t, 0, w->rows);
    const int32_t done = decode_values(w, t, ahead);
    if (done == t->n)
        return;
    find_live_late(w, t);
    careful_values(w, t, 0, w->rows, done);
}

/* ---- tiles ---- */

void item_find_operands(cpu_worker *w, item_tile *t)
{
    const cpu_job *job = w->job;
    const int64_t block = t->j0 / CPU_BLOCK_KEYS;
    if (job->g.is_shared && w->kernels == cpu_state_of(job->plan)->needs.kernels) {
        const cpu_packed packed = item_packed(w, block, block + 1);
        t->k = packed.k;
        t->v = packed.v;
        t->is_nonfinite = *packed.nonfinite;
        t->padded = item_padded(job, w->at.kv_len - block * CPU_BLOCK_KEYS);
        return;
    }
    const cpu_rows k = kv_block(&w->keys, t->j0, t->n, w->room[0]);
    const cpu_rows v = kv_block(&w->values, t->j0, t->n, w->room[1]);
    t->padded = item_padded(job, t->n);
    w->kernels->pack_keys(&k, t->n, t->padded, w->k);
    t->is_nonfinite = w->kernels->pack_values(&v, t->n, t->padded, w->v);
    t->k = w->k;
    t->v = w->v;
}

/* Rows of a strip where so many are cut into strips: of equal size, if the kernels' time is. */
static int32_t strip_of(const cpu_kernels *k, int32_t rows)
{
    const int32_t n = (rows + k->strip - 1) / k->strip;
    return k->is_even ? (rows + n - 1) / n : k->strip;
}

/* Rows [r0, r0 + rows) of the item, whole strips of it, against keys [j0, j1) of one block. */
static void run_tile(cpu_worker *w, int64_t j0, int64_t j1, int32_t r0, int32_t rows)
{
    const int32_t strip = strip_of(w->kernels, rows);
    cpu_box box = w->item.box;
    box.j0 = j0;
    box.j1 = j1;
    const cpu_cover cover = cpu_cover_of(&w->job->live, &w->limits, &box, w->ranges);
    if (cover == CPU_EMPTY)
        return;
    item_tile t = {.j0 = j0, .n = (int32_t)(j1 - j0), .is_full = cover == CPU_FULL};
    if (w->job->g.is_decode) {
        run_decode(w, &t);
        return;
    }
    item_find_operands(w, &t);
    for (int32_t r = r0; r < r0 + rows; r += strip)
        item_run_strip(w, t, r, r0 + rows - r < strip ? r0 + rows - r : strip);
}

void item_run_blocks(cpu_worker *w, int64_t begin, int64_t end, int32_t r0, int32_t rows)
{
    for (int64_t j = begin; j < end; j += CPU_BLOCK_KEYS)
        run_tile(w, j, j + CPU_BLOCK_KEYS < end ? j + CPU_BLOCK_KEYS : end, r0, rows);
}
