/* Min/max tables over captured tensors.
 * The tensor is seen as rows x columns, columns being its last dimension; a dimension whose
 * stride is 0 counts as one of size 1. Each row has a binary tree of (least, greatest) over
 * chunks of 32 columns; rows are joined in twos, fours, ... with the same trees, so any range
 * of rows and chunks is a few aligned pieces: one for the aligned boxes that a subdivision asks
 * for. Ends that cut a chunk are read from the tensor when the row is a single one, else the
 * chunk counts whole (a larger range is still true). Floats are kept as integers of the same
 * order. */
#include "pass/minmax.h"

#include "base/convert.h"
#include "eval/eval_ops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    CHUNK_SHIFT = 5,
    NARROW = 8, /* up to this many columns a chunk is one column */
    MAX_LEVELS = 64
};

typedef struct pair {
    int32_t lo, hi;
} pair;

struct minmax {
    saccade_tensor tensor;
    mod_type type;
    int may_nan;
    int64_t rows, columns, chunks;
    int shift;                     /* columns per chunk */
    int64_t level_off[MAX_LEVELS]; /* of a row's tree, by level */
    int64_t row_pairs;             /* size of a row's tree */
    int64_t group_off[MAX_LEVELS]; /* first tree of 2^level joined rows */
    pair *data;
};

static const pair nothing = {INT32_MAX, INT32_MIN};

static pair join(pair a, pair b)
{
    a.lo = b.lo < a.lo ? b.lo : a.lo;
    a.hi = b.hi > a.hi ? b.hi : a.hi;
    return a;
}

/* An int with the order of the float, and back. */
static int32_t key_of_float(float x)
{
    const int32_t bits = (int32_t)f32_bits(x);
    return bits ^ ((bits >> 31) & INT32_MAX);
}

static float float_of_key(int32_t key)
{
    return f32_from_bits((uint32_t)(key ^ ((key >> 31) & INT32_MAX)));
}

/* Adds one element, read as every engine does; a NaN only leaves its mark. */
static pair add(const minmax *m, pair p, const char *element, int *nan)
{
    const eval_cell value = eval_read(m->tensor.dtype, element, 0);
    int32_t key = value.i;
    if (m->type == MOD_FLOAT) {
        if (isnan(value.f)) {
            *nan = 1;
            return p;
        }
        key = key_of_float(value.f);
    }
    return join(p, (pair){key, key});
}

/* Address of the first element of a row. */
static const char *row_start(const minmax *m, int64_t row)
{
    int64_t off = 0;
    for (int d = m->tensor.rank - 2; d >= 0; d--) {
        off += row % m->tensor.shape[d] * m->tensor.stride[d];
        row /= m->tensor.shape[d];
    }
    return (const char *)m->tensor.data + off * (int64_t)saccade_dtype_bytes(m->tensor.dtype);
}

static pair scan(const minmax *m, const char *row, int64_t from, int64_t to, int *nan)
{
    const int64_t step =
        m->tensor.stride[m->tensor.rank - 1] * (int64_t)saccade_dtype_bytes(m->tensor.dtype);
    pair p = nothing;
    if (m->tensor.dtype == SACCADE_I32 && step == 4) {
        for (int64_t i = from; i <= to; i++) {
            int32_t key;
            memcpy(&key, row + 4 * i, sizeof key);
            p = join(p, (pair){key, key});
        }
        return p;
    }
    for (int64_t i = from; i <= to; i++)
        p = add(m, p, row + i * step, nan);
    return p;
}

/* ---- building ---- */

/* Number of entries of a level over n things. */
static int64_t level_size(int64_t n, int level)
{
    return ((n - 1) >> level) + 1;
}

static int64_t layout(int64_t n, int64_t *off)
{
    int64_t total = 0;
    for (int level = 0;; level++) {
        off[level] = total;
        total += level_size(n, level);
        if (level_size(n, level) == 1)
            return total;
    }
}

static pair *tree_of(const minmax *m, int level, int64_t group)
{
    return m->data + (m->group_off[level] + group) * m->row_pairs;
}

static void fill_row(minmax *m, int64_t row)
{
    const char *start = row_start(m, row);
    pair *tree = tree_of(m, 0, row);
    for (int64_t c = 0; c < m->chunks; c++) {
        const int64_t from = c << m->shift, past = (c + 1) << m->shift;
        tree[c] =
            scan(m, start, from, (past < m->columns ? past : m->columns) - 1, &m->may_nan);
    }
    for (int level = 1; level_size(m->chunks, level - 1) > 1; level++) {
        const pair *below = tree + m->level_off[level - 1];
        const int64_t n_below = level_size(m->chunks, level - 1);
        for (int64_t i = 0; i < level_size(m->chunks, level); i++)
            tree[m->level_off[level] + i] =
                2 * i + 1 < n_below ? join(below[2 * i], below[2 * i + 1]) : below[2 * i];
    }
}

