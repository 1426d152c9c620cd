/* machine.h: what a picture says of where and when its numbers were measured. */
#ifndef CLI_MACHINE_H
#define CLI_MACHINE_H

#include <stddef.h>

enum { MACHINE_BYTES = 160 };

/* "AMD EPYC 9B45, 2026-11-22": the processor by its own name, and today. */
void machine_and_date(char out[MACHINE_BYTES]);

#endif
