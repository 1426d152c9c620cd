/* The ladder as a table: each rung's functions, and the closed formulas its counters must equal
 * for every N, d and M, lower orders included. Letters in the texts: T stationary blocks, U
 * moving blocks (ladder_blocks), L = sum of rows of live tiles, J = keys of live columns,
 * S splits, b blocks of a row of block-online softmax. A stated figure with a capital O or
 * Theta is an order of growth: only the ratio to it over M can be checked. */
#include "ref/ladder.h"

#include <stddef.h>

/* ---- softmax ---- */

static int64_t accesses_3n2(const ladder_problem *p)
{
    return 3 * p->N * p->N;
}

static int64_t accesses_4n2(const ladder_problem *p)
{
    return 4 * p->N * p->N;
}

static int64_t flops_naive(const ladder_problem *p)
{
    return 3 * p->N * p->N - p->N;
}

static int64_t flops_safe(const ladder_problem *p)
{
    return 6 * p->N * p->N - 2 * p->N;
}

static int64_t flops_online(const ladder_problem *p)
{
    return 8 * p->N * p->N;
}

static int64_t flops_block(const ladder_problem *p)
{
    return 8 * p->N * p->N + 8 * p->N * ((p->N + p->block - 1) / p->block);
}

static double stated_3n2(const ladder_problem *p)
{
    return 3.0 * (double)p->N * (double)p->N;
}

static double stated_4n2(const ladder_problem *p)
{
    return 4.0 * (double)p->N * (double)p->N;
}

/* ---- attention over a stored S ---- */

static int64_t accesses_standard(const ladder_problem *p)
{
    return 4 * p->N * p->N + 4 * p->N * p->d;
}

static int64_t flops_standard(const ladder_problem *p)
{
    return 4 * p->N * p->N * p->d + 5 * p->N * p->N - 2 * p->N;
}

static int64_t accesses_3_pass(const ladder_problem *p)
{
    return 3 * p->N * p->N + 4 * p->N * p->d;
}

static int64_t flops_3_pass(const ladder_problem *p)
{
    return 4 * p->N * p->N * p->d + 8 * p->N * p->N;
}

static double stated_3n2_4nd(const ladder_problem *p)
{
    return (double)accesses_3_pass(p);
}

/* ---- FlashAttention ---- */

static int64_t accesses_row(const ladder_problem *p)
{
    return 2 * p->N * p->N * p->d + 2 * p->N * p->d;
}

static int64_t flops_row(const ladder_problem *p)
{
    return 5 * p->N * p->N * p->d + 9 * p->N * p->N;
}

static double stated_n2d(const ladder_problem *p)
{
    return (double)p->N * (double)p->N * (double)p->d;
}

static int64_t accesses_flash1(const ladder_problem *p)
{
    const int64_t T = ladder_blocks_of(p).n_stationary, N = p->N, d = p->d;
    return T * (3 * N * d + 4 * N) + 3 * N * d + 2 * N;
}

static int64_t flops_flash1(const ladder_problem *p)
{
    const int64_t T = ladder_blocks_of(p).n_stationary, N = p->N, d = p->d;
    return 4 * N * N * d + 4 * N * N + T * N * (3 * d + 8);
}

static double stated_theorem2(const ladder_problem *p)
{
    return (double)p->N * (double)p->N * (double)p->d * (double)p->d / (double)p->M;
}

static int64_t accesses_flash2(const ladder_problem *p)
{
    const int64_t T = ladder_blocks_of(p).n_stationary, N = p->N, d = p->d;
    return T * 2 * N * d + 2 * N * d + N;
}

static int64_t flops_flash2(const ladder_problem *p)
{
    const int64_t U = ladder_blocks_of(p).n_moving, N = p->N, d = p->d;
    return 4 * N * N * d + 4 * N * N + U * N * (d + 3) + N * (d + 2);
}

/* ---- block-sparse ---- */

/* L, J, and live (query, key) pairs of the block mask. */
typedef struct live_sums {
    int64_t rows, keys, pairs;
} live_sums;

