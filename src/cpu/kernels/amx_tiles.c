/* amx_tiles.c: the registers of amx_tiles.h where they are plain memory. */
#include "cpu/kernels/amx_tiles.h"

_Thread_local emulated_tile cpu_emulated_tiles[N_TILES];
