/* What scores and masks read, forward and backward on CUDA, against the reference: tensors at
 * their own query and key, as tiles (dense.cuh) wherever they lie so that tensor copies take
 * them, element by element elsewhere; and values that scores share, of a key or a diagonal
 * (shares.cuh). Without a GPU programs are compiled for sm_90a, which runs take tiles is asked
 * of made-up runs, and which values are shared of texts. */
#include "support/device_case.h"
#include "support/problem_case.h"
#include "support/short_run.h"

#include "base/convert.h"
#include "cuda/backward/cuda_backward.h"
#include "cuda/cuda.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 3 };
enum { ALL_GRADIENTS = SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V };
enum { Q, K, V, OUT, LSE, D_OUT, DQ, DK, DV, TENSORS };
static const char *const names[TENSORS] = {"q",    "k",  "v",  "out", "lse",
                                           "dout", "dq", "dk", "dv"};

/* How a tensor lies: as its shape says; as part of a larger one, whose rows are 8 elements or 1
 * longer; the same elements for all of the first dimension; queries and keys swapped. */
typedef enum layout { PLAIN, PADDED, ODD, EXPANDED, SWAPPED } layout;

/* index: its dimensions, of b, h, q, k, `more` longer than these are, and NaN past the last
 * position; n: queries and keys together; else a number, counted from the character 0 on. */
typedef struct captured {
    const char *name, *index;
    saccade_dtype dtype;
    layout layout;
    int more;
} captured;

typedef struct dense_case {
    const char *problem, *score, *mask;
    captured of[MOST];
    int32_t q_offset, kv_len;
    int has_block_mask;
} dense_case;

#define TENSOR(of_name, of_index, of_dtype)                             \
    {                                                                   \
        .name = of_name, .index = of_index, .dtype = SACCADE_##of_dtype \
    }
#define LYING(of_name, of_index, of_dtype, how)                                        \
    {                                                                                  \
        .name = of_name, .index = of_index, .dtype = SACCADE_##of_dtype, .layout = how \
    }
#define LONGER(of_name, of_index, of_dtype, by)                                     \
    {                                                                               \
        .name = of_name, .index = of_index, .dtype = SACCADE_##of_dtype, .more = by \
    }

