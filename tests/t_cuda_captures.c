/* Gradients of captures on CUDA: every way of summing (pass/scatter.h) against the reference,
 * twice, bit for bit. Without a GPU the programs are compiled for sm_90a and sm_80 alone. */
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

enum { MOST = 3, CAPTURED = 4 };
enum { Q, K, V, OUT, LSE, D_OUT, DQ, DK, DV, TENSORS };

/* A float capture (or an int one, of values below `below`), random. */
typedef struct captured {
    const char *name;
    int32_t rank, below;
    int64_t shape[4];
} captured;

typedef struct capture_case {
    const char *problem, *score, *mask;
    captured of[CAPTURED];
    const char *wanted[MOST];
    int32_t q_offset, kv_len;
    int without_qkv, is_added, is_poisoned; /* NaN in K, see BEHIND */
} capture_case;

/* Each sixteenth key is left to positions behind the last query, of which a block has some. */
#define BEHIND "kv % 16 == 7 ? q >= Q : q >= kv"

static const capture_case cases[] = {
    /* a sum for each head */
    {.problem = "b2 h4/2 q150 kv200 d64 bf16",
     .score = "score * t[h]",
     .mask = "causal()",
     .of = {{"t", 1, 0, {4}}},
     .wanted = {"t"}},
    /* rows and columns, shared by heads and batches */
    {.problem = "b2 h2 q130 kv190 d128 f16",
     .score = "score * t[q] + u[h, kv] * u[h, kv]",
     .of = {{"t", 1, 0, {130}}, {"u", 2, 0, {2, 190}}},
     .wanted = {"t", "u"}},
    /* diagonals; clamped at both ends */
    {.problem = "b1 h4/2 q200 kv230 d64 bf16",
     .score = "score + t[h, q - kv + 229]",
     .mask = "q >= kv - 100",
     .of = {{"t", 2, 0, {4, 429}}},
     .wanted = {"t"}},
    {.problem = "b2 h2 q200 kv230 d64 bf16",
     .score = "score + t[clamp(q - kv, -20, 20) + 10]",
     .of = {{"t", 1, 0, {25}}},
     .wanted = {"t"},
     .is_added = 1},
    /* an element for each score: of all heads, shared by batches, shared by all */
    {.problem = "b2 h2 q100 kv150 d64 bf16",
     .score = "score + t[b, h, q, kv]",
     .of = {{"t", 4, 0, {2, 2, 100, 150}}},
     .wanted = {"t"}},
    {.problem = "b2 h2 q100 kv150 d80 bf16",
     .score = "score + t[h, q, kv]",
     .mask = "causal()",
     .of = {{"t", 3, 0, {2, 100, 150}}},
     .wanted = {"t"}},
    {.problem = "b2 h2 q100 kv150 d64 bf16",
     .score = "score * t[q, kv]",
     .kv_len = 133,
     .of = {{"t", 2, 0, {100, 150}}},
     .wanted = {"t"},
     .is_added = 1},
    /* the same where indices may leave the tensor: as sums */
    {.problem = "b1 h2 q100 kv150 d64 bf16",
     .score = "score + t[h, q, kv]",
     .of = {{"t", 3, 0, {2, 80, 90}}},
     .wanted = {"t"}},
    {.problem = "b1 h2 q100 kv150 d64 bf16",
     .score = "score + t[q - 7, kv]",
     .q_offset = 7,
     .of = {{"t", 2, 0, {100, 150}}},
     .wanted = {"t"}},
    /* made by backward's tiles together: a scale of heads that share keys, diagonals of many
     * blocks and of a factor, elements */
    {.problem = "b1 h4/2 q330 kv220 d64 bf16",
     .score = "score * (0.5 * t[h]) + u[h, q - kv + 219]",
     .mask = "q >= kv - 150",
     .of = {{"t", 1, 0, {4}}, {"u", 2, 0, {4, 549}}},
     .wanted = {"t", "u"}},
    {.problem = "b1 h2 q400 kv150 d128 f16",
     .score = "score + t[h] * (kv - q) * 0.01 + u[clamp(q - kv, -16, 15) + 16]",
     .mask = "causal() && q - kv < 300 || kv < 10",
     .of = {{"t", 1, 0, {2}}, {"u", 1, 0, {32}}},
     .wanted = {"t", "u"}},
    {.problem = "b2 h1 q130 kv200 d64 bf16",
     .score = "20 * tanh((score + t[h, q - kv + 199]) / 20) + u[b, h, q, kv]",
     .kv_len = 190,
     .of = {{"t", 2, 0, {1, 329}}, {"u", 4, 0, {2, 1, 130, 200}}},
     .wanted = {"t", "u"}},
    {.problem = "b1 h2 q130 kv131 d80 bf16",
     .score = "score * s + t[h, q, kv] + u[b, kv, q] * u[b, kv, q]",
     .of = {{"s", 0, 0, {0}}, {"t", 3, 0, {2, 130, 131}}, {"u", 3, 0, {1, 131, 130}}},
     .wanted = {"t", "s", "u"}},
    /* two reads of one dense capture */
    {.problem = "b1 h2 q100 kv150 d64 bf16",
     .score = "score + t[h, q, kv] * t[h, kv % 100, q]",
     .of = {{"t", 3, 0, {2, 100, 150}}},
     .wanted = {"t"}},
    /* a third index that is no line: not along lines, each score adds for itself */
    {.problem = "b1 h2 q70 kv90 d64 bf16",
     .score = "score + t[q, kv, (q + kv) % 2]",
     .of = {{"t", 3, 0, {70, 90, 2}}},
     .wanted = {"t"}},
    /* anything: gathers, two reads of one tensor, a number */
    {.problem = "b1 h2 q130 kv170 d64 bf16",
     .score = "score + t[i[q], j[kv]]",
     .of = {{"t", 2, 0, {6, 9}}, {"i", 1, 6, {130}}, {"j", 1, 9, {170}}},
     .wanted = {"t"}},
    {.problem = "b1 h2 q130 kv170 d256 bf16",
     .score = "score + t[q] * t[kv] * s",
     .mask = "causal()",
     .of = {{"t", 1, 0, {170}}, {"s", 0, 0, {0}}},
     .wanted = {"t", "s"}},
    {.problem = "b1 h2 q70 kv90 d33 dv20 f16",
     .score = "c * tanh(score / c) + t[h]*score",
     .of = {{"c", 0, 0, {0}}, {"t", 1, 0, {2}}},
     .wanted = {"c", "t"},
     .without_qkv = 1},
    /* tables: of queries, and, over more elements, of the CTA: with copies, alone on a
     * multiprocessor, beside another; of the head, read twice */
    {.problem = "b2 h4/2 q130 kv170 d64 bf16",
     .score = "score + t[h, i[q, kv]] * 2 + u[b, i[kv, q]]",
     .mask = "q >= kv - 100",
     .of = {{"t", 2, 0, {4, 12}}, {"i", 2, 12, {170, 170}}, {"u", 2, 0, {2, 12}}},
     .wanted = {"t", "u"},
     .is_added = 1},
    {.problem = "b2 h2 q130 kv170 d64 bf16",
     .score = "20 * tanh((score + t[i[q], j[kv]]) / 20)",
     .of = {{"t", 2, 0, {17, 19}}, {"i", 1, 17, {130}}, {"j", 1, 19, {170}}},
     .wanted = {"t"}},
    {.problem = "b1 h2 q130 kv170 d128 bf16",
     .score = "score + t[i[q], j[kv]]",
     .kv_len = 160,
     .of = {{"t", 2, 0, {50, 60}}, {"i", 1, 50, {130}}, {"j", 1, 60, {170}}},
     .wanted = {"t"}},
    {.problem = "b1 h2 q130 kv170 d64 bf16",
     .score = "score + t[i[q], h, i[kv] + 1] + t[i[kv] % 9, h, i[q] / 2]",
     .of = {{"t", 3, 0, {70, 2, 110}}, {"i", 1, 109, {170}}},
     .wanted = {"t"}},
    {.problem = "b1 h1 q70 kv4300 d64 bf16",
     .score = "score + t[h, i[kv], i[q] / 50]",
     .of = {{"t", 3, 0, {1, 109, 3}}, {"i", 1, 109, {4300}}},
     .wanted = {"t"}},
    {.problem = "b1 h2 q130 kv170 d64 f16",
     .score = "score + t[i[q], i[kv]]",
     .mask = "causal()",
     .of = {{"t", 2, 0, {110, 110}}, {"i", 1, 109, {170}}},
     .wanted = {"t"}},
    {.problem = "b1 h2 q130 kv170 d64 bf16",
     .score = "score + t[h, i[q, kv]] + u[j[kv, q]]",
     .of = {{"t", 2, 0, {2, 400}},
            {"i", 2, 400, {170, 170}},
            {"u", 1, 0, {900}},
            {"j", 2, 900, {170, 170}}},
     .wanted = {"t", "u"}},
    {.problem = "b2 h2 q130 kv170 d64 bf16",
     .score = "20 * tanh((score + t[i[q, kv]]) / 20)",
     .mask = "q >= kv - 100",
     .of = {{"t", 1, 0, {4500}}, {"i", 2, 4500, {170, 170}}},
     .wanted = {"t"},
     .is_added = 1},
    /* a line in q - kv of the head: shared heads and masks, beside a scale, shared by batches,
     * of all heads */
    {.problem = "b1 h4/2 q330 kv220 d64 bf16",
     .score = "score + t[h] * (kv - q) * 0.01",
     .mask = "q >= kv - 150",
     .kv_len = 210,
     .q_offset = 30,
     .of = {{"t", 1, 0, {4}}},
     .wanted = {"t"}},
    {.problem = "b2 h2 q330 kv420 d128 bf16",
     .score = "score * s[h] + t[h] * (0.25 - (q - kv) / 64.0) + t[h]",
     .mask = "causal()",
     .of = {{"t", 1, 0, {2}}, {"s", 1, 0, {2}}},
     .wanted = {"t", "s"},
     .is_added = 1},
    {.problem = "b2 h2 q200 kv460 d64 f16",
     .score = "score + t * (q - kv) * 0.01 + u[b, h] * float(kv % 3)",
     .of = {{"t", 0, 0, {0}}, {"u", 2, 0, {2, 2}}},
     .wanted = {"t", "u"}},
    /* queries past the last: along a diagonal, and over a column */
    {.problem = "b1 h2 q130 kv150 d64 bf16",
     .score = "score + t[h, q - kv + 149]",
     .mask = BEHIND,
     .of = {{"t", 2, 0, {2, 279}}},
     .wanted = {"t"},
     .is_poisoned = 1},
    {.problem = "b1 h2 q100 kv120 d64 bf16",
     .score = "score + t[h, kv]",
     .mask = BEHIND,
     .of = {{"t", 2, 0, {2, 120}}},
     .wanted = {"t"},
     .is_poisoned = 1},
};
/* More reads than a launch takes: a network of learned weights over distances, whose captures
 * are read once for each of its units; and tables by heads, rows, columns and diagonals. */
