/* amx_trap.h: AMX code on machines without AMX. Its instructions are illegal there; a handler
 * of SIGILL does what they would have done, bit for bit, and goes on behind them. */
#ifndef SACCADE_TESTS_AMX_TRAP_H
#define SACCADE_TESTS_AMX_TRAP_H

#include <stdint.h>

/* From here to amx_trap_end the library finds the level AMX. 0, and nothing changes: the
 * machine has neither AMX nor AVX512-BF16, or the build no decoder. Tests of cmocka call it
 * themselves: between tests cmocka takes the signal back. */
int amx_trap_begin(void);
void amx_trap_end(void);
/* Instructions done by the handler since the program began; 0 on a machine with AMX. */
int64_t amx_trap_count(void);

#endif