static const dense_case cases[] = {
    /* each width of a tile, and elements of 2, 4 and 1 bytes */
    {.problem = "b2 h4/2 q200 kv304 d64 bf16",
     .score = "score + t[h, q, kv]",
     .of = {TENSOR("t", "hqk", BF16)}},
    {.problem = "b2 h2 q200 kv304 d64 bf16",
     .score = "score + t[b, q, kv]",
     .of = {TENSOR("t", "bqk", F32)}},
    {.problem = "b1 h2 q200 kv304 d64 f16",
     .score = "score + t[h, q, kv] * 0.01",
     .of = {TENSOR("t", "hqk", I8)}},
    {.problem = "b1 h2 q200 kv304 d128 bf16",
     .score = "score + t[h, q, kv]",
     .of = {TENSOR("t", "hqk", F16)}},
    {.problem = "b1 h2 q200 kv304 d128 f16",
     .score = "score + t[q, kv]",
     .of = {TENSOR("t", "qk", F32)}},
    {.problem = "b1 h2 q200 kv304 d128 bf16",
     .score = "t[q, kv] ? score : -inf",
     .of = {TENSOR("t", "qk", BOOL)}},
    {.problem = "b1 h2 q130 kv208 d256 bf16",
     .score = "score + t[b, h, q, kv]",
     .of = {TENSOR("t", "bhqk", BF16)}},
    {.problem = "b1 h2 q130 kv208 d192 dv128 bf16",
     .score = "score + t[h, q, kv]",
     .of = {TENSOR("t", "hqk", F32)}},
    {.problem = "b3 h2 q200 kv304 d32 bf16",
     .score = "score + t[h, q, kv]",
     .of = {TENSOR("t", "hqk", BF16)}},
    {.problem = "b1 h2 q200 kv304 d96 bf16",
     .score = "score + t[h, q, kv]",
     .of = {LYING("t", "hqk", BF16, PADDED)}},
    /* queries side by side */
    {.problem = "b1 h2 q304 kv200 d64 bf16",
     .score = "score + t[h, kv, q]",
     .of = {TENSOR("t", "hkq", BF16)}},
    {.problem = "b1 h2 q304 kv200 d128 bf16",
     .score = "score + t[h, q, kv]",
     .of = {LYING("t", "hqk", F32, SWAPPED)}},
    {.problem = "b1 h2 q304 kv200 d64 bf16",
     .score = "t[kv, q] ? score : -inf",
     .of = {TENSOR("t", "kq", BOOL)}},
    {.problem = "b1 h2 q304 kv208 d256 f16",
     .score = "score * t[q, kv]",
     .of = {LYING("t", "qk", F16, SWAPPED)}},
    /* two and three at a time, each either way */
    {.problem = "b1 h2 q200 kv304 d64 bf16",
     .score = "score * t[h, q, kv] + u[kv, q]",
     .mask = "causal()",
     .of = {TENSOR("t", "hqk", BF16), TENSOR("u", "kq", F32)},
     .q_offset = 104,
     .has_block_mask = 1},
    {.problem = "b1 h2 q304 kv208 d128 bf16",
     .score = "score + t[h, kv, q] - u[kv, q]",
     .of = {TENSOR("t", "hkq", BF16), TENSOR("u", "kq", BF16)}},
    {.problem = "b2 h2 q200 kv304 d64 bf16",
     .score = "score + t[h, q, kv] + w[b, q, kv]",
     .mask = "u[q, kv]",
     .of = {TENSOR("t", "hqk", BF16), TENSOR("u", "qk", BOOL), TENSOR("w", "bqk", BF16)}},
    /* masks */
    {.problem = "b2 h2 q200 kv304 d64 bf16",
     .mask = "t[q, kv]",
     .of = {TENSOR("t", "qk", BOOL)}},
    {.problem = "b2 h2 q304 kv304 d128 bf16",
     .mask = "t[q, kv] || t[kv, q] && h > 0",
     .of = {TENSOR("t", "qk", BOOL)},
     .has_block_mask = 1},
    {.problem = "b2 h2 q200 kv304 d64 bf16",
     .mask = "t[b, q, kv] > 2 && q >= kv - 150",
     .of = {TENSOR("t", "bqk", I32)},
     .has_block_mask = 1},
    {.problem = "b2 h2 q208 kv304 d64 f16",
     .score = "20 * tanh(score / 20)",
     .mask = "t[kv, q]",
     .of = {TENSOR("t", "kq", BOOL)},
     .kv_len = 290},
    /* a table at indices that come as tiles; other indices of the head and the batch */
    {.problem = "b2 h4 q200 kv304 d64 bf16",
     .score = "score + u[h, t[q, kv]]",
     .of = {TENSOR("t", "qk", I32), TENSOR("u", "h8", F32)}},
    {.problem = "b4 h4 q200 kv304 d64 bf16",
     .score = "score + t[h / 2, q, kv] + u[i[b], q, kv]",
     .of = {TENSOR("t", "hqk", BF16), TENSOR("u", "bqk", BF16), TENSOR("i", "b", I32)}},
    /* larger than the run, smaller (reads are clamped), shared by heads, odd, shifted */
    {.problem = "b2 h2 q200 kv300 d64 bf16",
     .score = "score + t[h, q, kv]",
     .mask = "causal()",
     .of = {LONGER("t", "hqk", BF16, 20)},
     .q_offset = 7,
     .kv_len = 280},
    {.problem = "b2 h2 q200 kv304 d64 bf16",
     .score = "score + t[h, q, kv]",
     .of = {LONGER("t", "hqk", BF16, -16)}},
    {.problem = "b2 h4 q200 kv304 d64 bf16",
     .score = "score + t[h, q, kv]",
     .of = {LYING("t", "hqk", BF16, EXPANDED)}},
    {.problem = "b2 h4 q200 kv303 d64 bf16",
     .score = "score + t[h, q, kv]",
     .of = {TENSOR("t", "hqk", BF16)}},
    {.problem = "b2 h4 q200 kv304 d64 bf16",
     .score = "score + t[h, q, kv]",
     .of = {LYING("t", "hqk", BF16, ODD)}},
    {.problem = "b2 h4 q200 kv304 d64 bf16",
     .score = "score + t[h, q, kv + 1]",
     .of = {TENSOR("t", "hqk", BF16)}},
    /* NaN past the last query, which no mask hides */
    {.problem = "b2 h2 q200 kv304 d64 bf16",
     .score = "score + t[h, q, kv]",
     .of = {LONGER("t", "hqk", BF16, 16)}},
    {.problem = "b2 h2 q200 kv304 d128 bf16",
     .score = "score * t[h, q, kv]",
     .of = {LONGER("t", "hqk", BF16, 3)}},
    {.problem = "b2 h2 q200 kv300 d192 bf16",
     .score = "score + t[h, q, kv]",
     .of = {LONGER("t", "hqk", F16, 20)}},
    {.problem = "b2 h2 q200 kv304 d64 bf16",
     .score = "20 * tanh((score + t[h, q, kv]) / 20)",
     .of = {LONGER("t", "hqk", BF16, 16)}},
    {.problem = "b1 h2 q200 kv304 d64 bf16",
     .score = "score + log(200 - q) + t[q, kv]",
     .of = {TENSOR("t", "qk", BF16)}},
};
enum { CASES = sizeof cases / sizeof cases[0] };

