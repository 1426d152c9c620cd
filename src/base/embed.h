/* Text files that the build turns into C sources, so that the library needs no files at run
   time (cmake/embed_text.cmake). Tables end with a NULL name. */
#ifndef SACCADE_BASE_EMBED_H
#define SACCADE_BASE_EMBED_H

#include <stddef.h>

typedef struct embedded_text {
    const char *name; /* file name without folders */
    const char *text; /* 0-terminated */
    size_t bytes;     /* without the terminator */
} embedded_text;

extern const embedded_text mod_prelude_files[]; /* src/mod/prelude.sac */
extern const embedded_text cuda_kern_files[];   /* src/cuda/kern/ */

#endif