static const capture_case many[] = {
    {.problem = "b2 h4/2 q150 kv130 d64 bf16",
     .score = "score + sum(i, 7, u[h, i] * max(w[i] * abs(q - kv) * 0.01 + c[i], 0.0)) * 0.1",
     .mask = "causal()",
     .of = {{"u", 2, 0, {4, 7}}, {"w", 1, 0, {7}}, {"c", 1, 0, {7}}},
     .wanted = {"u", "w", "c"}},
    {.problem = "b1 h2 q130 kv150 d128 bf16",
     .score = "score + sum(i, 4, a[i, h] + b_[i, q] * c[i, kv] + a[i, q - kv + 149])",
     .of = {{"a", 2, 0, {4, 279}}, {"b_", 2, 0, {4, 130}}, {"c", 2, 0, {4, 150}}},
     .wanted = {"a", "b_", "c"}},
};
enum { MANY = sizeof many / sizeof many[0] };

/* Elements that batches or heads share, over several blocks of queries and of keys. */
static const capture_case dense[] = {
    {.problem = "b3 h4/2 q200 kv333 d64 bf16",
     .score = "score + t[h, q, kv]",
     .mask = "q >= kv - 100",
     .of = {{"t", 3, 0, {4, 200, 333}}},
     .wanted = {"t"}},
    /* turned, and a tensor that is larger than what is read */
    {.problem = "b2 h4 q150 kv300 d32 bf16",
     .score = "score + t[kv, q]",
     .kv_len = 290,
     .of = {{"t", 2, 0, {310, 150}}},
     .wanted = {"t"},
     .is_added = 1},
    {.problem = "b2 h4 q150 kv300 d32 bf16",
     .score = "score + t[kv, q]",
     .mask = "q + 5 >= kv && kv % 7 != 3",
     .of = {{"t", 2, 0, {310, 151}}},
     .wanted = {"t"}},
    /* heads and batches that read others in between */
    {.problem = "b2 h4 q130 kv270 d128 f16",
     .score = "score + 2 * t[h / 2, q, kv]",
     .mask = "q >= kv && q - kv < 70",
     .of = {{"t", 3, 0, {2, 130, 270}}},
     .wanted = {"t"}},
    {.problem = "b5 h2 q100 kv150 d64 bf16",
     .score = "score + t[i[b], q, kv]",
     .of = {{"t", 3, 0, {3, 100, 150}}, {"i", 1, 3, {5}}},
     .wanted = {"t"}},
    /* two dense tensors beside a scale of each head; a mask by head */
    {.problem = "b2 h3 q140 kv160 d64 bf16",
     .score = "20 * tanh((score * w[h] + t[b, q, kv]) / 20) + u[h, q, kv]",
     .mask = "h == 1 ? q >= kv : kv >= q + 20",
     .of = {{"t", 3, 0, {2, 140, 160}}, {"u", 3, 0, {3, 140, 160}}, {"w", 1, 0, {3}}},
     .wanted = {"t", "u", "w"}},
    {.problem = "b2 h2 q70 kv200 d256 bf16",
     .score = "score + t[q, kv]",
     .mask = "causal()",
     .of = {{"t", 2, 0, {70, 200}}},
     .wanted = {"t"}},
    /* by parts of the batches, as windows of images are: beside a mask of some, and of 16 bits
     * that are added to */
    {.problem = "b600 h2 q30 kv40 d32 bf16",
     .score = "score + t[h, q, kv] + w[b % 3, q, kv]",
     .of = {{"t", 3, 0, {2, 30, 40}}, {"w", 3, 0, {3, 30, 40}}},
     .wanted = {"t"}},
    {.problem = "b300 h3 q20 kv40 d32 f16",
     .score = "score + t[q, kv]",
     .mask = "q >= kv || b % 2 == 0",
     .of = {{"t", 2, 0, {25, 44}}},
     .wanted = {"t"},
     .is_added = 1},
    {.problem = "b90 h3 q49 kv49 d32 bf16",
     .score = "score + t[h, q, kv]",
     .of = {{"t", 3, 0, {3, 49, 49}}},
     .wanted = {"t"}},
    /* several tiles of 128 x 128, of which a mask leaves parts; NaN where it hides keys */
    {.problem = "b2 h4/2 q260 kv390 d80 bf16",
     .score = "score * 0.5 + t[q, kv] * t[q, kv]",
     .mask = "q / 96 == kv / 96 || kv < 20",
     .of = {{"t", 2, 0, {260, 390}}},
     .wanted = {"t"}},
    {.problem = "b3 h2 q130 kv150 d64 bf16",
     .score = "score + t[h, q, kv]",
     .mask = BEHIND,
     .of = {{"t", 3, 0, {2, 130, 150}}},
     .wanted = {"t"},
     .is_poisoned = 1},
    /* more loads than are kept */
    {.problem = "b2 h2 q70 kv90 d64 bf16",
     .score = "score + t[q, kv] * u[q, kv] + i[q, kv] * 0.1 + t[kv, q]",
     .of = {{"t", 2, 0, {90, 90}}, {"u", 2, 0, {90, 90}}, {"i", 2, 5, {90, 90}}},
     .wanted = {"u"}},
    /* slanted: of each batch and head, shared, and where it leads out */
    {.problem = "b2 h2 q130 kv150 d64 bf16",
     .score = "score + t[b, h, q, kv - q + 129]",
     .mask = "q + 20 >= kv",
     .of = {{"t", 4, 0, {2, 2, 130, 279}}},
     .wanted = {"t"}},
    {.problem = "b2 h2 q130 kv150 d64 bf16",
     .score = "score + t[h, q, kv - q + 130]",
     .of = {{"t", 3, 0, {2, 130, 281}}},
     .wanted = {"t"}},
    {.problem = "b2 h2 q130 kv150 d64 bf16",
     .score = "score + t[h, q, kv - q + n + 90]",
     .of = {{"t", 3, 0, {2, 130, 200}}, {"n", 0, 1, {0}}},
     .wanted = {"t"}},
    /* of each head, turned: by tiles, or by the kernel of all other reads */
    {.problem = "b1 h2 q130 kv131 d64 bf16",
     .score = "score + t[h, kv, q]",
     .mask = "causal()",
     .of = {{"t", 3, 0, {2, 131, 130}}},
     .wanted = {"t"}},
};
enum { DENSE = sizeof dense / sizeof dense[0] };