static const dense_case shared_cases[] = {
    /* of keys: each width of a tile; of the batch and the head; bits and numbers */
    {.problem = "b2 h4/2 q330 kv500 d64 bf16",
     .score = "score + t[kv]",
     .of = {TENSOR("t", "k", F32)}},
    {.problem = "b2 h2 q330 kv500 d128 bf16",
     .score = "score * t[b, h, kv]",
     .mask = "causal()",
     .of = {TENSOR("t", "bhk", BF16)},
     .q_offset = 170,
     .has_block_mask = 1},
    {.problem = "b2 h2 q130 kv300 d256 f16",
     .score = "t[b, kv] ? score : -inf",
     .of = {TENSOR("t", "bk", BOOL)}},
    {.problem = "b1 h2 q300 kv300 d64 bf16",
     .score = "t[q] == t[kv] ? score : -inf",
     .of = {TENSOR("t", "k", I32)}},
    {.problem = "b2 h2 q300 kv300 d128 bf16",
     .score = "score + t[b, h, q] - t[b, h, kv]",
     .mask = "causal()",
     .of = {TENSOR("t", "bhk", F32)},
     .has_block_mask = 1},
    /* of diagonals: neighbours and blocks far apart, tails, shifted positions */
    {.problem = "b2 h4/2 q330 kv500 d64 bf16",
     .score = "score + t[h, q - kv + 499]",
     .of = {TENSOR("t", "hn", F32)}},
    {.problem = "b1 h2 q330 kv500 d128 f16",
     .score = "score + t[q - kv + 330, h]",
     .of = {TENSOR("t", "nh", F16)},
     .q_offset = 170,
     .kv_len = 470},
    {.problem = "b1 h2 q400 kv1100 d64 bf16",
     .score = "score + t[h, clamp(q - kv, -90, 90) + 90]",
     .mask = "kv < 100 || kv > 700 && q + 600 >= kv",
     .of = {TENSOR("t", "hn", BF16)},
     .has_block_mask = 1},
    {.problem = "b2 h2 q300 kv300 d192 dv128 bf16",
     .score = "t5_bias(t, 32, 128)",
     .of = {TENSOR("t", "Ph", F32)}},
    {.problem = "b1 h2 q700 kv700 d64 bf16",
     .score = "score - t[h] * t[h] * log(1 + abs(q - kv))",
     .mask = "causal() && q - kv < 100",
     .of = {TENSOR("t", "h", F32)},
     .has_block_mask = 1},
    {.problem = "b1 h2 q200 kv200 d80 bf16",
     .score = "(kv > q ? 0.5 : 0.25) * abs(q - kv) * 0.01 + score"},
    /* several, and beside tiles */
    {.problem = "b2 h2 q200 kv304 d64 bf16",
     .score = "score * t[h, kv] + exp(-0.01 * abs(q - kv)) * u[b, kv] + u[b, (q - kv) % 7]",
     .of = {TENSOR("t", "hk", BF16), TENSOR("u", "bk", F32)}},
    {.problem = "b2 h2 q200 kv304 d128 bf16",
     .score = "score + t[h, q - kv + 303] + u[q, kv] - w[b, kv]",
     .of = {TENSOR("t", "hn", F32), TENSOR("u", "qk", BF16), TENSOR("w", "bk", F32)}},
    /* offsets far from 0, that climb, and that are passed at once */
    {.problem = "b1 h2 q330 kv900 d64 bf16",
     .score = "score + (kv < 300 ? -1e9 : t[kv])",
     .of = {TENSOR("t", "k", F32)}},
    {.problem = "b1 h2 q330 kv900 d64 bf16",
     .score = "score + kv * 0.7 + t[kv]",
     .of = {TENSOR("t", "k", F32)}},
    {.problem = "b1 h2 q330 kv900 d128 bf16",
     .score = "score + (kv >= 600 && h > 0 ? 300.0 : 0.0) + t[kv]",
     .of = {TENSOR("t", "k", F32)}},
    {.problem = "b1 h2 q330 kv900 d64 bf16",
     .score = "kv < 500 ? -3e38 : score + t[kv]",
     .of = {TENSOR("t", "k", F32)}},
};
enum { SHARED_CASES = sizeof shared_cases / sizeof shared_cases[0] };

/* ---- tensors ---- */

typedef struct side {
    saccade_tensor t[TENSORS];
    saccade_binding bound[MOST];
    saccade_plan *plan;
    saccade_block_mask *blocks;
    void *memory[TENSORS + MOST + 1];
} side;

typedef struct trial {
    const dense_case *c;
    saccade_problem problem;
    saccade_mod *score, *mask;
    int n_bound;
    side here, there;
    size_t bytes[TENSORS + MOST];
} trial;

static uint64_t draw(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return *seed >> 33;
}

static void randomise(saccade_dtype dtype, void *data, size_t bytes, uint64_t seed)
{
    const size_t each = saccade_dtype_bytes(dtype);
    for (size_t i = 0; i < bytes / each; i++) {
        float x = -6;
        for (int k = 0; k < 12; k++)
            x += (float)draw(&seed) / 2147483648.0f;
        if (dtype == SACCADE_I32)
            ((int32_t *)data)[i] = (int32_t)(draw(&seed) % 9);
        else if (dtype == SACCADE_BOOL)
            ((uint8_t *)data)[i] = draw(&seed) % 8 < 5;
        else if (dtype == SACCADE_I8)
            ((uint8_t *)data)[i] = (uint8_t)draw(&seed);
        else if (dtype == SACCADE_F32)
            ((float *)data)[i] = x;
        else
            convert_from_f32(dtype, &x, (uint16_t *)data + i, 1);
    }
}

static int64_t size_of(const saccade_sizes *s, char letter, int more)
{
    switch (letter) {
    case 'b':
        return s->B;
    case 'h':
        return s->H;
    case 'q':
        return s->Q + more;
    case 'k':
        return s->KV + more;
    case 'n':
        return s->Q + s->KV;
    default:
        return letter - '0';
    }
}

