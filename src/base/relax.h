/* What a thread does between two looks at memory that another is about to write. */
#ifndef SACCADE_BASE_RELAX_H
#define SACCADE_BASE_RELAX_H

static inline void cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
