/* Which of a plan's tiles make a run faster: pure functions of its sizes, by costs measured on
 * an H200 in bf16, in nanoseconds. */
#include "cuda/tile/tile.h"

#include "base/integers.h"

/* What a tile costs beside its blocks, and a score; small tiles of a multiprocessor share its
 * time, and the longest takes `alone` for each score at least. They wait for copies where rows
 * are no whole panels of 64 columns. */
typedef struct costs {
    double tile, score, small_tile, small_score, alone;
} costs;
static const costs narrow = {4000, 0.045, 1200, 0.055, 0.18};
static const costs wide = {4000, 0.085, 1300, 0.113, 0.22};
static const double large_mask = 0.08,
                    small_mask = 0.09; /* more, where the mask is evaluated */
static const double late = 0.9;        /* of a score of small tiles, where offsets are */
static const double split_sectors = 1.8, cut_panels = 1.3; /* times as long */
static const double launches = 1000; /* that large tiles have and small ones do not */

int cu_small_pays(int n_sm, int dim, int is_evaluated, const cu_tile *small, cu_amount s,
                  const cu_tile *large, cu_amount l)
{
    const costs *c = dim > 64 ? &wide : &narrow;
    const double block =
        large->groups * 64.0 * large->keys * (c->score + (is_evaluated ? large_mask : 0));
    const double more = is_evaluated ? small_mask : 0, of_late = small->is_lazy ? late : 1;
    const double piece = small->groups * 64.0 * small->keys;
    const double copies = cu_splits_sectors(dim) ? split_sectors
                          : dim % 64 && dim > 32 ? cut_panels
                                                 : 1;
    if (l.tiles <= 0 || s.tiles <= 0)
        return 0;
    const double waves =
        l.tiles > 4 * n_sm ? (double)l.tiles / n_sm : (double)((l.tiles + n_sm - 1) / n_sm);
    const double all = waves * (c->tile + (double)l.blocks / (double)l.tiles * block);
    const double longest = c->tile + (double)l.longest * block;
    const double shared =
        ((double)s.tiles * c->small_tile
         + (double)s.blocks * piece * (of_late * copies * c->small_score + more))
        / n_sm;
    const double alone =
        c->small_tile + (double)s.longest * piece * (of_late * copies * c->alone + more);
    return (shared > alone ? shared : alone) < launches + (all > longest ? all : longest);
}

/* Where it computes fewer scores, as many where copies of rows are slow; with one tile to a
 * head nothing stays: docs/lab/138. */
int cu_few_pays(const cu_tile *few, const cu_tile *small, int dim, const saccade_sizes *s)
{
    enum { LEAST_TILES = 4 };
    const int64_t walks = round_up(s->KV, few->keys), of_small = round_up(s->KV, small->keys);
    return ceil_div(s->Q, 64) * cu_group(s) >= LEAST_TILES
           && (dim % 64 ? walks <= of_small : walks < of_small);
}

/* Where three teams would not make fewer rounds, each of which takes longer with three; shorter
 * walks gain nothing. */
int cu_pair_pays(int n_sm, int64_t tiles, int64_t keys)
{
    enum { PAIR_KEYS = 1024 };
    const int64_t two = 2 * (int64_t)n_sm, three = 3 * (int64_t)n_sm;
    return keys >= PAIR_KEYS && (tiles + two - 1) / two == (tiles + three - 1) / three;
}

/* What a span of decode costs beside its keys, and for each of its 16 rows; bytes of keys in a
 * nanosecond, more where spans at work at a time read the same ones; and from memory.
 * docs/lab/137. */
static const double span = 1300, span_row = 100;
static const double span_rate = 4600, shared_rate = 8000, memory_rate = 4200;
/* What a wide span costs beside its keys, and more where CTAs share it; bytes of keys in a
 * nanosecond, and of heads wider than 128. docs/lab/140. */
static const double wide_span = 6500, wide_parts = 7000;
static const double wide_rate = 4500, wide_head_rate = 3500;

static double key_bytes(const saccade_sizes *s)
{
    return (double)(s->KV * 2 * (s->D + s->Dv));
}

static double wide_time(int n_sm, const saccade_sizes *s)
{
    const int64_t spans = cu_decode_spans(s, CU_WIDE_ROWS);
    const int is_whole = spans > n_sm, has_wide_heads = larger(s->D, s->Dv) > 128;
    const double ends = is_whole ? wide_span * (double)spans / n_sm : wide_span + wide_parts;
    return ends + (double)spans * key_bytes(s) / (has_wide_heads ? wide_head_rate : wide_rate);
}

static double decode_time(int n_sm, const saccade_sizes *s)
{
    enum { ROWS = CU_SPAN_ROWS };
    const int64_t rows = cu_group(s) * s->Q, spans = cu_decode_spans(s, ROWS);
    const int is_shared =
        (rows > ROWS && spans <= n_sm) || (rows > 3 * ROWS && spans <= 3 * (int64_t)n_sm);
    const double waves = spans > n_sm ? (double)spans / n_sm : 1;
    return waves * (span + span_row * (double)smaller(rows, ROWS))
           + (double)spans * key_bytes(s) / (is_shared ? shared_rate : span_rate);
}

/* Of runs of up to 64 queries, by tiles of one kind. */
static double tiles_time(int n_sm, const cu_tile *tile, int is_small, const saccade_sizes *s)
{
    const int64_t dim = larger(s->D, s->Dv), tiles = s->B * s->H;
    const costs *c = dim > 64 ? &wide : &narrow;
    const double scores = (double)(64 * tile->groups * s->KV);
    const double score = is_small ? c->small_score : c->score * (dim > 128 ? dim / 128. : 1);
    const double first = is_small ? c->small_tile : c->tile + launches;
    const double alone = first + scores * (is_small ? c->alone : score);
    const double shared = (first + scores * score) * (double)tiles / n_sm;
    const double memory = (double)(s->B * s->Hkv) * key_bytes(s) / memory_rate;
    const double computed = alone > shared ? alone : shared;
    return computed > memory ? computed : memory;
}

int cu_decode_pays(int n_sm, int span_rows, const cu_tile *tile, int is_small,
                   const saccade_sizes *s)
{
    const double spans = span_rows == CU_WIDE_ROWS ? wide_time(n_sm, s) : decode_time(n_sm, s);
    return spans <= tiles_time(n_sm, tile, is_small, s);
}

/* Two narrow spans that are at work at a time read keys in one piece about once: lab 140. */
int cu_decode_wide_pays(int n_sm, int is_in_pieces, const saccade_sizes *s)
{
    const int64_t rows = cu_group(s) * s->Q;
    const int64_t narrow = cu_decode_spans(s, CU_SPAN_ROWS);
    return rows > 2 * CU_SPAN_ROWS || (rows > CU_SPAN_ROWS && (is_in_pieces || narrow > n_sm));
}

/* Where rounds of two to a multiprocessor are nearly full. */
int cu_decode_half_pays(int n_sm, int64_t spans)
{
    const int64_t places = (spans + 2 * n_sm - 1) / (2 * n_sm) * 2 * n_sm;
    return spans * 100 >= places * 90;
}

/* From one and a half spans to a multiprocessor on: docs/lab/095. Joining cut spans costs more
 * than ends that do not meet. */
int cu_decode_owns_pays(int n_sm, int64_t spans)
{
    return spans * 2 >= 3 * (int64_t)n_sm;
}