/* Shape and strides of a capture; *count: elements of what it is part of. */
static saccade_tensor shape_of(const saccade_sizes *s, const captured *of, int64_t *count)
{
    saccade_tensor t = {.dtype = of->dtype, .rank = (int32_t)strlen(of->index)};
    const int swaps = of->layout == SWAPPED;
    int64_t step = 1;
    for (int32_t i = t.rank; i-- > 0;) {
        const int32_t d = swaps && i >= t.rank - 2 ? 2 * t.rank - 3 - i : i;
        t.shape[d] = size_of(s, of->index[d], of->more);
        t.stride[d] = i == 0 && of->layout == EXPANDED ? 0 : step;
        step *=
            t.shape[d] + (i == t.rank - 1 ? of->layout == PADDED ? 8 : of->layout == ODD : 0);
    }
    *count = step + 16;
    return t;
}

/* The same memory on the device. */
static saccade_tensor copy_there(trial *x, int i, const saccade_tensor *t)
{
    saccade_tensor copy = *t;
    void *to;
    assert_int_equal(saccade_device_alloc(0, x->bytes[i], &to, NULL), SACCADE_OK);
    assert_int_equal(saccade_device_copy(0, to, x->here.memory[i], x->bytes[i], NULL),
                     SACCADE_OK);
    x->there.memory[i] = to;
    copy.data = (char *)to + ((const char *)t->data - (const char *)x->here.memory[i]);
    copy.device = (saccade_device){SACCADE_CUDA, 0};
    return copy;
}

static void *make(trial *x, int i, saccade_dtype dtype, int64_t count)
{
    x->bytes[i] = (size_t)count * saccade_dtype_bytes(dtype);
    x->here.memory[i] = malloc(x->bytes[i]);
    assert_non_null(x->here.memory[i]);
    randomise(dtype, x->here.memory[i], x->bytes[i], 3 + (uint64_t)i);
    return x->here.memory[i];
}

/* Makes NaN of the elements whose last index is `first` or more, or the one before it `row`. */
static void poison(const saccade_tensor *t, int64_t row, int64_t first)
{
    const int32_t rank = t->rank;
    const float nan = NAN;
    int64_t others = 1;
    for (int32_t d = 0; d + 2 < rank; d++)
        others *= t->shape[d];
    for (int64_t i = 0; i < others * t->shape[rank - 2]; i++)
        for (int64_t j = 0; j < t->shape[rank - 1]; j++)
            if (i % t->shape[rank - 2] >= row || j >= first)
                convert_from_f32(t->dtype, &nan,
                                 (uint16_t *)t->data + i * t->stride[rank - 2] + j, 1);
}

static void make_tensors(trial *x)
{
    const saccade_sizes *s = &x->problem.sizes;
    const int64_t q[4] = {s->B, s->H, s->Q, s->D}, k[4] = {s->B, s->Hkv, s->KV, s->D};
    const int64_t v[4] = {s->B, s->Hkv, s->KV, s->Dv}, o[4] = {s->B, s->H, s->Q, s->Dv};
    const int64_t *const shapes[TENSORS] = {q, k, v, o, o, o, q, k, v};
    for (int i = 0; i < TENSORS; i++) {
        const saccade_dtype dtype = i == LSE ? SACCADE_F32 : x->problem.dtype;
        saccade_tensor *t = &x->here.t[i];
        int64_t count = 1;
        *t = saccade_tensor_of(NULL, dtype, i == LSE ? 3 : 4, shapes[i]);
        for (int32_t d = 0; d < t->rank; d++)
            count *= t->shape[d];
        t->data = make(x, i, dtype, count);
        x->there.t[i] = copy_there(x, i, t);
    }
    for (int i = 0; i < x->n_bound; i++) {
        const captured *of = &x->c->of[i];
        const size_t each = saccade_dtype_bytes(of->dtype);
        int64_t count;
        saccade_tensor t = shape_of(s, of, &count);
        t.data = (char *)make(x, TENSORS + i, of->dtype, count)
                 + (of->layout == PADDED ? 16 / each * each : 0);
        if (of->more > 0)
            poison(&t, s->Q + x->c->q_offset, x->c->kv_len ? x->c->kv_len : s->KV);
        x->here.bound[i] = (saccade_binding){of->name, t};
        x->there.bound[i] = (saccade_binding){of->name, copy_there(x, TENSORS + i, &t)};
    }
}

static void free_sides(trial *x)
{
    for (int i = 0; i < TENSORS + MOST + 1; i++) {
        free(x->here.memory[i]);
        saccade_device_free(0, x->there.memory[i]);
    }
    side *const both[2] = {&x->here, &x->there};
    for (int i = 0; i < 2; i++) {
        saccade_block_mask_destroy(both[i]->blocks);
        saccade_plan_destroy(both[i]->plan);
    }
}

/* ---- plans and runs ---- */

/* The text with the dtypes of the case's captures. */
static saccade_mod *bound_mod(const dense_case *c, saccade_kind kind, const char *text)
{
    saccade_binding known[MOST];
    int n = 0;
    for (; n < MOST && c->of[n].name; n++)
        known[n] = (saccade_binding){c->of[n].name, {.dtype = c->of[n].dtype}};
    return text ? case_mod_of(kind, text, known, n) : NULL;
}

