/* Which tile an instance gets: pure functions of integers, tested without a GPU. Numbers: one
 * H200, docs/lab/README.md. */
#include "cuda/tile/tile.h"

#include "cuda/kern/launch.h"

#include <stdlib.h>
#include <string.h>

static int round_up(int x, int to)
{
    return (x + to - 1) / to * to;
}

int cu_padded(int64_t dim)
{
    return round_up((int)dim, 16);
}

int cu_padded_values(int64_t D, int64_t Dv, int bits)
{
    const int is_shared = cu_decode_parts((int)D, (int)Dv) > 1;
    return round_up((int)Dv, !is_shared ? 16 : bits < 8 ? 64 : 32);
}

/* sm_90a, bf16 and f16. Three warpgroups where the head dim leaves room for three outputs in
 * the register file (D64: 128 keys best, 2 groups 15-20 % slower), up to 96 where copies are
 * what tiles wait for. Later rungs take fewer keys, for mods that need registers of their
 * own. */
static int choice90(int D, int E, int rung, cu_tile *out)
{
    static const cu_tile split[] = {{3, 96, 2, 1, 1},
                                    {2, 128, 2, 1, 1},
                                    {2, 112, 2, 1, 1},
                                    {2, 64, 2, 1, 1},
                                    {1, 64, 2, 0, 1}};
    static const cu_tile small[] = {{3, 128, 2, 1, 1},
                                    {3, 112, 2, 1, 1},
                                    {3, 96, 2, 1, 1},
                                    {2, 128, 2, 1, 1},
                                    {2, 64, 2, 1, 1}};
    static const cu_tile middle[] = {
        {2, 128, 2, 1, 1}, {2, 112, 2, 1, 1}, {2, 64, 2, 1, 1}, {1, 64, 2, 0, 1}};
    static const cu_tile large[] = {{2, 64, 2, 1, 1}, {2, 48, 2, 1, 1}, {1, 48, 2, 0, 1}};
    const int dim = D > E ? D : E;
    const int is_split = dim > 64 && dim <= 96 && cu_splits_sectors(dim);
    const cu_tile *ladder = dim <= 64 ? small : is_split ? split : dim <= 128 ? middle : large;
    const int n = dim <= 64 || is_split ? 5 : dim <= 128 ? 4 : 3;
    if (rung >= n)
        return 0;
    *out = ladder[rung];
    return 1;
}

/* sm_80 and later: each warp holds Q, S and O of 16 rows in registers; two CTAs to a
 * multiprocessor fit the 163 KB of shared memory of an A100. */
static int choice80(int D, int E, int rung, cu_tile *out)
{
    static const cu_tile small[] = {{4, 64, 2, 0, 0}, {4, 32, 2, 0, 0}, {4, 16, 2, 0, 0}};
    const int first = (D > E ? D : E) > 128;
    if (first + rung >= 3)
        return 0;
    *out = small[first + rung];
    return 1;
}

/* f32: Q lies in shared memory, and probabilities take two registers each. The last tiles are
 * for GPUs of 99 KB and for wide heads. */
static int choice32(int D, int E, int rung, cu_tile *out)
{
    static const cu_tile ladder[] = {
        {4, 64, 2, 0, 0}, {4, 32, 2, 0, 0}, {4, 16, 2, 0, 0}, {2, 16, 2, 0, 0}};
    const int dim = D > E ? D : E, first = dim > 64;
    if (first + rung >= 4)
        return 0;
    *out = ladder[first + rung];
    return 1;
}

int cu_tile_choice(cu_family family, int D, int E, saccade_dtype dtype, int rung, cu_tile *out)
{
    int found = family == CU_SM90   ? choice90(D, E, rung, out)
                : family == CU_SM80 ? choice80(D, E, rung, out)
                                    : choice32(D, E, rung, out);
    if (found && dtype != SACCADE_BF16)
        out->is_lazy =
            0; /* p of f16 overflows at 2^16, far too early to go without a maximum */
    return found;
}

int cu_sm_of(const char *arch)
{
    return atoi(arch + strcspn(arch, "0123456789"));
}

/* Dynamic shared memory a CTA may have, by compute capability (CUDA C programming guide, table
 * of technical specifications). */