/* Beside a load by the score, which is not kept; where that rounds depends on the back end. */
static const capture_case by_score = {.problem = "b3 h2 q70 kv90 d64 f16",
                                      .score = "score + t[q, kv] + u[clamp(int(score), 0, 7)]",
                                      .of = {{"t", 2, 0, {70, 90}}, {"u", 1, 0, {8}}},
                                      .wanted = {"t"}};

/* What a key has: of each head of a group, shared by heads or batches, with a factor, beside
 * what a row has, which softmax does not see, and beside terms of other kinds. */
static const capture_case of_keys[] = {
    {.problem = "b2 h4/2 q200 kv333 d64 bf16",
     .score = "score + t[b, h, kv]",
     .mask = "q >= kv - 100",
     .of = {{"t", 3, 0, {2, 4, 333}}},
     .wanted = {"t"}},
    {.problem = "b2 h2 q330 kv330 d128 bf16",
     .score = "score + t[b, h, q] - t[b, h, kv]",
     .mask = "causal()",
     .of = {{"t", 3, 0, {2, 2, 330}}},
     .wanted = {"t"}},
    {.problem = "b3 h6/2 q150 kv200 d64 f16",
     .score = "score * s[h] + t[b, kv] * t[b, kv]",
     .kv_len = 190,
     .of = {{"t", 2, 0, {3, 200}}, {"s", 1, 0, {6}}},
     .wanted = {"t", "s"},
     .is_added = 1},
    {.problem = "b2 h2 q130 kv270 d80 bf16",
     .score = "score + t[i[kv]] + u[h, q - kv + 269] * t[0]",
     .mask = "q >= kv - 200 && q - kv < 70",
     .of = {{"t", 1, 0, {9}}, {"i", 1, 9, {270}}, {"u", 2, 0, {2, 399}}},
     .wanted = {"t", "u"}},
    {.problem = "b1 h4/2 q100 kv150 d64 bf16",
     .score = "20 * tanh((score + t[h, kv]) / 20)",
     .of = {{"t", 2, 0, {4, 150}}},
     .wanted = {"t"}},
    /* slopes of the head, which dS is without */
    {.problem = "b2 h4/2 q100 kv150 d64 bf16",
     .score = "(score + t[kv]) * s[h]",
     .of = {{"t", 1, 0, {150}}, {"s", 1, 0, {4}}},
     .wanted = {"t"}},
    {.problem = "b1 h2 q100 kv150 d128 bf16",
     .score = "2 * (score + t[h, kv] + u[h, q - kv + 149])",
     .of = {{"t", 2, 0, {2, 150}}, {"u", 2, 0, {2, 249}}},
     .wanted = {"t", "u"}},
    {.problem = "b1 h2 q100 kv150 d64 bf16",
     .score = "(score + t[h] * (q - kv) * 0.01) * s[h]",
     .of = {{"t", 1, 0, {2}}, {"s", 1, 0, {2}}},
     .wanted = {"t"}},
};
enum { OF_KEYS = sizeof of_keys / sizeof of_keys[0] };

/* Tables of queries: stored whole, beside another, of a tensor with more rows, and with copies
 * or in place where they are too long; added exactly where heads, batches or rows share them,
 * where rows leave the tensor, and where one capture is read twice. Beside them a table of the
 * CTA, and elements. */
