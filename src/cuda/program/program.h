/* program.h: the programs of a plan: one file of kern/ each, with the constants of a form. */
#ifndef SACCADE_CUDA_PROGRAM_PROGRAM_H
#define SACCADE_CUDA_PROGRAM_PROGRAM_H

#include "cuda/driver/driver.h"
#include "cuda/emit/mod_text.h"
#include "cuda/kern/launch.h"
#include "cuda/tile/tile.h"

/* A tensor as kernels take it that go over all its elements: dimensions that lie whole in the
 * next outer one are one with it, so that a dense tensor has one, and those of length 1 are
 * none. */
static inline cu_shape cu_shape_of(const saccade_tensor *t)
{
    cu_shape shape = {.rank = 0};
    for (int32_t d = 0; d < t->rank; d++) {
        const int last = shape.rank - 1;
        const int is_one = last >= 0 && shape.stride[last] == t->stride[d] * t->shape[d]
                           && shape.size[last] * t->shape[d] <= INT32_MAX;
        if (t->shape[d] == 1)
            continue;
        const int at = is_one ? last : shape.rank++;
        shape.size[at] = (int)(is_one ? shape.size[at] * t->shape[d] : t->shape[d]);
        shape.stride[at] = t->stride[d];
    }
    return shape;
}

/* ---- programs.c: what a plan compiles and loads ---- */

/* What a program does; choose_kernel.c picks a run's program, launch.c starts it. */
typedef enum cu_operation {
    CU_OP_DECODE,   /* few queries, heads of a group together */
    CU_OP_SMALL,    /* rows that see few keys, in tiles of one head */
    CU_OP_PARTS,    /* few queries, heads together, with the bits that they have among many */
    CU_OP_FORWARD,  /* any number of queries, in tiles of one head */
    CU_OP_KEYS,     /* keys brought to where another program of the run reads them */
    CU_OP_AGAIN,    /* rows that another program of the run could not finish */
    CU_OP_BACKWARD, /* a step of a backward run: backward_launch.c */
    CU_OPERATIONS
} cu_operation;

/* The rows of cu_program_kinds; those of forward in the order in which a run tries them. */
typedef enum cu_program {
    CU_DECODE_HALF,    /* few queries on codes, two CTAs to a multiprocessor (sm_90a) */
    CU_LATENT,         /* large heads whose values are columns of their keys (sm_90a) */
    CU_DECODE_WIDE,    /* queries of which a group has more rows than a warp takes (sm_90a) */
    CU_DECODE,         /* few queries (sm_90a) */
    CU_DENSE,          /* tensors that mods read come as tiles (sm_90a) */
    CU_FEW,            /* heads with few keys, which stay while their queries pass (sm_90a) */
    CU_PAIR,           /* so few rows that a multiprocessor has two tiles at a time (sm_90a) */
    CU_SMALL,          /* rows that see few keys (sm_90a) */
    CU_PARTS,          /* few queries where a row's bits are its own (sm_90a) */
    CU_ONE_PIECE,      /* any number of queries, after CU_COLLECT (sm_90a) */
    CU_MAIN,           /* any number of queries */
    CU_EXACT,          /* CU_MAIN with exact offsets and row maxima */
    CU_UNALIGNED,      /* rows that tensor copies do not take (sm_90a) */
    CU_CAREFUL,        /* rows to be made again */
    CU_COLLECT,        /* keys of small pages into one piece (sm_90a) */
    CU_BWD_TILES,      /* dK, dV and sums of dQ by tiles of keys (sm_90a) */
    CU_BWD_SHORT,      /* CU_BWD_TILES by smaller tiles, for runs of few (sm_90a) */
    CU_BWD_DENSE,      /* CU_BWD_TILES where tensors that mods read come as tiles (sm_90a) */
    CU_BWD_FEW,        /* without sums of dQ, where rows see few keys (sm_90a) */
    CU_BWD_WIDE,       /* without sums of dQ: heads wider than 128, slopes without a bound */
    CU_BWD_F32,        /* f32, head dims to 128, without sums of dQ (sm_90a) */
    CU_BWD_SPLIT,      /* Q, K, V and dO in bf16 numbers for CU_BWD_F32 */
    CU_BWD_PLAIN,      /* dK and dV, then dQ, by CTAs that own them */
    CU_BWD_PREPARE,    /* what every row brings, and bounds of K and V */
    CU_BWD_FINISH,     /* dQ from its sums */
    CU_BWD_JOIN,       /* dK and dV of heads whose queries are cut into parts */
    CU_BWD_SINKS,      /* gradients of sinks */
    CU_BWD_CAPTURES,   /* gradients of captures */
    CU_BWD_ELEMENTS,   /* those of dense captures that batches or heads share */
    CU_BWD_ELEMENTS90, /* the same by larger tiles, where it can (sm_90a) */
    CU_BWD_PAGES,      /* keys in chunks into one piece, and sums over what chunks share */
    CU_PROGRAMS
} cu_program;

typedef enum cu_maxima { CU_ANY_RUN, CU_WITHOUT_MAXIMA, CU_WITH_MAXIMA } cu_maxima;

typedef struct cu_state cu_state;
typedef struct cu_program_kind cu_program_kind;

/* The generated headers of an instance: cfg.cuh, wgmma.cuh, and mod.cuh, which is borrowed. */
typedef struct cu_headers {
    strbuf config, products;
    const char *mod;
} cu_headers;

/* Everything that tells one program from another. A program is one file of kern/ with the
 * constants of its form; a plan holds those that choose() finds a form for. */