int cu_shared_most(int sm)
{
    return sm >= 90 && sm < 120 ? 232448 : sm == 80 || sm == 87 ? 166912 : 101376;
}

enum { SHARED_MOST = 232448, SPANS_MOST = 4096 };

/* Codes come in blocks of 32 keys to eight warps, which have more to do for each byte; later
 * rungs have four. */
static int choice_of_codes(int D, int E, int bits, int column_words, int rung, cu_tile *out)
{
    const int first = (D > E ? D : E) > 128;
    if (first + rung >= 2)
        return 0;
    *out = (cu_tile){.groups = 8 >> (first + rung), .keys = 32, .stages = 4};
    while (out->stages > 2
           && cu_decode_shared(out, CU_SPAN_ROWS, D, E, bits, column_words, SPANS_MOST)
                  > SHARED_MOST)
        out->stages--;
    return cu_decode_shared(out, CU_SPAN_ROWS, D, E, bits, column_words, SPANS_MOST)
           <= SHARED_MOST;
}

/* Four warps, each streaming 16 KB of K and V at a time through 2 or 3 stages; later rungs take
 * fewer keys. */
int cu_decode_choice(int D, int E, int bits, int column_words, int rung, cu_tile *out)
{
    if (bits < 16)
        return choice_of_codes(D, E, bits, column_words, rung, out);
    const int dim = D > E ? D : E, keys = dim <= 64 ? 64 : dim <= 128 ? 32 : 16;
    for (int i = 0; keys >> i >= 16; i++) {
        *out = (cu_tile){.groups = 4, .keys = keys >> i, .stages = 3};
        while (out->stages
               && cu_decode_shared(out, CU_SPAN_ROWS, D, E, bits, column_words, SPANS_MOST)
                      > SHARED_MOST)
            out->stages--;
        if (out->stages && rung-- == 0)
            return 1;
    }
    return 0;
}

int cu_decode_parts(int D, int E)
{
    return D > CU_LARGE_HEAD || E > CU_LARGE_HEAD ? 2 : 1;
}

int cu_decode_streams(const cu_tile *tile, int span_rows, int parts)
{
    return tile->groups * CU_SPAN_ROWS / span_rows / parts;
}

/* Of a block of 32 keys each of two warps makes the scores of 16. Spans are counted where they
 * are few: where there are more, each has a CTA to itself. */
static int large_choice(int D, int E, int bits, int column_words, int rung, cu_tile *out)
{
    enum { STAGES_MOST = 6 };
    *out = (cu_tile){.groups = 8, .keys = 32, .stages = STAGES_MOST};
    while (out->stages
           && cu_decode_shared(out, CU_WIDE_ROWS, D, E, bits, column_words, CU_LARGE_SPANS)
                  > SHARED_MOST)
        out->stages--;
    return rung == 0 && out->stages > 0;
}

/* Two streams of four warps, as many stages as there is room for. */
int cu_decode_wide_choice(int D, int E, int bits, int column_words, int rung, cu_tile *out)
{
    enum { STAGES_MOST = 6 };
    const int rows = CU_WIDE_ROWS;
    if (cu_decode_parts(D, E) > 1)
        return large_choice(D, E, bits, column_words, rung, out);
    if (bits < 16 || !cu_decode_choice(D, E, 16, column_words, rung, out))
        return 0;
    out->groups = 2 * rows / CU_SPAN_ROWS;
    out->stages = STAGES_MOST;
    while (out->stages
           && cu_decode_shared(out, rows, D, E, 16, column_words, SPANS_MOST) > SHARED_MOST)
        out->stages--;
    return out->stages >= 2;
}

/* Warps of three groups, and two blocks, as many as there is room for beside Q. */
int cu_latent_choice(int D, int E, int column_words, int rung, cu_tile *out)
{
    *out = (cu_tile){.groups = 12, .keys = 64, .stages = 2};
    if (rung || D <= CU_LARGE_HEAD || E > D || E < 128 || E % 128
        || cu_latent_shared(out, D, E, column_words, CU_LATENT_SPANS) > SHARED_MOST)
        return 0;
    return E % 256 ? 1 : 2;
}