static const capture_case of_queries[] = {
    {.problem = "b2 h4/2 q150 kv200 d64 bf16",
     .score = "score + t[b, h, q, y[kv]] + u[b, h, q, kv % 7]",
     .mask = "q >= kv - 100",
     .of = {{"t", 4, 0, {2, 4, 150, 20}}, {"u", 4, 0, {2, 4, 150, 7}}, {"y", 1, 20, {200}}},
     .wanted = {"t", "u"}},
    {.problem = "b1 h2 q130 kv333 d128 f16",
     .score = "20 * tanh((score + t[b, h, q + 3, clamp(kv - q, -20, 20) + 20]) / 20)",
     .kv_len = 290,
     .of = {{"t", 4, 0, {1, 2, 140, 41}}},
     .wanted = {"t"},
     .is_added = 1},
    {.problem = "b1 h2 q70 kv900 d64 bf16",
     .score = "score + t[h, 69 - q, i[kv]] * u[h, kv / 2, q]",
     .mask = "q % 3 != 1",
     .of = {{"t", 3, 0, {2, 70, 500}}, {"u", 3, 0, {2, 450, 70}}, {"i", 1, 500, {900}}},
     .wanted = {"t"}},
    {.problem = "b1 h2 q70 kv900 d64 bf16",
     .score = "score + t[h, 69 - q, i[kv]] + u[h, kv / 2, q]",
     .of = {{"t", 3, 0, {2, 70, 500}}, {"u", 3, 0, {2, 450, 70}}, {"i", 1, 500, {900}}},
     .wanted = {"t", "u"}},
    {.problem = "b2 h2 q150 kv200 d64 bf16",
     .score = "score + t[h, q, y[kv]] + u[q / 16, kv / 16]",
     .mask = "causal()",
     .of = {{"t", 3, 0, {2, 150, 20}}, {"u", 2, 0, {10, 13}}, {"y", 1, 20, {200}}},
     .wanted = {"t", "u"}},
    {.problem = "b1 h2 q150 kv200 d64 bf16",
     .score = "score + t[h, q - 20, y[kv]] + t[h, q, (q + kv) % 9]",
     .q_offset = 10,
     .of = {{"t", 3, 0, {2, 120, 20}}, {"y", 1, 20, {200}}},
     .wanted = {"t"},
     .is_added = 1},
    {.problem = "b1 h2 q150 kv200 d64 f16",
     .score = "score + t[h, q - 20, y[kv]]",
     .of = {{"t", 3, 0, {2, 120, 20}}, {"y", 1, 20, {200}}},
     .wanted = {"t"}},
    {.problem = "b2 h2 q150 kv200 d256 bf16",
     .score = "score + t[h, min(15, int(log(1 + abs(x[b, q] - x[b, kv])) * 4))]",
     .of = {{"t", 2, 0, {2, 16}}, {"x", 2, 0, {2, 200}}},
     .wanted = {"t"}},
    /* indices that count from the end: none does, and some do */
    {.problem = "b2 h2 q130 kv150 d64 bf16",
     .score = "score + t[b, h, q, kv - q + 129 < 0 ? kv - q + 408 : kv - q + 129]",
     .mask = "q + 20 >= kv",
     .of = {{"t", 4, 0, {2, 2, 130, 279}}},
     .wanted = {"t"}},
    {.problem = "b2 h2 q130 kv150 d64 bf16",
     .score = "score + t[h, q, kv - q + 129 < 0 ? kv - q + 408 : kv - q + 129]",
     .of = {{"t", 3, 0, {2, 130, 279}}},
     .wanted = {"t"}},
    {.problem = "b1 h2 q130 kv150 d64 bf16",
     .score = "score + t[h, q, kv - q < 0 ? kv - q + 299 : kv - q]",
     .of = {{"t", 3, 0, {2, 130, 299}}},
     .wanted = {"t"}},
    {.problem = "b1 h2 q130 kv150 d64 bf16",
     .score = "score + t[h, q, kv % 11]",
     .mask = BEHIND,
     .of = {{"t", 3, 0, {2, 130, 11}}},
     .wanted = {"t"},
     .is_poisoned = 1},
};
enum { OF_QUERIES = sizeof of_queries / sizeof of_queries[0] };

enum { CASES = sizeof cases / sizeof cases[0], POISONED = 2, LINES = 3 };

static uint64_t draw(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return *seed >> 33;
}

static float draw_float(uint64_t *seed)
{
    float sum = -6;
    for (int i = 0; i < 12; i++)
        sum += (float)draw(seed) / 2147483648.0f;
    return sum;
}

/* ---- tensors on the host, and their copies ---- */

typedef struct side {
    saccade_tensor t[TENSORS], d_capture[MOST];
    saccade_binding bound[CAPTURED];
    saccade_plan *plan;
    saccade_block_mask *blocks;
    void *room[2];
} side;

typedef struct trial {
    const capture_case *c;
    saccade_problem problem;
    saccade_mod *score, *mask;
    int n_bound, n_wanted;
    side here, there;
} trial;

static size_t bytes_of(const saccade_tensor *t)
{
    size_t n = saccade_dtype_bytes(t->dtype);
    for (int32_t d = 0; d < t->rank; d++)
        n *= (size_t)t->shape[d];
    return n;
}

static saccade_tensor make(saccade_dtype dtype, int32_t rank, const int64_t *shape)
{
    saccade_tensor t = saccade_tensor_of(NULL, dtype, rank, shape);
    t.data = calloc(bytes_of(&t), 1);
    assert_non_null(t.data);
    return t;
}

static void randomise(const saccade_tensor *t, int32_t below, uint64_t seed)
{
    const size_t n = bytes_of(t) / saccade_dtype_bytes(t->dtype);
    for (size_t i = 0; i < n; i++) {
        const float x = draw_float(&seed);
        if (t->dtype == SACCADE_I32)
            ((int32_t *)t->data)[i] = (int32_t)(draw(&seed) % (uint64_t)below);
        else if (t->dtype == SACCADE_F32)
            ((float *)t->data)[i] = x;
        else
            convert_from_f32(t->dtype, &x, (uint16_t *)t->data + i, 1);
    }
}

static void *device_memory(size_t bytes)
{
    void *memory = NULL;
    assert_int_equal(saccade_device_alloc(0, bytes, &memory, NULL), SACCADE_OK);
    return memory;
}

static saccade_tensor copy_there(const saccade_tensor *t)
{
    saccade_tensor copy = *t;
    copy.data = device_memory(bytes_of(t));
    copy.device = (saccade_device){SACCADE_CUDA, 0};
    assert_int_equal(saccade_device_copy(0, copy.data, t->data, bytes_of(t), NULL), SACCADE_OK);
    return copy;
}

static void poison_keys(const saccade_tensor *k)
{
    const float nan = NAN;
    const int64_t each = (int64_t)saccade_dtype_bytes(k->dtype);
    for (int64_t row = 0; row < k->shape[0] * k->shape[1] * k->shape[2]; row++)
        for (int64_t i = 0; row % k->shape[2] % 16 == 7 && i < k->shape[3]; i++)
            convert_from_f32(k->dtype, &nan, (char *)k->data + (row * k->shape[3] + i) * each,
                             1);
}

static void make_tensors(trial *x)
{
    const saccade_sizes *s = &x->problem.sizes;
    const saccade_dtype dtype = x->problem.dtype;
    const int64_t q[4] = {s->B, s->H, s->Q, s->D}, k[4] = {s->B, s->Hkv, s->KV, s->D};
    const int64_t v[4] = {s->B, s->Hkv, s->KV, s->Dv}, o[4] = {s->B, s->H, s->Q, s->Dv};
    const int64_t *const shapes[TENSORS] = {q, k, v, o, o, o, q, k, v};
    for (int i = 0; i < TENSORS; i++) {
        x->here.t[i] = make(i == LSE ? SACCADE_F32 : dtype, i == LSE ? 3 : 4, shapes[i]);
        if (i < OUT || i == D_OUT)
            randomise(&x->here.t[i], 0, 3 + (uint64_t)i);
        if (i == K && x->c->is_poisoned)
            poison_keys(&x->here.t[K]);
        x->there.t[i] = copy_there(&x->here.t[i]);
    }
    for (x->n_bound = 0; x->n_bound < CAPTURED && x->c->of[x->n_bound].name; x->n_bound++) {
        const captured *of = &x->c->of[x->n_bound];
        saccade_binding *b = &x->here.bound[x->n_bound];
        *b = (saccade_binding){
            of->name, make(of->below ? SACCADE_I32 : SACCADE_F32, of->rank, of->shape)};
        randomise(&b->tensor, of->below, 20 + (uint64_t)x->n_bound);
        if (of->rank == 0 && !of->below)
            *(float *)b->tensor.data = 1.75f;
        x->there.bound[x->n_bound] = *b;
        if (of->rank)
            x->there.bound[x->n_bound].tensor = copy_there(&b->tensor);
    }
}