static void open_trial(trial *x, const dense_case *c)
{
    memset(x, 0, sizeof *x);
    x->c = c;
    saccade_problem_init(&x->problem);
    problem_case(c->problem, &x->problem.sizes, &x->problem.dtype);
    x->problem.score = x->score = bound_mod(c, SACCADE_SCORE, c->score);
    x->problem.mask = x->mask = bound_mod(c, SACCADE_MASK, c->mask);
    while (x->n_bound < MOST && c->of[x->n_bound].name)
        x->n_bound++;
}

static void close_trial(trial *x)
{
    saccade_mod_destroy(x->score);
    saccade_mod_destroy(x->mask);
}

static void make_plan(trial *x, side *s, const char *backend)
{
    saccade_problem p = x->problem;
    saccade_error err = {0};
    int32_t offset = x->c->q_offset;
    const saccade_tensor at = saccade_tensor_of(&offset, SACCADE_I32, 0, NULL);
    const saccade_positions positions = {.size = sizeof positions, .q_offset = &at};
    const int reads = x->mask && saccade_mod_capture_count(x->mask) > 0;
    p.backend = backend;
    if (saccade_plan_create(NULL, &p, &s->plan, &err) != SACCADE_OK)
        fail_msg("%s: %s, %s", x->c->problem, err.where, err.message);
    if (!x->c->has_block_mask)
        return;
    if (saccade_block_mask_create(NULL, x->mask, &p.sizes, &positions,
                                  reads ? x->here.bound : NULL, reads ? x->n_bound : 0, NULL,
                                  &s->blocks, &err)
        || saccade_plan_prepare(s->plan, s->blocks, &err))
        fail_msg("block mask of %s: %s", x->c->mask, err.message);
}

static void *room_for(side *s, size_t bytes, int is_there)
{
    void **const room = &s->memory[TENSORS + MOST];
    const size_t whole = (bytes + 64) / 64 * 64;
    saccade_device_free(0, is_there ? *room : NULL);
    if (!is_there)
        free(*room);
    *room = is_there ? NULL : aligned_alloc(64, whole);
    if (is_there)
        assert_int_equal(saccade_device_alloc(0, whole, room, NULL), SACCADE_OK);
    return *room;
}

static void forward(trial *x, side *s, const saccade_positions *positions, int is_there)
{
    saccade_forward_args a;
    saccade_error err = {0};
    saccade_forward_args_init(&a);
    a.q = &s->t[Q], a.k = &s->t[K], a.v = &s->t[V];
    a.out = &s->t[OUT], a.lse = &s->t[LSE];
    a.positions = positions;
    a.block_mask = s->blocks;
    a.bindings = s->bound;
    a.n_bindings = x->n_bound;
    a.workspace_bytes = saccade_plan_workspace(s->plan, &x->problem.sizes);
    a.workspace = room_for(s, a.workspace_bytes, is_there);
    if (saccade_forward(s->plan, &a, &err) || (is_there && saccade_device_synchronize(0, &err)))
        fail_msg("%s, %s: %s, %s", x->c->problem, x->c->score, err.where, err.message);
}

static void backward(trial *x, side *s, const saccade_positions *positions, int is_there)
{
    saccade_backward_args a;
    saccade_error err = {0};
    saccade_backward_args_init(&a);
    a.q = &s->t[Q], a.k = &s->t[K], a.v = &s->t[V];
    a.out = &s->t[OUT], a.lse = &s->t[LSE], a.d_out = &s->t[D_OUT];
    a.d_q = &s->t[DQ], a.d_k = &s->t[DK], a.d_v = &s->t[DV];
    a.positions = positions;
    a.block_mask = s->blocks;
    a.bindings = s->bound;
    a.n_bindings = x->n_bound;
    a.workspace_bytes = saccade_plan_backward_workspace(s->plan, &x->problem.sizes);
    a.workspace = room_for(s, a.workspace_bytes, is_there);
    if (saccade_backward(s->plan, &a, &err)
        || (is_there && saccade_device_synchronize(0, &err)))
        fail_msg("backward of %s, %s: %s, %s", x->c->problem, x->c->score, err.where,
                 err.message);
}

/* And backward, where the plan has it. */
static void run(trial *x, side *s, int is_there)
{
    int32_t offset = x->c->q_offset, length = x->c->kv_len;
    const saccade_tensor at = saccade_tensor_of(&offset, SACCADE_I32, 0, NULL);
    const saccade_tensor keys = saccade_tensor_of(&length, SACCADE_I32, 0, NULL);
    const saccade_positions positions = {
        .size = sizeof positions, .q_offset = &at, .kv_len = length ? &keys : NULL};
    forward(x, s, &positions, is_there);
    if (x->problem.gradients)
        backward(x, s, &positions, is_there);
}