/* Units of panels have two barriers each: what keys have beyond values, and products. */
int cu_latent_shared(const cu_tile *tile, int D, int E, int column_words, int64_t spans)
{
    const int units = (round_up(D, 64) > E) + E / (E % 256 ? 128 : 256);
    const int panels = (1 + tile->stages) * (round_up(D, 64) / 64) + 1;
    return panels * tile->keys * 128 + LATENT_SUMS + (2 * tile->stages * units + 2) * 8
           + 4 * tile->keys * column_words + (int)(spans + 1) * 4;
}

/* Two CTAs to a multiprocessor, each with half of 228 KB: a span begins and ends while another
 * one streams. More stages are no faster: docs/lab/086. */
int cu_decode_half_choice(int D, int E, int bits, int column_words, int rung, cu_tile *out)
{
    enum { HALF_MOST = (228 << 10) / 2 - 1024 };
    *out = (cu_tile){.groups = 4, .keys = 32, .stages = 2};
    return bits < 16 && rung == 0
           && cu_decode_shared(out, CU_SPAN_ROWS, D, E, bits, column_words, 0) <= HALF_MOST;
}

int cu_group(const saccade_sizes *s)
{
    return (int)(s->H / s->Hkv);
}

/* Tiles of packed rows of a KV head. */
static int64_t decode_tiles(const saccade_sizes *s, int span_rows)
{
    return (cu_group(s) * s->Q + span_rows - 1) / span_rows;
}

int64_t cu_decode_spans(const saccade_sizes *s, int span_rows)
{
    return s->B * s->Hkv * decode_tiles(s, span_rows);
}

int cu_finds_spans(const saccade_sizes *s)
{
    return cu_decode_spans(s, CU_SPAN_ROWS) * decode_tiles(s, CU_SPAN_ROWS) <= UINT32_MAX
           && s->B * s->Hkv * s->Hkv <= UINT32_MAX;
}

/* Of a group so large one query; more fill a prefill tile, but in wide spans only where a head
 * has many. */
int64_t cu_decode_rows_most(const saccade_sizes *s, int span_rows)
{
    enum { PACKED_MOST = 64, GROUP_MOST = 256, WIDE_MOST = 32 };
    const int group = cu_group(s);
    const int packed = PACKED_MOST / group, most = GROUP_MOST / group;
    const int wide = most < WIDE_MOST ? most : WIDE_MOST;
    if (span_rows == CU_SPAN_ROWS)
        return packed ? packed : most > 0;
    return packed > wide ? packed : wide;
}

int cu_decode_applies(const saccade_sizes *s, int span_rows)
{
    return s->Q <= cu_decode_rows_most(s, span_rows)
           && cu_decode_spans(s, span_rows) <= SPANS_MOST; /* counts lie in shared memory */
}

int cu_reading_ctas(int n_sm)
{
    const int even = n_sm / 32 * 32;
    return even * 20 >= n_sm * 19 ? even : n_sm;
}

int64_t cu_decode_pieces(int64_t KV)
{
    return KV > 0 ? (KV + PIECE_KEYS - 1) / PIECE_KEYS : 1;
}

/* Clusters of so many CTAs that are on the device at once: seven groups of 16 multiprocessors
 * are counted on; pairs find room anywhere. */
static int clusters_most(int n_sm, int size)
{
    return size == 1 ? n_sm : size == 2 ? n_sm / 2 - n_sm / 64 : n_sm / 18 * (16 / size);
}

int cu_decode_cluster(int n_sm, int spans, int blocks, int warps, int is_light, unsigned *grid)
{
    int size = 8;
    while (size > 1
           && (spans > clusters_most(n_sm, size) || size > (blocks + warps - 1) / warps))
        size--;
    const int each = (spans + n_sm - 1) / n_sm, clusters = (spans + each - 1) / each;
    const int ctas = clusters * size;
    *grid = (unsigned)ctas;
    if (each == 1
        && blocks / size <= 64) /* a second launch would take as long as a dozen blocks */
        return size;
    return ctas * 100 >= n_sm * (is_light ? 45 : 90) ? size : 0;
}

/* Bytes of a block of K and V: panels of 64 columns; or codes in rows of an odd number of 16
 * bytes, and 16 bytes of scales for each key. */
static int decode_stage(const cu_tile *tile, int D, int E, int bits)
{
    if (bits < 16)
        return tile->keys * 16 * ((D * bits / 128 | 1) + (E * bits / 128 | 1) + 1);
    return tile->keys * 128 * (round_up(D, 64) / 64 + round_up(E, 64) / 64);
}