static const captured *find(const trial *x, const char *name)
{
    int i = 0;
    while (strcmp(x->c->of[i].name, name) != 0)
        i++;
    return &x->c->of[i];
}

static void make_gradients(trial *x)
{
    for (x->n_wanted = 0; x->n_wanted < MOST && x->c->wanted[x->n_wanted]; x->n_wanted++) {
        const captured *of = find(x, x->c->wanted[x->n_wanted]);
        saccade_tensor *t = &x->here.d_capture[x->n_wanted];
        *t = make(SACCADE_F32, of->rank, of->shape);
        for (size_t i = 0; i < bytes_of(t) / 4; i++)
            ((float *)t->data)[i] = x->c->is_added ? 1 : NAN;
        x->there.d_capture[x->n_wanted] = copy_there(t);
    }
}

static void free_side(side *s, int is_there)
{
    for (int i = 0; i < TENSORS; i++)
        is_there ? saccade_device_free(0, s->t[i].data) : free(s->t[i].data);
    for (int i = 0; i < MOST; i++)
        is_there ? saccade_device_free(0, s->d_capture[i].data) : free(s->d_capture[i].data);
    for (int i = 0; i < CAPTURED; i++)
        if (!is_there || s->bound[i].tensor.rank)
            is_there ? saccade_device_free(0, s->bound[i].tensor.data)
                     : free(s->bound[i].tensor.data);
    for (int i = 0; i < 2; i++)
        is_there ? saccade_device_free(0, s->room[i]) : free(s->room[i]);
    saccade_plan_destroy(s->plan);
    saccade_block_mask_destroy(s->blocks);
}

/* ---- runs ---- */

static void make_plan(trial *x, side *s, const char *backend, const char *arch)
{
    saccade_problem p = x->problem;
    saccade_error err = {0};
    p.backend = backend;
    p.arch = arch;
    if (saccade_plan_create(NULL, &p, &s->plan, &err) != SACCADE_OK)
        fail_msg("%s: %s, %s", x->c->score, err.where, err.message);
}

static void make_blocks(trial *x, side *s)
{
    int32_t offset = x->c->q_offset;
    const saccade_tensor at = saccade_tensor_of(&offset, SACCADE_I32, 0, NULL);
    const saccade_positions positions = {.size = sizeof positions, .q_offset = &at};
    saccade_error err = {0};
    if (!x->mask)
        return;
    if (saccade_block_mask_create(NULL, x->mask, &x->problem.sizes, &positions, NULL, 0, NULL,
                                  &s->blocks, &err)
        || saccade_plan_prepare(s->plan, s->blocks, &err))
        fail_msg("block mask: %s", err.message);
}

static void run(trial *x, side *s, int is_there)
{
    int32_t offset = x->c->q_offset, length = x->c->kv_len;
    const saccade_tensor at = saccade_tensor_of(&offset, SACCADE_I32, 0, NULL);
    const saccade_tensor keys = saccade_tensor_of(&length, SACCADE_I32, 0, NULL);
    const saccade_positions positions = {
        .size = sizeof positions, .q_offset = &at, .kv_len = length ? &keys : NULL};
    const int has_qkv = !x->c->without_qkv;
    saccade_binding wanted[MOST];
    saccade_forward_args f;
    saccade_backward_args a;
    saccade_error err = {0};
    saccade_forward_args_init(&f);
    saccade_backward_args_init(&a);
    f.q = a.q = &s->t[Q], f.k = a.k = &s->t[K], f.v = a.v = &s->t[V];
    f.out = a.out = &s->t[OUT], f.lse = a.lse = &s->t[LSE];
    f.positions = a.positions = &positions;
    f.block_mask = a.block_mask = s->blocks;
    f.bindings = a.bindings = s->bound;
    f.n_bindings = a.n_bindings = x->n_bound;
    a.d_out = &s->t[D_OUT];
    a.d_q = has_qkv ? &s->t[DQ] : NULL;
    a.d_k = has_qkv ? &s->t[DK] : NULL;
    a.d_v = has_qkv ? &s->t[DV] : NULL;
    for (int i = 0; i < x->n_wanted; i++)
        wanted[i] = (saccade_binding){x->c->wanted[i], s->d_capture[i]};
    a.d_captures = wanted;
    a.n_d_captures = x->n_wanted;
    a.accumulate = x->c->is_added ? SACCADE_GRADIENT_CAPTURES : 0;
    f.workspace_bytes = saccade_plan_workspace(s->plan, &x->problem.sizes);
    if (saccade_backward_workspace(s->plan, &a, &a.workspace_bytes, &err) != SACCADE_OK)
        fail_msg("workspace: %s", err.message);
    for (int i = 0; i < 2 && !s->room[i]; i++) {
        const size_t bytes =
            ((i ? a : (saccade_backward_args){.workspace_bytes = f.workspace_bytes})
                 .workspace_bytes
             + 64)
            / 64 * 64;
        s->room[i] = is_there ? device_memory(bytes) : aligned_alloc(64, bytes);
    }
    f.workspace = s->room[0];
    a.workspace = s->room[1];
    if (saccade_forward(s->plan, &f, &err) || saccade_backward(s->plan, &a, &err)
        || (is_there && saccade_device_synchronize(0, &err)))
        fail_msg("%s, %s: %s, %s", x->c->problem, x->c->score, err.where, err.message);
}

/* ---- comparison ---- */

/* O is rounded to the dtype before delta is made of it, and dS of tiles is; in f32 products of
 * split operands add a few eps of 2^-22. In few sums of all terms they cancel, where a norm
 * over many does not. */
static void compare(const trial *x, int which, const float *got)
{
    const saccade_tensor *gold = &x->here.d_capture[which];
    const float *want = gold->data;
    const double eps = x->problem.dtype == SACCADE_BF16  ? 0x1p-8
                       : x->problem.dtype == SACCADE_F16 ? 0x1p-11
                                                         : 0x1p-19;
    const size_t n = bytes_of(gold) / 4;
    const double lone = n < 8 ? 8 / sqrt((double)n) : 1;
    double most = 0, worst = 0, error = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        const double off = (double)got[i] - (double)want[i];
        most = fmax(most, fabs((double)want[i]));
        worst = !(fabs(off) <= worst) ? fabs(off) : worst;
        error += off * off;
        norm += (double)want[i] * (double)want[i];
    }
    if (!(sqrt(error) <= 2 * lone * eps * sqrt(norm)) || !(worst <= 6 * lone * eps * most))
        fail_msg("%s, %s: d%s: relative error %.3g, largest %.3g of %.3g", x->c->problem,
                 x->c->score, x->c->wanted[which], sqrt(error / norm), worst, most);
}

