/* Cache of generated code on disk: one file per key, safe against crashes, other processes and
   damage. Lives in $SACCADE_CACHE_DIR, else $XDG_CACHE_HOME/saccade, else ~/.cache/saccade. */
#ifndef SACCADE_BASE_FILECACHE_H
#define SACCADE_BASE_FILECACHE_H

#include "base/status.h"

#include <stdbool.h>

/* reads an entry into new memory (caller frees). false: not there, damaged, or not this user's;
   all three are the same to the caller, who makes the entry anew. */
bool filecache_get(const char *key, void **bytes, size_t *size);

/* writes an entry aside, syncs, renames: readers see the old one or the new one, whole.
   key: 1..128 of letters, digits, '-', '_', and '.' but not first. */
saccade_status filecache_put(const char *key, const void *bytes, size_t size,
                             saccade_error *err);

#endif