static float *fetch(const trial *x, int which)
{
    const saccade_dtype dtype = x->here.t[which].dtype;
    const size_t bytes = x->bytes[which], n = bytes / saccade_dtype_bytes(dtype);
    void *host = malloc(bytes);
    float *as_f32 = malloc(n * sizeof *as_f32);
    assert_true(host && as_f32);
    assert_int_equal(saccade_device_copy(0, host, x->there.t[which].data, bytes, NULL),
                     SACCADE_OK);
    convert_to_f32(dtype, host, as_f32, (int64_t)n);
    free(host);
    return as_f32;
}

/* Both are rounded to the dtype, and so are weights on the device. */
static void compare(const trial *x, int which, const float *got)
{
    const saccade_dtype dtype = x->here.t[which].dtype;
    const size_t n = x->bytes[which] / saccade_dtype_bytes(dtype);
    const double eps = x->problem.dtype == SACCADE_BF16 ? 0x1p-8 : 0x1p-11;
    double error = 0, norm = 0;
    float *want = malloc(n * sizeof *want);
    assert_non_null(want);
    convert_to_f32(dtype, x->here.t[which].data, want, (int64_t)n);
    for (size_t i = 0; i < n; i++) {
        if (got[i] == want[i])
            continue; /* rows without a key: -inf */
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += (double)want[i] * want[i];
    }
    free(want);
    if (!(sqrt(error) <= 2 * eps * sqrt(norm)))
        fail_msg("%s, score %s, mask %s: %s has relative error %.3g", x->c->problem,
                 x->c->score ? x->c->score : "none", x->c->mask ? x->c->mask : "none",
                 names[which], sqrt(error / norm));
}

/* Results are right, and the same the second time. */
static void results_hold(trial *x, float *(*first)[TENSORS])
{
    static const int results[] = {OUT, LSE, DQ, DK, DV};
    for (int i = 0; i < (x->problem.gradients ? 5 : 2); i++) {
        const int which = results[i];
        const size_t each = saccade_dtype_bytes(x->here.t[which].dtype);
        float *got = fetch(x, which);
        compare(x, which, got);
        if ((*first)[which])
            assert_memory_equal(got, (*first)[which], x->bytes[which] / each * sizeof *got);
        free((*first)[which]);
        (*first)[which] = got;
    }
}

static void hold_with(const dense_case *c, uint32_t gradients)
{
    trial x;
    float *first[TENSORS] = {NULL};
    open_trial(&x, c);
    x.problem.gradients = gradients;
    make_tensors(&x);
    make_plan(&x, &x.here, "ref");
    make_plan(&x, &x.there, "cuda");
    run(&x, &x.here, 0);
    for (int round = 0; round < 2; round++) {
        run(&x, &x.there, 1);
        results_hold(&x, &first);
    }
    for (int i = 0; i < TENSORS; i++)
        free(first[i]);
    free_sides(&x);
    close_trial(&x);
}

static void holds(const dense_case *c)
{
    hold_with(c, 0);
}

static void gradients_hold(const dense_case *c)
{
    hold_with(c, ALL_GRADIENTS);
}

static void all_hold(void **state)
{
    (void)state;
    if (!has_device())
        skip();
    for (int i = 0; i < CASES; i++)
        holds(&cases[i]);
}

/* By both kinds of tiles. */
static void shares_hold(const dense_case *c)
{
    holds(c);
    setenv("SACCADE_CUDA_TILES", "small", 1);
    holds(c);
    setenv("SACCADE_CUDA_TILES", "large", 1);
}

static void all_shared_hold(void **state)
{
    (void)state;
    if (!has_device())
        skip();
    for (int i = 0; i < SHARED_CASES; i++)
        shares_hold(&shared_cases[i]);
}

static void all_gradients_hold(void **state)
{
    (void)state;
    if (!has_device())
        skip();
    for (int i = 0; i < CASES; i++)
        gradients_hold(&cases[i]);
}

/* Every way of loading and reading once: what tools/cuda-sanitize runs. */
static void few_of_each(void **state)
{
    static const int few[] = {0, 2, 4, 11, 12, 14, 16, 18}, few_shared[] = {1, 7, 11, 12};
    static const int backward[] = {0, 1, 3, 12, 17, 20};
    (void)state;
    if (!has_device())
        skip();
    for (size_t i = 0; i < sizeof few / sizeof few[0]; i++)
        holds(&cases[few[i]]);
    for (size_t i = 0; i < sizeof few_shared / sizeof few_shared[0]; i++)
        shares_hold(&shared_cases[few_shared[i]]);
    for (size_t i = 0; i < sizeof backward / sizeof backward[0]; i++)
        gradients_hold(&cases[backward[i]]);
}

/* ---- without a GPU ---- */