static float *fetch(const saccade_tensor *t)
{
    float *host = malloc(bytes_of(t));
    assert_non_null(host);
    assert_int_equal(saccade_device_copy(0, host, t->data, bytes_of(t), NULL), SACCADE_OK);
    return host;
}

/* The score with dtypes of the case's captures. */
static saccade_mod *bound_score(const capture_case *c)
{
    saccade_binding known[CAPTURED];
    int n = 0;
    for (; n < CAPTURED && c->of[n].name; n++)
        known[n] = (saccade_binding){c->of[n].name,
                                     {.dtype = c->of[n].below ? SACCADE_I32 : SACCADE_F32}};
    return case_mod_of(SACCADE_SCORE, c->score, known, n);
}

/* As the case says, the same in f32, or of a problem whose sequences differ in length. */
typedef enum in_dtype { AS_SAID, IN_F32, RAGGED } in_dtype;

static void open_trial(trial *x, const capture_case *c, in_dtype dtype)
{
    int n = 0;
    memset(x, 0, sizeof *x);
    x->c = c;
    saccade_problem_init(&x->problem);
    problem_case(c->problem, &x->problem.sizes, &x->problem.dtype);
    if (dtype == IN_F32)
        x->problem.dtype = SACCADE_F32;
    x->problem.ragged = dtype == RAGGED;
    while (n < MOST && c->wanted[n])
        n++;
    x->problem.score = x->score = bound_score(c);
    x->problem.mask = x->mask = c->mask ? case_mod(SACCADE_MASK, c->mask) : NULL;
    x->problem.gradients =
        SACCADE_GRADIENT_CAPTURES
        | (c->without_qkv ? 0 : SACCADE_GRADIENT_Q | SACCADE_GRADIENT_K | SACCADE_GRADIENT_V);
    x->problem.gradient_captures = (const char *const *)c->wanted;
    x->problem.n_gradient_captures = n;
}

static void close_trial(trial *x)
{
    saccade_mod_destroy(x->score);
    saccade_mod_destroy(x->mask);
}

static void holds(const capture_case *c, in_dtype dtype)
{
    trial x;
    float *first[MOST] = {NULL};
    open_trial(&x, c, dtype);
    make_tensors(&x);
    make_gradients(&x);
    make_plan(&x, &x.here, "ref", NULL);
    make_plan(&x, &x.there, "cuda", NULL);
    make_blocks(&x, &x.here);
    make_blocks(&x, &x.there);
    float *before[MOST] = {NULL};
    for (int i = 0; i < x.n_wanted; i++)
        before[i] = fetch(&x.there.d_capture[i]);
    run(&x, &x.here, 0);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < x.n_wanted; i++)
            assert_int_equal(saccade_device_copy(0, x.there.d_capture[i].data, before[i],
                                                 bytes_of(&x.there.d_capture[i]), NULL),
                             SACCADE_OK);
        run(&x, &x.there, 1);
        for (int i = 0; i < x.n_wanted; i++) {
            float *got = fetch(&x.there.d_capture[i]);
            compare(&x, i, got);
            if (round && memcmp(got, first[i], bytes_of(&x.there.d_capture[i])) != 0)
                fail_msg("%s, %s: other bits in the second run", c->problem, c->score);
            free(first[i]);
            first[i] = got;
        }
    }
    for (int i = 0; i < x.n_wanted; i++) {
        free(first[i]);
        free(before[i]);
    }
    free_side(&x.here, 0);
    free_side(&x.there, 1);
    close_trial(&x);
}

static void all_of(const capture_case *list, int n, in_dtype dtype)
{
    if (!has_device())
        skip();
    for (int i = 0; i < n; i++)
        holds(&list[i], dtype);
}

static void all_hold(int first, int past, in_dtype dtype)
{
    all_of(cases + first, past - first, dtype);
}

static void sums(void **state)
{
    (void)state;
    all_hold(0, 4, AS_SAID);
}

static void elements(void **state)
{
    (void)state;
    all_hold(4, 9, AS_SAID);
}

static void gathers(void **state)
{
    (void)state;
    all_hold(13, CASES - POISONED - LINES, AS_SAID);
}

static void lines(void **state)
{
    (void)state;
    all_hold(CASES - POISONED - LINES, CASES - POISONED, AS_SAID);
}

static void in_tiles(void **state)
{
    (void)state;
    all_hold(9, 13, AS_SAID);
}

static void nan_at_masked_keys(void **state)
{
    (void)state;
    all_hold(CASES - POISONED, CASES, AS_SAID);
}

/* All of them by one kernel, at each length of its blocks. */
static void sums_in_f32(void **state)
{
    (void)state;
    all_hold(0, 9, IN_F32);
}

static void others_in_f32(void **state)
{
    (void)state;
    all_hold(9, CASES, IN_F32);
}

/* What a unit of the network gets is a small difference of large sums: in f32. */
static void many_reads(void **state)
{
    (void)state;
    all_of(many, MANY, IN_F32);
    holds(&many[MANY - 1], AS_SAID);
}

static void shared_elements(void **state)
{
    (void)state;
    all_of(dense, DENSE, AS_SAID);
    all_of(dense, DENSE, IN_F32);
}

static void sums_of_keys(void **state)
{
    (void)state;
    all_of(of_keys, OF_KEYS, AS_SAID);
}

static void tables_of_queries(void **state)
{
    (void)state;
    all_of(of_queries, OF_QUERIES, AS_SAID);
}

static void tables_of_queries_in_f32(void **state)
{
    (void)state;
    all_of(of_queries, OF_QUERIES, IN_F32);
}

/* Every kernel once: what tools/cuda-sanitize runs. */
static void few_of_each(void **state)
{
    (void)state;
    all_hold(1, 3, AS_SAID);
    all_hold(4, 5, AS_SAID);
    all_hold(9, 10, AS_SAID);
    all_hold(11, 12, AS_SAID);
    all_hold(15, 16, AS_SAID);
    all_hold(4, 5, IN_F32);
    all_hold(11, 12, IN_F32);
    holds(&dense[3], AS_SAID);
    holds(&dense[2], IN_F32);
    holds(&of_keys[0], AS_SAID);
    holds(&of_queries[0], AS_SAID);
}

