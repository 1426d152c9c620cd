/* Threads and bytes of shared memory of backward's programs, as the kernels lay them out. */
#include "cuda/backward/cuda_backward.h"

int cu_backward_query_threads(const cu_form *f)
{
    return f->backward.stay * 2 + (f->backward.registers[0] ? 128 : 32);
}

int cu_backward_threads(const cu_form *f)
{
    if (f->backward.value_stages && !f->backward.registers[0])
        return f->tile.groups * 128 + 32;
    return f->family == CU_SM90 ? (f->tile.groups + 1 + f->backward.has_helpers) * 128
                                : f->tile.groups * f->backward.parts * 32;
}

static int panels(int dim)
{
    return (dim + 63) / 64;
}

/* as carve() of bwd_shared.cuh lays it out */
static int tile_shared(const cu_form *f, int columns)
{
    const int keys = f->tile.keys, stages = f->tile.stages;
    const int frees_early = f->backward.has_helpers && stages == 2;
    const int stats = 2 * BWD_ROWS * 4, steps = 10 * 16;
    const int barriers = 8 * (9 + (2 + frees_early) * stages);
    const int stagings = 2 * BWD_ROWS * 64 * 4, lines = keys * 4 + 96 + 160;
    const int dense = CU_DENSE_STAGES * BWD_ROWS * keys * f->dense_bytes;
    return columns * keys * 128 + stages * (columns * BWD_ROWS * 128 + stats) + 2 * keys * 128
           + stagings + dense + steps + lines + barriers;
}

/* as keys_carve() of bwd_keys_arena.cuh lays it out */
static int wide_key_bytes(const cu_form *f, int d, int e)
{
    const int stages = f->tile.stages, weights = 64 * BWD_ROWS * 3; /* of 3 bytes at most */
    const int step = stages * (16 + 2 * BWD_ROWS * 4), barriers = 8 * (6 + 4 * stages);
    return (1 + stages) * (d + e) + 2 * weights + step + barriers;
}

/* as queries_carve() of bwd_wide_queries.cuh does */
static int wide_query_bytes(const cu_form *f, int d, int e)
{
    const int stages = f->tile.stages, values = f->backward.value_stages;
    const int own = f->backward.stay / 64, barriers = 8 * (2 + 2 * stages + 2 * values);
    return (own + stages) * d + (own + values) * e + stages * 16 + barriers;
}

static int larger(int a, int b)
{
    return a > b ? a : b;
}

/* as elements_carve() of bwd_elements90.cu lays it out; pairs of tiles in flight: stages */
static int elements90_shared(const cu_form *f, int panels)
{
    const int tile = (f->backward.stay + f->tile.keys) * 128, visits = (f->tile.stages + 2) / 2;
    return f->tile.stages * (panels * tile + 2 * 8)
           + f->backward.stay * f->tile.keys * f->backward.kept
           + visits * (2 * f->backward.stay * 4 + 16);
}

static int wide_shared(const cu_form *f, int D, int E)
{
    const int tile = 64 * 128, d = panels(D) * tile, e = panels(E) * tile;
    return larger(wide_key_bytes(f, d, e), wide_query_bytes(f, d, e));
}

/* as the arenas of bwd_f32_keys.cuh and bwd_f32_queries.cuh lie */
static int f32_key_bytes(const cu_form *f, int columns)
{
    const int rows = f->backward.rows, stages = f->tile.stages;
    const int step = stages * (16 + 2 * rows * 4), barriers = 8 * (6 + 4 * stages);
    return 3 * columns * 128 * (64 + stages * rows) + 2 * 64 * rows * 4 + step + barriers;
}

static int f32_query_bytes(const cu_form *f, int columns)
{
    const int stages = f->backward.value_stages;
    return 3 * columns * 128 * (64 + stages * f->backward.rows) + stages * 16
           + 8 * (1 + 3 * stages);
}

int cu_backward_query_shared(const cu_form *f, int D, int E)
{
    if (cu_backward_is_f32_wgmma(f))
        return f32_query_bytes(f, panels(D) + panels(E));
    const int tile = 64 * 128;
    return wide_query_bytes(f, panels(D) * tile, panels(E) * tile);
}

/* of 32 columns: each part has its own */
static int panels32(int dim, int parts)
{
    return (dim + 32 * parts - 1) / (32 * parts) * parts;
}

static int pass_shared(const cu_form *f, int columns)
{
    const int rows = f->backward.rows, stages = f->tile.stages, keys = f->tile.keys;
    if (f->backward.blocks)
        return columns * (BWD_ROWS + keys) * 128 * stages + BWD_ROWS * keys * f->backward.kept;
    const int stats = (keys + stages * rows) * 8;
    const int sums = (keys * (rows + 1) + keys + rows + 4 * rows + 4 + 4 * CU_READS)
                     * 4; /* captures' scratch */
    return columns * (keys + stages * rows) * 128 + (f->backward.is_captures ? sums : stats);
}

/* bytes of the pieces of a block that passes, of whole threads */
static int piece_bytes(const cu_form *f, int dim)
{
    const int threads = cu_backward_threads(f);
    return (f->backward.rows * dim / 8 + threads - 1) / threads * threads * 32;
}

/* three copies of the tiles, and a block on its way */
static int thirds_shared(const cu_form *f, int D, int E)
{
    const int rows = f->backward.rows, stats = (f->tile.keys + f->tile.stages * rows) * 8;
    return 3 * 2 * (f->tile.keys + rows) * 128 + piece_bytes(f, D) + piece_bytes(f, E) + stats;
}

int cu_backward_shared_bytes(const cu_form *f, int D, int E)
{
    const int columns = panels(D) + panels(E);
    if (cu_backward_is_f32_wgmma(f))
        return larger(f32_key_bytes(f, columns), f32_query_bytes(f, columns));
    if (cu_backward_is_elements90(f))
        return elements90_shared(f, panels(larger(D, E)));
    if (f->backward.is_thirds)
        return thirds_shared(f, D, E);
    if (f->backward.value_stages)
        return wide_shared(f, D, E);
    if (f->family == CU_F32)
        return pass_shared(f, panels32(D, f->backward.parts) + panels32(E, f->backward.parts));
    return f->family == CU_SM90 ? tile_shared(f, columns) : pass_shared(f, columns);
}