static live_sums sum_live(const ladder_problem *p)
{
    const ladder_blocks b = ladder_blocks_of(p);
    live_sums sums = {0, 0, 0};
    for (int64_t j = 0; j < b.n_stationary; j++) {
        const int64_t keys = ladder_least(b.stationary, p->N - j * b.stationary);
        int64_t rows = 0;
        for (int64_t i = 0; i < b.n_moving; i++)
            if (ladder_is_live(&b, i, j))
                rows += ladder_least(b.moving, p->N - i * b.moving);
        sums.rows += rows;
        sums.keys += rows ? keys : 0;
        sums.pairs += rows * keys;
    }
    return sums;
}

static int64_t accesses_sparse(const ladder_problem *p)
{
    const live_sums live = sum_live(p);
    return live.rows * (3 * p->d + 4) + 2 * live.keys * p->d + p->N * p->d + 2 * p->N;
}

static int64_t flops_sparse(const ladder_problem *p)
{
    const live_sums live = sum_live(p);
    return live.pairs * (4 * p->d + 4) + live.rows * (3 * p->d + 8);
}

static double stated_theorem4(const ladder_problem *p)
{
    const double s = (double)sum_live(p).pairs / ((double)p->N * (double)p->N);
    return (double)p->N * (double)p->d + stated_theorem2(p) * s;
}

/* ---- decoding ---- */

static int64_t accesses_split(const ladder_problem *p)
{
    return 2 * p->N * p->d + p->splits * (3 * p->d + 4) + p->d;
}

static int64_t flops_split(const ladder_problem *p)
{
    return p->N * (5 * p->d + 7) + p->splits * p->d + (p->splits - 1) * (3 * p->d + 10);
}

static int64_t accesses_unified(const ladder_problem *p)
{
    return 2 * p->N * p->d + p->splits * (3 * p->d + 2) + p->d;
}

static int64_t flops_unified(const ladder_problem *p)
{
    return p->N * (4 * p->d + 5) + p->splits * (p->d + 1) + p->d;
}

static double stated_2nd(const ladder_problem *p)
{
    return 2.0 * (double)p->N * (double)p->d;
}

/* ---- backward ---- */

static int64_t accesses_backward(const ladder_problem *p)
{
    return 7 * p->N * p->N + 8 * p->N * p->d;
}

static int64_t flops_backward(const ladder_problem *p)
{
    return 8 * p->N * p->N * p->d + 4 * p->N * p->N;
}

static double stated_theorem5(const ladder_problem *p)
{
    return (double)p->N * (double)p->d + (double)p->N * (double)p->N;
}

static int64_t accesses_recompute(const ladder_problem *p)
{
    const int64_t T = ladder_blocks_of(p).n_stationary, N = p->N, d = p->d;
    return T * (5 * N * d + 2 * N) + 5 * N * d;
}

static int64_t flops_recompute(const ladder_problem *p)
{
    const int64_t T = ladder_blocks_of(p).n_stationary, N = p->N, d = p->d;
    return 10 * N * N * d + 5 * N * N + T * 2 * N * d;
}

/* ---- the table ---- */

#define BOTH(name) ladder_##name, ladder_timed_##name

static const char online_paper[] = "arXiv 1805.02867";
static const char flash1_paper[] = "arXiv 2205.14135";