/* One program of a case, without a device; which of its reads' terms tiles make. */
static void compile_one(const capture_case *c, in_dtype dtype, const char *arch,
                        cu_program which, const cu_term *terms)
{
    trial x;
    saccade_error err = {0};
    cu_state s = {.family = dtype == IN_F32              ? CU_F32
                            : strcmp(arch, "sm_80") == 0 ? CU_SM80
                                                         : CU_SM90};
    cu_loaded *program = &s.programs[which];
    open_trial(&x, c, dtype);
    make_plan(&x, &x.here, "cpu", NULL); /* a derived problem */
    snprintf(s.arch, sizeof s.arch, "%s", arch);
    const plan_problem *p = &x.here.plan->problem;
    if (cu_backward_emit(&s, p, &x.here.plan->arena, &err))
        fail_msg("%s: %s", arch, err.message);
    for (int i = CU_BWD_TILES; i <= CU_BWD_WIDE; i++) /* that others hang on */
        cu_program_kinds[i].choose(&s, p, 0, &s.programs[i].form);
    assert_true(cu_program_kinds[which].choose(&s, p, 0, &program->form));
    if (cu_compile_instance(&s, p, which, &program->form, &program->image, &err))
        fail_msg("%s: %s", arch, err.message);
    if (program->image.report.spill_bytes > cu_program_kinds[which].spill_most
        || program->image.report.is_serialised)
        fail_msg("%s, %s: %d bytes spilled, serialised: %d", c->score, arch,
                 program->image.report.spill_bytes, program->image.report.is_serialised);
    for (int r = 0; terms && r < x.n_wanted + 2 && terms[r] != CU_TERM_NONE; r++)
        assert_int_equal(s.backward_facts.term[r], terms[r]);
    cu_free_programs(&s);
    free(s.backward_text);
    saccade_plan_destroy(x.here.plan);
    close_trial(&x);
}

/* Where the gradient of the first wanted capture goes, on 132 multiprocessors, and what room
 * that takes; without a device. */
typedef struct way_case {
    const char *problem, *score;
    captured t;
    cu_capture_way way;
    int parts;
    size_t bytes; /* of the workspace, and at most 256 more */
} way_case;

/* q_offset, kv_offset: -1: it lies on a device. */
static void goes_there(const way_case *w, int32_t q_offset, int32_t kv_offset)
{
    const capture_case c = {.problem = w->problem,
                            .score = w->score,
                            .of = {w->t, {"n", 0, 99, {0}}},
                            .wanted = {"t"}};
    trial x;
    saccade_error err = {0};
    saccade_tensor captures[MOD_MAX_CAPTURES];
    cu_state s = {.family = CU_SM90, .device = {.sm = 90, .n_sm = 132}};
    open_trial(&x, &c, AS_SAID);
    make_plan(&x, &x.here, "cpu", NULL); /* a derived problem */
    saccade_plan plan = *x.here.plan;
    plan.state = &s;
    snprintf(s.arch, sizeof s.arch, "sm_90a");
    if (cu_backward_emit(&s, &plan.problem, &plan.arena, &err))
        fail_msg("%s: %s", c.score, err.message);
    for (int k = CU_BWD_TILES; k <= CU_BWD_ELEMENTS90; k++)
        cu_program_kinds[k].choose(&s, &plan.problem, 0, &s.programs[k].form);
    for (int k = 0; k < MOD_MAX_CAPTURES; k++)
        captures[k] = saccade_tensor_of(NULL, SACCADE_F32, c.of[0].rank, c.of[0].shape);
    int32_t offset[2] = {q_offset, kv_offset};
    plan_positions positions = {
        .q_offset = saccade_tensor_of(&offset[0], SACCADE_I32, 0, NULL),
        .kv_offset = saccade_tensor_of(&offset[1], SACCADE_I32, 0, NULL)};
    positions.q_offset.device.kind = offset[0] < 0 ? SACCADE_CUDA : SACCADE_CPU;
    positions.kv_offset.device.kind = offset[1] < 0 ? SACCADE_CUDA : SACCADE_CPU;
    const cu_capture_layout at =
        cu_lay_out_captures(&plan, &x.problem.sizes, captures, &positions);
    if (at.way[0] != w->way || at.parts[0] != w->parts || at.bytes < w->bytes
        || at.bytes > w->bytes + 256)
        fail_msg("%s: way %d, %d parts, %zu bytes", c.score, (int)at.way[0], at.parts[0],
                 at.bytes);
    x.here.plan->arena = plan.arena;
    free(s.backward_text);
    saccade_plan_destroy(x.here.plan);
    close_trial(&x);
}

static void ways(void **state)
{
    static const way_case list[] = {
        {"b2 h2 q100 kv150 d64 bf16",
         "score + t[b, h, q, kv]",
         {"t", 4, 0, {2, 2, 100, 150}},
         CU_SUMS_STORED,
         1,
         0},
        {"b2 h2 q100 kv150 d64 bf16",
         "score + t[b, h, q, kv / 16]",
         {"t", 4, 0, {2, 2, 100, 10}},
         CU_SUMS_TABLE,
         1,
         0},
        {"b1 h2 q100 kv1500 d64 bf16",
         "score + t[h, q, kv - kv % 2]",
         {"t", 3, 0, {2, 100, 1500}},
         CU_SUMS_ROW,
         1,
         0},
        {"b2 h2 q100 kv150 d64 bf16",
         "score + t[h, q, kv / 16]",
         {"t", 3, 0, {2, 100, 10}},
         CU_SUMS_EXACT,
         1,
         2 * 100 * 10 * 104},
        {"b1 h2 q100 kv150 d64 bf16",
         "score + t[h, q, kv - q + n]",
         {"t", 3, 0, {2, 100, 250}},
         CU_SUMS_STORED,
         1,
         0},
        {"b1 h2 q100 kv150 d64 bf16",
         "score + t[h, q - 20, kv / 16]",
         {"t", 3, 0, {2, 80, 10}},
         CU_SUMS_EXACT,
         1,
         2 * 80 * 10 * 104},
        {"b1 h2 q70 kv90 d64 bf16",
         "score + t[q, kv, (q + kv) % 2]",
         {"t", 3, 0, {70, 90, 2}},
         CU_SUMS_EXACT,
         1,
         70 * 90 * 2 * 104},
        /* parts of windows; of few batches; of a tensor far larger than what is read of it */
        {"b2048 h3 q49 kv49 d32 bf16",
         "score + t[h, q, kv]",
         {"t", 3, 0, {3, 49, 49}},
         CU_SUMS_STORED,
         44,
         44 * 3 * 49 * 49 * 4},
        {"b8 h2 q20 kv30 d32 bf16",
         "score + t[q, kv]",
         {"t", 2, 0, {20, 30}},
         CU_SUMS_STORED,
         4,
         4 * 20 * 30 * 4},
        {"b2048 h3 q49 kv49 d32 bf16",
         "score + t[q, kv]",
         {"t", 2, 0, {2048, 2048}},
         CU_SUMS_STORED,
         2,
         2 * 2048 * 2048 * 4},
        {"b2048 h3 q49 kv49 d32 bf16",
         "score + t[h / 2, q, kv]",
         {"t", 3, 0, {2, 49, 49}},
         CU_SUMS_STORED,
         1,
         0},
    };
    /* positions that are not known to the host, and some that lead out of the tensor */
    static const struct {
        int32_t q_offset, kv_offset;
        way_case of;
    } placed[] = {
        {-1,
         0,
         {"b2 h2 q100 kv150 d64 bf16",
          "score + t[b, h, q, kv]",
          {"t", 4, 0, {2, 2, 100, 150}},
          CU_SUMS_EXACT,
          1,
          2 * 2 * 100 * 150 * 104}},
        {-1,
         0,
         {"b2 h2 q100 kv150 d64 bf16",
          "score + t[b, h, q, kv / 16]",
          {"t", 4, 0, {2, 2, 100, 10}},
          CU_SUMS_EXACT,
          1,
          2 * 2 * 100 * 10 * 104}},
        {0,
         -1,
         {"b2 h2 q100 kv150 d64 bf16",
          "score + t[b, h, q, kv / 16]",
          {"t", 4, 0, {2, 2, 100, 10}},
          CU_SUMS_TABLE,
          1,
          0}},
        {20,
         0,
         {"b2 h2 q100 kv150 d64 bf16",
          "score + t[b, h, q, kv]",
          {"t", 4, 0, {2, 2, 120, 150}},
          CU_SUMS_STORED,
          1,
          0}},
        {1,
         0,
         {"b2 h2 q100 kv150 d64 bf16",
          "score + t[b, h, q, kv / 16]",
          {"t", 4, 0, {2, 2, 100, 10}},
          CU_SUMS_EXACT,
          1,
          2 * 2 * 100 * 10 * 104}},
    };
    const plan_problem none = {.dtype = SACCADE_BF16};
    const cu_state no_tiles = {.family = CU_SM90};
    cu_form form;
    (void)state;
    /* its weights have the units of rows that are prepared for tiles: chosen after these */
    assert_true(cu_program_kinds[CU_BWD_ELEMENTS90].follows_tiles);
    assert_false(
        cu_program_kinds[CU_BWD_ELEMENTS90].choose(&no_tiles, &none, 0, &form));
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
        goes_there(&list[i], 0, 0);
    for (size_t i = 0; i < sizeof placed / sizeof placed[0]; i++)
        goes_there(&placed[i].of, placed[i].q_offset, placed[i].kv_offset);
}