int cu_decode_shared(const cu_tile *tile, int span_rows, int D, int E, int bits,
                     int column_words, int64_t spans)
{
    const int parts = cu_decode_parts(D, E);
    const int streams = cu_decode_streams(tile, span_rows, parts);
    const int barriers = span_rows > CU_SPAN_ROWS ? 2 : 1;
    const int stages = streams * tile->stages * (decode_stage(tile, D, E, bits) + 8 * barriers);
    const int reduce = parts > 1 ? 3 * span_rows * 16 + tile->groups / 2 * DECODE_PAIR_BYTES
                                 : streams * span_rows * ((E + 8) / 2 + 4) * 4 + span_rows * 16;
    const int columns = column_words ? tile->groups * tile->keys * column_words * 4 : 0;
    const int q = cu_is_q_shared(D, E) ? tile->groups / parts * 32 * D : 0;
    return stages + reduce + q + columns + 16 + (int)(spans + 1) * 4;
}

/* Small tiles: 64 rows of one team, and so many teams that others work while one waits. What
 * rows of documents and neighbourhoods see fits 96 keys more often than 64 (wide heads: 48), in
 * so few pieces that late offsets gain nothing. Later rungs are for mods that need registers of
 * their own. */
int cu_small_choice(int D, int E, int is_general, int rung, cu_tile *out)
{
    static const cu_tile ladder[2][2][4] = {
        {{{1, 64, 6, 0, 1}, {1, 48, 6, 0, 1}, {1, 32, 6, 0, 1}},
         {{1, 96, 4, 0, 0}, {1, 80, 4, 0, 0}, {1, 64, 4, 0, 0}, {1, 32, 4, 0, 0}}},
        {{{1, 64, 3, 0, 1}, {1, 48, 4, 0, 1}, {1, 32, 4, 0, 1}},
         {{1, 48, 4, 0, 0}, {1, 32, 4, 0, 0}}}};
    const int dim = D > E ? D : E;
    if (dim > 128 || rung >= 4)
        return 0;
    *out = ladder[dim > 64][is_general != 0][rung];
    return out->keys > 0;
}

/* Two teams leave registers for the scores of two pieces, and memory for longer ones. */
int cu_pair_choice(int D, int E, int rung, cu_tile *out)
{
    static const cu_tile narrow = {1, 128, 5, 0, 1}, wide = {1, 96, 4, 0, 1};
    const int dim = D > E ? D : E;
    *out = dim > 64 ? wide : narrow;
    return dim <= 128 && rung == 0;
}

int cu_small_buffers(int D, int E)
{
    return D <= 64 && E <= 64 ? 2 : 1;
}

int cu_small_shared(const cu_tile *tile, int teams, int D, int E, int column_words)
{
    const int dim = D > E ? D : E, buffers = cu_small_buffers(D, E);
    const int team =
        128 * (round_up(D, 64) * buffers + tile->stages * tile->keys * (round_up(dim, 64) / 64))
        + 16 * (buffers + 2 * tile->stages) + 4 * tile->keys * column_words;
    return teams * team + 16;
}

/* All keys of a head, in as few pieces as a warpgroup has registers for; later rungs have more
 * pieces. */
int cu_few_choice(int D, int E, int64_t KV, int rung, cu_tile *out)
{
    const int most = D > 64 || E > 64 ? 80 : 96;
    const int pieces = (int)((KV + most - 1) / most) + rung;
    if (KV < 1 || KV > FEW_KEYS || rung > 2 || D > 128 || E > 128)
        return 0;
    out->groups = 1;
    out->stages = pieces;
    out->keys = round_up((int)((KV + pieces - 1) / pieces), 16);
    return cu_few_buffers(out, D, E) > 0;
}

static int few_keys_bytes(const cu_tile *tile, int D, int E)
{
    const int panels = (round_up(D, 64) + round_up(E, 64)) / 64;
    return tile->stages * (tile->keys * 128 * panels + 16) + 8;
}

static int few_queries_bytes(int teams, int D)
{
    return teams * FEW_QUERIES * (128 * round_up(D, 64) + 16);
}