struct cu_program_kind {
    const char *name; /* as explain prints it */
    cu_operation operation;
    const char *kernel[CU_FAMILIES]; /* by the form's family */
    const char *file;                /* in kern/, without .cu; NULL: the kernel's name */
    const char *other;               /* a second kernel in that file, or NULL */
    /* The rung'th form, best first; 0 past the last one. */
    int (*choose)(const cu_state *s, const plan_problem *p, int rung, cu_form *out);
    void (*write)(const cu_state *s, const plan_problem *p, const cu_program_kind *kind,
                  const cu_form *form, cu_headers *out);
    int follows_main;  /* compiled for CU_MAIN's tile, and again when that changes */
    int follows_tiles; /* compiled once it is known whether the plan has CU_BWD_TILES */
    int is_optional; /* left out where every form spills much or waits: others take its runs */
    int spill_most;  /* bytes up to which a form that spills is taken before a smaller one */
    int may_be_lazy, has_maxima, is_packed; /* the constants CFG_LAZY, CFG_ROWMAX, CFG_PACKED */
    int has_one_span;  /* decode: a CTA takes one, CFG_ONE_SPAN */
    int has_one_piece; /* keys lie in one piece, whatever the problem says: CFG_CHUNKS is 0 */
    int wants_alignment;                    /* where CU_MAIN copies by TMA */
    cu_maxima runs;                         /* which runs it takes */
    /* Dynamic shared memory to ask the driver for, bytes; NULL: none. */
    int (*shared)(const cu_state *s, const plan_problem *p, const cu_form *form);
    int other_has_shared; /* the second kernel asks for as much */
};

extern const cu_program_kind cu_program_kinds[CU_PROGRAMS];

/* A program of a plan. */
typedef struct cu_loaded {
    cu_form form; /* groups 0: the plan has no such program */
    int rung;     /* forms before it in choose's order */
    cu_image image;
    void *library, *kernel, *other;
} cu_loaded;

struct cu_state {
    cu_family family; /* of CU_MAIN */
    cu_mod_text facts, backward_facts;
    char arch[16];
    char *mod_text, *backward_text; /* backward_text: NULL where no gradient is wanted */
    cu_loaded programs[CU_PROGRAMS];
    _Atomic uint64_t ready; /* bit per device: attributes set */
    int is_present;         /* there is a device for arch */
    cu_ptr row_shift;       /* on row_device: where rows stand, see row_parts.c; 0: none */
    int row_device, has_rows, is_ragged, is_in_pieces;
    int has_large_heads;  /* CU_LARGE_HEAD: the plan has decode alone */
    int is_like_another;  /* forward's tiles are those of another problem: cu_compile_like */
    int part_dim;         /* batch_invariant for all runs: the larger head dim; else 0 */
    int has_fixed_pieces; /* of keys in decode: batch_invariant for short runs */
    cu_device device; /* what the plan was tuned for */
    /* SACCADE_CUDA_TILES: 's' small ones wherever they can be, 'p' these by two teams where
     * they can be, 'l' none, or 0 */
    char tiles;
    int stays_decode; /* "decode": runs that decode takes leave it for no tile */
};

/* Dynamic shared memory of a CTA where the plan's code runs: of its target, and of the device
 * that is there, which may be a later one with less. */
static inline int cu_shared_there(const cu_state *s)
{
    const int target = cu_shared_most(cu_sm_of(s->arch)), here = cu_shared_most(s->device.sm);
    return s->is_present && here < target ? here : target;
}

saccade_status cu_load_programs(cu_state *s, const cu_driver *driver, saccade_error *err);
void cu_free_programs(cu_state *s);

/* ---- program_text.c ---- */

/* A program's constant, CFG_<name> in its text; the header of all of them. */
typedef struct cu_constant {
    const char *name;
    int value;
} cu_constant;
void cu_put_constants(const cu_constant *rows, size_t n, strbuf *out);
/* The generated headers of a forward program: cu_program_kind.write. */
void cu_write_forward(const cu_state *s, const plan_problem *p, const cu_program_kind *kind,
                      const cu_form *form, cu_headers *out);
/* Whether limits of rows between two others lie between theirs. */
int cu_is_monotone(const pass_limits *limits);
/* CFG_CODES, the dtype of quantised K and V (kern/codes.cuh); 0: they are floats. */
int cu_codes(const plan_problem *p);
/* Bits of an element of K and V. */
int cu_key_bits(const plan_problem *p);
/* Whether rows of codes are whole pieces of 16 bytes. */
int cu_has_whole_codes(const plan_problem *p);
/* Columns of V as forward's products take them. */
int cu_value_columns(const plan_problem *p);
/* Whether decode copies codes as tensors: rows of 128 bytes, keys in one piece. */
int cu_copies_codes_by_boxes(const cu_state *s, const plan_problem *p);
/* One program in one form, compiled for the state's architecture or taken from the cache. */
saccade_status cu_compile_instance(const cu_state *s, const plan_problem *p, cu_program which,
                                   const cu_form *form, cu_image *out, saccade_error *err);

/* ---- program_compile.c ---- */

/* Compiles every program of the plan, side by side; a form that spills gives way to the next
 * smaller one as far as there is one. needs: the texts of the mods. */
saccade_status cu_compile_programs(cu_state *s, const plan_problem *p, saccade_error *err);
/* cu_compile_programs for a plan whose results are another problem's bit for bit, as those of
 * pages are of keys in one piece: forward's programs take the tiles that the other's take,
 * whatever they spill here. other: a state of that problem with its text; its programs are
 * found, and are the caller's to free. */
saccade_status cu_compile_like(cu_state *s, const plan_problem *p, cu_state *other,
                               const plan_problem *of_other, saccade_error *err);
/* cu_compile_programs for backward's programs alone. */
saccade_status cu_compile_backward(cu_state *s, const plan_problem *p, saccade_error *err);

#endif