/* Terms of a row cancel but for sinks, which its sum has besides. */
static void rows_that_cancel(void **state)
{
    static const struct {
        const char *score;
        saccade_dtype sinks;
        cu_term term;
    } list[] = {
        {"score + t[q]", SACCADE_NONE, CU_TERM_ROW},
        {"score + t[q] * h", SACCADE_NONE, CU_TERM_ROW},
        {"score + t[q]", SACCADE_F32, CU_TERM_NONE},
        {"score + t[q] * kv", SACCADE_NONE, CU_TERM_NONE},
        {"2 * (score + t[q])", SACCADE_NONE, CU_TERM_NONE},
        {"20 * tanh((score + t[q]) / 20)", SACCADE_NONE, CU_TERM_NONE},
        {"kv % 3 == 0 ? score : score + t[q]", SACCADE_NONE, CU_TERM_NONE},
    };
    (void)state;
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        const capture_case c = {.problem = "b1 h2 q100 kv150 d64 bf16",
                                .score = list[i].score,
                                .of = {{"t", 1, 0, {100}}},
                                .wanted = {"t"}};
        trial x;
        saccade_error err = {0};
        cu_state s = {.family = CU_SM90};
        open_trial(&x, &c, AS_SAID);
        x.problem.sinks_dtype = list[i].sinks;
        make_plan(&x, &x.here, "cpu", NULL);
        assert_int_equal(cu_backward_emit(&s, &x.here.plan->problem, &x.here.plan->arena, &err),
                         SACCADE_OK);
        if (s.backward_facts.term[0] != list[i].term)
            fail_msg("%s: terms of kind %d", list[i].score, s.backward_facts.term[0]);
        free(s.backward_text);
        saccade_plan_destroy(x.here.plan);
        close_trial(&x);
    }
}

static void compile_only(void **state)
{
    static const cu_term scale[3] = {CU_TERM_SCALE};
    static const cu_term element[3] = {CU_TERM_ELEMENT};
    static const cu_term diagonal[3] = {CU_TERM_DIAGONAL};
    static const cu_term line[3] = {CU_TERM_LINE};
    static const cu_term keys[2][3] = {{CU_TERM_KEY}, {CU_TERM_ROW, CU_TERM_KEY}};
    (void)state;
    skip_without_nvrtc();
    compile_one(&cases[2], AS_SAID, "sm_90a", CU_BWD_CAPTURES, NULL);
    compile_one(&cases[16], AS_SAID, "sm_80", CU_BWD_CAPTURES, NULL);
    compile_one(&cases[9], IN_F32, "sm_90a", CU_BWD_CAPTURES, NULL);
    compile_one(&cases[1], IN_F32, "sm_80", CU_BWD_CAPTURES, NULL);
    compile_one(&cases[16], IN_F32, "sm_90a", CU_BWD_CAPTURES, NULL);
    compile_one(&dense[5], AS_SAID, "sm_90a", CU_BWD_ELEMENTS, NULL);
    compile_one(&dense[0], IN_F32, "sm_80", CU_BWD_ELEMENTS, NULL);
    compile_one(&by_score, AS_SAID, "sm_90a", CU_BWD_ELEMENTS, NULL);
    compile_one(&dense[0], AS_SAID, "sm_90a", CU_BWD_ELEMENTS90, NULL);
    compile_one(&dense[8], AS_SAID, "sm_90a", CU_BWD_ELEMENTS90, NULL);
    if (is_thorough_run()) /* half a minute: its text is long */
        compile_one(&many[0], AS_SAID, "sm_90a", CU_BWD_CAPTURES, NULL);
    compile_one(&cases[4], AS_SAID, "sm_90a", CU_BWD_TILES, element);
    compile_one(&cases[0], AS_SAID, "sm_90a", CU_BWD_TILES, scale);
    compile_one(&cases[2], AS_SAID, "sm_90a", CU_BWD_TILES, diagonal);
    if (!is_short_run()) {
        compile_one(&cases[2], RAGGED, "sm_90a", CU_BWD_CAPTURES, NULL);
        compile_one(&cases[2], RAGGED, "sm_90a", CU_BWD_TILES, diagonal);
        compile_one(&cases[CASES - POISONED - 1], RAGGED, "sm_90a", CU_BWD_TILES, line);
    }
    for (int i = 0; i < 2; i++)
        compile_one(&of_keys[i], AS_SAID, "sm_90a", CU_BWD_TILES, keys[i]);
    for (int i = 0; i < LINES; i++)
        compile_one(&cases[CASES - POISONED - LINES + i], AS_SAID, "sm_90a", CU_BWD_TILES,
                    line);
}

int main(int argc, char **argv)
{
    char folder[] = "/tmp/saccade-cuda-XXXXXX";
    if (!getenv("SACCADE_CACHE_DIR") && mkdtemp(folder))
        setenv("SACCADE_CACHE_DIR", folder, 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(compile_only),
        cmocka_unit_test(few_of_each),
        cmocka_unit_test(sums),
        cmocka_unit_test(elements),
        cmocka_unit_test(gathers),
        cmocka_unit_test(in_tiles),
        cmocka_unit_test(lines),
        cmocka_unit_test(nan_at_masked_keys),
        cmocka_unit_test(sums_in_f32),
        cmocka_unit_test(others_in_f32),
        cmocka_unit_test(many_reads),
        cmocka_unit_test(shared_elements),
        cmocka_unit_test(sums_of_keys),
        cmocka_unit_test(rows_that_cancel),
        cmocka_unit_test(ways),
        cmocka_unit_test(tables_of_queries),
        cmocka_unit_test(tables_of_queries_in_f32),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