int cu_few_buffers(const cu_tile *tile, int D, int E)
{
    const int fit = (SHARED_MOST - few_queries_bytes(3, D)) / few_keys_bytes(tile, D, E);
    return fit < 2 ? fit : 2;
}

int cu_few_shared(const cu_tile *tile, int teams, int D, int E)
{
    return few_queries_bytes(teams, D)
           + cu_few_buffers(tile, D, E) * few_keys_bytes(tile, D, E);
}

/* Twice as many where tiles have little to do between parts: docs/lab/054. */
int cu_part_keys(const cu_tile *main, int dim)
{
    const int least = dim > 64 ? PART_KEYS : 2 * PART_KEYS;
    return (least + main->keys - 1) / main->keys * main->keys;
}

/* One warpgroup, and as many blocks on their way as there is room for: memory is what it waits
 * for. */
cu_tile cu_part_tile(const cu_tile *main, int D, int E, int others)
{
    cu_tile tile = {.groups = 1, .keys = main->keys, .stages = 6};
    while (tile.stages > 2 && cu_tile_shared(CU_SM90, &tile, D, E) + others > SHARED_MOST)
        tile.stages--;
    return tile;
}

/* By mma.sync: O of such heads takes half the registers, and Q would take the rest. */
int cu_is_q_shared(int D, int E)
{
    return D > 128 || E > 128;
}

/* f32: O of such heads is too wide for one warp. */
int cu_parts(int E)
{
    return E > 128 ? 2 : 1;
}

int cu_keys_in_both(int64_t page, int tile_keys)
{
    int64_t a = tile_keys, b = page;
    while (b) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return (int)a;
}

/* A warp of decode copies 16 keys of 256 bytes faster than tensor copies do, but not 64 of 128
 * bytes by 16 (docs/lab/035). Forward is compiled for one of the two ways, and three warpgroups
 * leave producers no registers for it. */
int cu_gathers(int is_decode, const cu_tile *tile, int box)
{
    const int fewer = is_decode && tile->keys <= 32 ? 32 : 16;
    return box < fewer && box < tile->keys && (is_decode || tile->groups < 3);
}

int cu_tile_rows(cu_family family, const cu_tile *tile)
{
    return tile->groups * (family == CU_SM90 ? 64 : 16);
}

int cu_tile_threads(cu_family family, const cu_tile *tile, int E)
{
    if (family == CU_F32)
        return tile->groups * 32 * cu_parts(E);
    return family == CU_SM90 ? (tile->groups + 1) * 128 : tile->groups * 32;
}

/* panels of 32 columns; scores exchanged by the warps that share rows */
static int shared32(const cu_tile *tile, int rows, int D, int E)
{
    const int panels_d = round_up(D, 32) / 32, panels_e = round_up(E, 32 * cu_parts(E)) / 32;
    const int exchange = cu_parts(E) > 1 ? rows * tile->keys * 4 : 0;
    return 128 * (panels_d * rows + tile->stages * tile->keys * (panels_d + panels_e))
           + exchange;
}

int cu_dense_shared(const cu_tile *tile, int bytes)
{
    const int rows = cu_tile_rows(CU_SM90, tile);
    return bytes ? CU_DENSE_STAGES * (rows * tile->keys * bytes + 16) : 0;
}

/* Two blocks; diagonals in two copies. */
int cu_share_bytes(int keys, int of_keys, int of_diagonals)
{
    return 2 * 4 * (of_keys * keys + of_diagonals * 2 * (keys + 64));
}

int cu_tile_shared(cu_family family, const cu_tile *tile, int D, int E)
{
    const int rows = cu_tile_rows(family, tile);
    if (family == CU_SM90) { /* panels of 64 columns, 128 bytes a row; then barriers */
        const int panels_d = round_up(D, 64) / 64, panels_e = round_up(E, 64) / 64;
        const int barriers = 7 + 4 * tile->stages, turns = 8 + 32;
        return 128 * (panels_d * rows + tile->stages * tile->keys * (panels_d + panels_e))
               + 8 * barriers + turns;
    }
    if (family == CU_F32)
        return shared32(tile, rows, D, E);
    const int panels = round_up(D, 64) / 64 + round_up(E, 64) / 64;
    const int q = cu_is_q_shared(D, E) ? tile->groups * 32 * D : 0;
    return tile->stages * tile->keys * 128 * panels + q;
}