static void join_rows(minmax *m)
{
    for (int level = 1; level_size(m->rows, level - 1) > 1; level++)
        for (int64_t g = 0; g < level_size(m->rows, level); g++) {
            const int has_two = 2 * g + 1 < level_size(m->rows, level - 1);
            const pair *a = tree_of(m, level - 1, 2 * g);
            const pair *b = has_two ? tree_of(m, level - 1, 2 * g + 1) : a;
            pair *to = tree_of(m, level, g);
            for (int64_t i = 0; i < m->row_pairs; i++)
                to[i] = join(a[i], b[i]);
        }
}

saccade_status minmax_create(const mod_capture *capture, const saccade_tensor *tensor,
                             minmax **out, saccade_error *err)
{
    minmax *m = calloc(1, sizeof *m);
    FAIL_IF_NULL(m);
    m->tensor = *tensor;
    m->type = capture->type;
    for (int d = 0; d < tensor->rank; d++) /* all indices read the same elements there */
        if (tensor->stride[d] == 0)
            m->tensor.shape[d] = 1;
    m->columns = m->tensor.shape[tensor->rank - 1];
    m->rows = 1;
    for (int d = 0; d < tensor->rank - 1; d++)
        m->rows *= m->tensor.shape[d];
    m->shift = m->columns <= NARROW ? 0 : CHUNK_SHIFT;
    m->chunks = level_size(m->columns, m->shift);
    m->row_pairs = layout(m->chunks, m->level_off);
    const int64_t trees = layout(m->rows, m->group_off);
    m->data = malloc((size_t)trees * (size_t)m->row_pairs * sizeof *m->data);
    if (!m->data) {
        free(m);
        FAIL(SACCADE_ENOMEM, "out of memory");
    }
    for (int64_t row = 0; row < m->rows; row++)
        fill_row(m, row);
    join_rows(m);
    *out = m;
    return SACCADE_OK;
}

void minmax_destroy(minmax *m)
{
    if (m)
        free(m->data);
    free(m);
}

int minmax_is_int(const minmax *m)
{
    return m->type == MOD_INT;
}

/* ---- asking ---- */

/* The largest aligned piece that starts at l and does not pass r: its level. */
static int piece(int64_t l, int64_t r)
{
    const int fits = 63 - __builtin_clzll((uint64_t)(r - l + 1));
    const int aligned = l ? __builtin_ctzll((uint64_t)l) : 63;
    return aligned < fits ? aligned : fits;
}

/* Chunks l..r of one tree. The last chunk of a level may be short, so a piece that reaches the
 * end counts as a longer one. */
static pair ask_chunks(const minmax *m, const pair *tree, int64_t l, int64_t r)
{
    pair p = nothing;
    while (l <= r) {
        const int level = piece(l, r);
        p = join(p, tree[m->level_off[level] + (l >> level)]);
        l += (int64_t)1 << level;
    }
    return p;
}

static pair ask_row(const minmax *m, int64_t row, int64_t from, int64_t to)
{
    const int64_t size = (int64_t)1 << m->shift;
    const int64_t first = (from + size - 1) >> m->shift;
    const int64_t past = to == m->columns - 1 ? m->chunks : (to + 1) >> m->shift;
    int nan = 0;
    if (first >= past)
        return scan(m, row_start(m, row), from, to, &nan);
    pair p = ask_chunks(m, tree_of(m, 0, row), first, past - 1);
    if (from < first << m->shift)
        p = join(p, scan(m, row_start(m, row), from, (first << m->shift) - 1, &nan));
    if (past < m->chunks && past << m->shift <= to)
        p = join(p, scan(m, row_start(m, row), past << m->shift, to, &nan));
    return p;
}

static pair ask(const minmax *m, int64_t row0, int64_t row1, int64_t from, int64_t to)
{
    pair p = nothing;
    if (row0 == row1)
        return ask_row(m, row0, from, to);
    while (row0 <= row1) {
        const int level = piece(row0, row1);
        const pair *tree = tree_of(m, level, row0 >> level);
        p = join(p, ask_chunks(m, tree, from >> m->shift, to >> m->shift));
        row0 += (int64_t)1 << level;
    }
    return p;
}

static int64_t clamp_index(int64_t i, int64_t size)
{
    return i < 0 ? 0 : i >= size ? size - 1 : i;
}

void minmax_query(const minmax *m, const range_val *const *index, range_val *out)
{
    const int last = m->tensor.rank - 1;
    int64_t row0 = 0, row1 = 0;
    for (int d = 0; d < last; d++) {
        const int64_t size = m->tensor.shape[d];
        row0 = row0 * size + clamp_index(index[d]->lo, size);
        row1 = row1 * size + clamp_index(index[d]->hi, size);
    }
    const pair p = ask(m, row0, row1, clamp_index(index[last]->lo, m->columns),
                       clamp_index(index[last]->hi, m->columns));
    if (m->type == MOD_BOOL)
        range_set_bool(out, p.lo == 0, p.hi != 0);
    else if (m->type == MOD_INT)
        range_set_span(out, p.lo, p.hi);
    else if (p.lo > p.hi) /* nothing but NaN */
        range_set_float(out, -INFINITY, INFINITY, 1);
    else
        range_set_float(out, float_of_key(p.lo), float_of_key(p.hi), m->may_nan);
}
