/* SIGILL as a slow AMX unit: Zydis decodes, amx_tiles.h's emulation computes on tiles of this
 * thread, the saved registers give addresses and go on behind the instruction.
 *
 * As the processor does, it takes no tile instruction before ldtilecfg and no product of a tile
 * with itself; and it takes only the library's one configuration, all tiles whole. What it does
 * not take is illegal for good: the default action ends the program there.
 * In the handler: memory of its own thread, no call that is not safe there (Intel SDM, vol. 2,
 * AMX; Zydis allocates nothing while decoding). */
#include "support/amx_trap.h"

#include "base/cpu_features.h"
#include "saccade_config.h"

#if defined(__linux__) && defined(__x86_64__) && HAVE_ZYDIS && HAVE_LEVEL_AMX

#include "cpu/kernels/amx_tiles.h"

#include <Zydis/Zydis.h>
#include <signal.h>
#include <stdatomic.h>
#include <ucontext.h>

static ZydisDecoder decoder;
static struct sigaction before;
static cpu_features found; /* what the machine has in truth */
static int is_set;
static atomic_llong n_done;
static _Thread_local int is_configured;

/* One trapped instruction. */
typedef struct trap {
    ZydisDecodedInstruction it;
    ZydisDecodedOperand operands[ZYDIS_MAX_OPERAND_COUNT];
    const greg_t *gregs;
} trap;

/* ---- operands ---- */

static int64_t general(const trap *t, ZydisRegister r)
{
    static const int place[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                  REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                  REG_R12, REG_R13, REG_R14, REG_R15};
    if (r == ZYDIS_REGISTER_NONE)
        return 0;
    if (r == ZYDIS_REGISTER_RIP)
        return t->gregs[REG_RIP] + t->it.length;
    return t->gregs[place[r - ZYDIS_REGISTER_RAX]];
}

/* The memory operand without its index, which is the stride of tiles. */
static char *address(const trap *t, int operand)
{
    const ZydisDecodedOperandMem *m = &t->operands[operand].mem;
    return (char *)(intptr_t)(general(t, m->base)
                              + (m->disp.has_displacement ? m->disp.value : 0));
}

static int64_t stride(const trap *t, int operand)
{
    const ZydisDecodedOperandMem *m = &t->operands[operand].mem;
    return general(t, m->index) * m->scale;
}

static int tile(const trap *t, int operand)
{
    return (int)t->operands[operand].reg.value - ZYDIS_REGISTER_TMM0;
}

/* ---- instructions; each returns 0 where the processor would refuse ---- */

static int configure(const char *from)
{
    tile_config asked;
    memcpy(&asked, from, sizeof asked);
    for (int i = 0; i < N_TILES; i++)
        if (asked.row_bytes[i] != TILE_BYTES || asked.rows[i] != TILE_ROWS)
            return 0;
    if (asked.palette != 1 || asked.start_row != 0)
        return 0;
    memset(cpu_emulated_tiles, 0, sizeof cpu_emulated_tiles);
    is_configured = 1;
    return 1;
}

static int product(const trap *t)
{
    const int c = tile(t, 0), a = tile(t, 1), b = tile(t, 2);
    if (a == b || a == c || b == c)
        return 0;
    tile_dot(c, a, b);
    return 1;
}

static int do_instruction(const trap *t)
{
    if (t->it.mnemonic == ZYDIS_MNEMONIC_LDTILECFG)
        return configure(address(t, 0));
    if (t->it.mnemonic == ZYDIS_MNEMONIC_TILERELEASE) {
        is_configured = 0;
        return 1;
    }
    if (!is_configured)
        return 0;
    switch (t->it.mnemonic) {
    case ZYDIS_MNEMONIC_TILEZERO:
        memset(&cpu_emulated_tiles[tile(t, 0)], 0, sizeof cpu_emulated_tiles[0]);
        return 1;
    case ZYDIS_MNEMONIC_TILELOADD:
    case ZYDIS_MNEMONIC_TILELOADDT1:
        tile_load(tile(t, 0), address(t, 1), stride(t, 1));
        return 1;
    case ZYDIS_MNEMONIC_TILESTORED:
        tile_store(tile(t, 1), address(t, 0), stride(t, 0));
        return 1;
    case ZYDIS_MNEMONIC_TDPBF16PS:
        return product(t);
    default:
        return 0;
    }
}

/* Does the instruction that rip points to, and steps over it. */
static int do_next(greg_t *gregs)
{
    enum { MOST = 15 }; /* bytes of an instruction */
    trap t = {.gregs = gregs};
    if (ZYAN_FAILED(ZydisDecoderDecodeFull(&decoder, (const void *)gregs[REG_RIP], MOST, &t.it,
                                           t.operands))
        || !do_instruction(&t))
        return 0;
    gregs[REG_RIP] += t.it.length;
    atomic_fetch_add_explicit(&n_done, 1, memory_order_relaxed);
    return 1;
}

/* A signal costs more than what it is for: tile instructions in a row take one. */
static void on_illegal(int signal_number, siginfo_t *info, void *context)
{
    greg_t *gregs = ((ucontext_t *)context)->uc_mcontext.gregs;
    (void)info;
    if (!do_next(gregs)) {
        signal(signal_number, SIG_DFL);
        return;
    }
    while (do_next(gregs))
        ;
}

/* ---- on and off ---- */

int amx_trap_begin(void)
{
    cpu_features *f = (cpu_features *)cpu_features_get(); /* the library's own, not const */
    struct sigaction action = {.sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO};
    if (f->level == CPU_AMX)
        return 1;
    if (f->level < CPU_AVX512 || !f->has_avx512_bf16 || !f->has_avx512_vbmi
        || ZYAN_FAILED(
            ZydisDecoderInit(&decoder, ZYDIS_MACHINE_MODE_LONG_64, ZYDIS_STACK_WIDTH_64))
        || sigaction(SIGILL, &action, &before) != 0)
        return 0;
    found = *f;
    f->has_amx_tile = f->has_amx_bf16 = true;
    f->level = CPU_AMX;
    is_set = 1;
    return 1;
}

void amx_trap_end(void)
{
    if (!is_set)
        return;
    *(cpu_features *)cpu_features_get() = found;
    sigaction(SIGILL, &before, NULL);
    is_set = 0;
}

int64_t amx_trap_count(void)
{
    return atomic_load(&n_done);
}

#else

int amx_trap_begin(void)
{
    return HAVE_LEVEL_AMX && cpu_features_get()->level == CPU_AMX;
}

void amx_trap_end(void)
{
}

int64_t amx_trap_count(void)
{
    return 0;
}

#endif