/* A program of a case in its first form, without a device: it neither spills nor waits. */
static void compile_one(const dense_case *c, int is_ragged, cu_program which)
{
    trial x;
    saccade_error err = {0};
    cu_tile plain;
    const int is_backward = which == CU_BWD_DENSE;
    open_trial(&x, c);
    x.problem.ragged = is_ragged;
    x.problem.gradients = is_backward ? ALL_GRADIENTS : 0;
    make_plan(&x, &x.here, "cpu"); /* a derived problem */
    const plan_problem *p = &x.here.plan->problem;
    cu_state s = {.family = CU_SM90};
    cu_loaded *program = &s.programs[which];
    strbuf text;
    strbuf_init(&text, 0);
    snprintf(s.arch, sizeof s.arch, "sm_90a");
    assert_int_equal(cu_emit_mod(p, &text, &s.facts, &err), SACCADE_OK);
    s.mod_text = strbuf_steal(&text);
    if (is_backward)
        assert_int_equal(cu_backward_emit(&s, p, &x.here.plan->arena, &err), SACCADE_OK);
    assert_true(cu_program_kinds[which].choose(&s, p, 0, &program->form));
    assert_true(
        cu_tile_choice(CU_SM90, (int)p->sizes.D, (int)p->sizes.Dv, p->dtype, 0, &plain));
    if (x.n_bound == 1 && which != CU_SMALL && !is_backward) { /* as large as without */
        assert_int_equal(program->form.tile.keys, plain.keys);
        assert_int_equal(program->form.tile.groups, plain.groups);
    }
    if (cu_compile_instance(&s, p, which, &program->form, &program->image, &err)) {
        if (!strstr(err.message, "NVRTC") || strstr(err.message, "NVRTC fails"))
            fail_msg("%s", err.message);
        print_message("no NVRTC on this machine: nothing compiled\n");
    } else {
        assert_true(program->image.report.spill_bytes <= cu_program_kinds[which].spill_most);
        assert_false(program->image.report.is_serialised);
    }
    free(s.mod_text);
    free(s.backward_text);
    cu_free_programs(&s);
    saccade_block_mask_destroy(x.here.blocks);
    saccade_plan_destroy(x.here.plan);
    close_trial(&x);
}

static void compile_only(void **state)
{
    static const int few[] = {0, 3, 6, 16}, few_shared[] = {5, 3, 8, 9};
    static const int backward[] = {0, 3, 1, 17};
    const int n = is_short_run() ? 2 : (int)(sizeof few / sizeof few[0]);
    (void)state;
    for (int i = 0; i < n; i++) {
        compile_one(&cases[few[i]], 0, CU_DENSE);
        compile_one(&shared_cases[few_shared[i]], 0, CU_MAIN);
        compile_one(&cases[backward[i]], 0, CU_BWD_DENSE);
    }
    compile_one(&shared_cases[5], 1, CU_MAIN);
    compile_one(&shared_cases[9], 0, CU_SMALL);
    compile_one(&shared_cases[0], 0, CU_SMALL);
}

/* Which values scores share: what is cheap, or one read in a row's own way, is none of them. */
static void values_that_are_shared(void **state)
{
    static const struct {
        const char *score;
        int keys, diagonals, rows; /* rows: in backward */
    } list[] = {
        {"score + t[kv]", 1, 0, 0},
        {"score + t[kv] * 2 - t[b * h + kv]", 2, 0, 0},
        {"score + t[h] * (kv - q)", 0, 0, 0},
        {"score + t[q - kv]", 0, 1, 0},
        {"score + t[h] * t[2 * (q - kv) + 7]", 0, 1, 0},
        {"score + t[2 * q - kv]", 0, 0, 0},
        {"score + t[q] - t[kv]", 1, 0, 1},
        {"score + t[q] * t[kv] + exp(0.1 * abs(kv - q))", 1, 1, 1},
        {"score + log(1 + abs(q - kv)) * (kv > q ? 0.5 : t[h])", 0, 1, 0},
        {"score + t[(kv - q) % 9] + t[kv % 9] + t[q * kv % 9]", 1, 1, 0},
        {"score * t[min(q, 3)]", 0, 0, 1},
        {"t[kv]", 1, 0, 0},
        {"score * score", 0, 0, 0},
    };
    const dense_case tensor = {.of = {TENSOR("t", "k", F32)}};
    (void)state;
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        saccade_error err = {0};
        saccade_plan *plan;
        saccade_problem p;
        cu_mod_text forward, backward;
        strbuf text;
        arena scratch;
        saccade_problem_init(&p);
        problem_case("b2 h2 q300 kv300 d64 bf16", &p.sizes, &p.dtype);
        saccade_mod *score = bound_mod(&tensor, SACCADE_SCORE, list[i].score);
        p.score = score;
        p.backend = "cpu";
        if (saccade_plan_create(NULL, &p, &plan, &err) != SACCADE_OK)
            fail_msg("%s: %s", list[i].score, err.message);
        strbuf_init(&text, 0);
        arena_init(&scratch);
        assert_int_equal(cu_emit_mod(&plan->problem, &text, &forward, &err), SACCADE_OK);
        assert_int_equal(cu_emit_backward_mod(&plan->problem, &scratch, &text, &backward, &err),
                         SACCADE_OK);
        const cu_shares *f = &forward.shares, *b = &backward.shares;
        if (f->n_keys != list[i].keys || f->n_diagonals != list[i].diagonals || f->n_rows
            || b->n_rows != list[i].rows || b->n_keys != list[i].keys
            || b->n_diagonals != list[i].diagonals)
            fail_msg("%s shares %d, %d, %d and %d, %d, %d values of rows, keys and diagonals",
                     list[i].score, f->n_rows, f->n_keys, f->n_diagonals, b->n_rows, b->n_keys,
                     b->n_diagonals);
        arena_free(&scratch);
        strbuf_free(&text);
        saccade_plan_destroy(plan);
        saccade_mod_destroy(score);
    }
}