/* clang-format off */
const ladder_rung ladder_rungs[] = {
    {"softmax-naive", "naive softmax", online_paper, LADDER_SOFTMAX, BOTH(softmax_naive),
     accesses_3n2, "3N^2", flops_naive, "3N^2 - N", stated_3n2, "3N^2"},
    {"softmax-safe", "safe softmax", online_paper, LADDER_SOFTMAX, BOTH(softmax_safe),
     accesses_4n2, "4N^2", flops_safe, "6N^2 - 2N", stated_4n2, "4N^2"},
    {"softmax-online", "online softmax", online_paper, LADDER_SOFTMAX, BOTH(softmax_online),
     accesses_3n2, "3N^2", flops_online, "8N^2", stated_3n2, "3N^2"},
    {"softmax-block", "block-online softmax", online_paper, LADDER_SOFTMAX, BOTH(softmax_block),
     accesses_3n2, "3N^2", flops_block, "8N^2 + 8Nb", stated_3n2, "3N^2"},
    {"attention-standard", "standard attention", flash1_paper, LADDER_ATTENTION,
     BOTH(attention_standard),
     accesses_standard, "4N^2 + 4Nd", flops_standard, "4N^2 d + 5N^2 - 2N",
     stated_3n2_4nd, "3N^2 + 4Nd"},
    {"attention-3-pass", "attention, three passes", flash1_paper, LADDER_ATTENTION,
     BOTH(attention_3_pass),
     accesses_3_pass, "3N^2 + 4Nd", flops_3_pass, "4N^2 d + 8N^2",
     stated_3n2_4nd, "3N^2 + 4Nd"},
    {"flash1-row", "FlashAttention-1, by row", flash1_paper, LADDER_ATTENTION, BOTH(flash1_row),
     accesses_row, "2N^2 d + 2Nd", flops_row, "5N^2 d + 9N^2",
     stated_n2d, "O(N^2 d), M = d"},
    {"flash1-block", "FlashAttention-1, blocks", flash1_paper, LADDER_ATTENTION,
     BOTH(flash1_block),
     accesses_flash1, "T(3Nd + 4N) + 3Nd + 2N",
     flops_flash1, "4N^2 d + 4N^2 + TN(3d + 8)", stated_theorem2, "O(N^2 d^2 / M)"},
    {"flash1-sparse", "FlashAttention-1, sparse", flash1_paper, LADDER_SPARSE,
     BOTH(flash1_sparse),
     accesses_sparse, "L(3d + 4) + 2Jd + Nd + 2N",
     flops_sparse, "s N^2 (4d + 4) + L(3d + 8)",
     stated_theorem4, "O(Nd + s N^2 d^2 / M)"},
    {"flash2", "FlashAttention-2", "arXiv 2307.08691", LADDER_ATTENTION, BOTH(flash2),
     accesses_flash2, "2TNd + 2Nd + N",
     flops_flash2, "4N^2 d + 4N^2 + UN(d + 3) + N(d + 2)",
     stated_theorem2, "O(N^2 d^2 / M)"},
    {"decode-split", "Flash-Decoding", "Stanford CRFM, 2023-10-12", LADDER_DECODE,
     BOTH(decode_split),
     accesses_split, "2Nd + S(3d + 4) + d",
     flops_split, "N(5d + 7) + Sd + (S - 1)(3d + 10)", stated_2nd, "2Nd"},
    {"decode-unified", "Flash-Decoding++", "arXiv 2311.01282", LADDER_DECODE,
     BOTH(decode_unified),
     accesses_unified, "2Nd + S(3d + 2) + d",
     flops_unified, "N(4d + 5) + S(d + 1) + d", stated_2nd, "2Nd"},
    {"backward-standard", "standard backward", flash1_paper, LADDER_BACKWARD,
     BOTH(backward_standard),
     accesses_backward, "7N^2 + 8Nd", flops_backward, "8N^2 d + 4N^2",
     stated_theorem5, "Theta(Nd + N^2)"},
    {"backward-flash", "FlashAttention backward", flash1_paper, LADDER_BACKWARD,
     BOTH(backward_flash),
     accesses_recompute, "T(5Nd + 2N) + 5Nd",
     flops_recompute, "10N^2 d + 5N^2 + 2TNd", stated_theorem2, "Theta(N^2 d^2 / M)"},
    {NULL, NULL, NULL, LADDER_SOFTMAX, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL},
};
/* clang-format on */

int64_t ladder_out_size(const ladder_rung *rung, const ladder_problem *p)
{
    switch (rung->kind) {
    case LADDER_SOFTMAX:
        return p->N * p->N;
    case LADDER_DECODE:
        return p->d;
    case LADDER_BACKWARD:
        return 3 * p->N * p->d;
    default:
        return p->N * p->d;
    }
}