/* Every form of whatever reads holds whole lines, and fits. */
static void forms_hold_whole_lines(void **state)
{
    static const int bytes[] = {1, 2, 4};
    int n = 0;
    (void)state;
    for (int D = 16; D <= 256; D += 16)
        for (int i = 0; i < 27; i++)
            for (int rung = 0; rung < 5; rung++) {
                cu_state s = {.family = CU_SM90, .arch = "sm_90a", .facts.n_dense = 1 + i % 3};
                plan_problem p = {.dtype = SACCADE_BF16, .sizes = {.D = D, .Dv = D}};
                cu_form form;
                for (int r = 0; r < 3; r++)
                    s.facts.dense[r].bytes = bytes[(i / 3 + r * (i / 9)) % 3];
                if (!cu_program_kinds[CU_DENSE].choose(&s, &p, rung, &form))
                    break;
                assert_true(cu_shared_bytes(&form, &s.facts, &p) <= cu_shared_most(90));
                for (int r = 0; r < s.facts.n_dense; r++) {
                    const int row = form.tile.keys * s.facts.dense[r].bytes;
                    assert_int_equal(row % CU_DENSE_ROW(row), 0);
                }
                n++;
            }
    assert_true(n > 500);
}

/* Which runs take tiles: all positions within, and strides and addresses that copies take. */
static void runs_that_take_tiles(void **state)
{
    int32_t offset = 0;
    cu_state s = {.facts = {.n_dense = 1, .n_dense_score = 1}};
    saccade_plan plan = {.state = &s};
    saccade_tensor t =
        saccade_tensor_of((void *)4096, SACCADE_BF16, 3, (const int64_t[3]){4, 200, 304});
    const saccade_tensor as_it_is = t, at = saccade_tensor_of(&offset, SACCADE_I32, 0, NULL);
    plan_run run = {.sizes = {.B = 2, .H = 4, .Hkv = 4, .Q = 200, .KV = 304, .D = 64, .Dv = 64},
                    .score_env = {.tensors = &t}};
    (void)state;
    s.facts.dense[0] = (cu_dense){.rank = 3, .bytes = 2, .q = 1, .kv = 2};
    assert_true(run_takes_dense(&plan, &run, CU_DENSE));
    t.stride[0] = 0; /* shared by heads */
    assert_true(run_takes_dense(&plan, &run, CU_DENSE));
    t.stride[0] = 200 * 304 + 4;
    assert_false(run_takes_dense(&plan, &run, CU_DENSE));
    t.shape[0] = 1; /* a stride that makes no difference */
    assert_true(run_takes_dense(&plan, &run, CU_DENSE));
    run.sizes.Q = t.shape[1] = 1;
    t.stride[1] = 305;
    assert_true(run_takes_dense(&plan, &run, CU_DENSE));
    run.sizes.Q = 200;
    t = as_it_is;
    t.stride[1] = 0; /* shared by queries */
    assert_false(run_takes_dense(&plan, &run, CU_DENSE));
    t.stride[1] = 305;
    assert_false(run_takes_dense(&plan, &run, CU_DENSE));
    t = as_it_is;
    t.data = (void *)4098;
    assert_false(run_takes_dense(&plan, &run, CU_DENSE));
    t = as_it_is;
    t.stride[2] = 2;
    assert_false(run_takes_dense(&plan, &run, CU_DENSE));
    t.stride[1] = 1, t.stride[2] = 200; /* queries side by side */
    assert_true(run_takes_dense(&plan, &run, CU_DENSE));
    t.stride[2] = 204;
    assert_false(run_takes_dense(&plan, &run, CU_DENSE));
    t = as_it_is;
    run.sizes.KV = 305; /* the last key is clamped */
    assert_false(run_takes_dense(&plan, &run, CU_DENSE));
    run.sizes.KV = 304;
    run.positions.q_offset = at;
    assert_true(run_takes_dense(&plan, &run, CU_DENSE));
    offset = 1;
    assert_false(run_takes_dense(&plan, &run, CU_DENSE));
    offset = -1;
    assert_false(run_takes_dense(&plan, &run, CU_DENSE));
    offset = 0;
    run.positions.q_offset.device.kind = SACCADE_CUDA; /* not to be read here */
    assert_false(run_takes_dense(&plan, &run, CU_DENSE));
}

int main(int argc, char **argv)
{
    char folder[] = "/tmp/saccade-cuda-XXXXXX";
    if (!getenv("SACCADE_CACHE_DIR") && mkdtemp(folder))
        setenv("SACCADE_CACHE_DIR", folder, 1);
    setenv("SACCADE_CUDA_TILES", "large", 1); /* small ones would take what walks few keys */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(compile_only),
        cmocka_unit_test(values_that_are_shared),
        cmocka_unit_test(forms_hold_whole_lines),
        cmocka_unit_test(runs_that_take_tiles),
        cmocka_unit_test(few_of_each),
        cmocka_unit_test(all_hold),
        cmocka_unit_test(all_gradients_hold),
        cmocka_unit_test(all_shared_hold),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
