/* room.h: workspaces of runs. */
#ifndef SACCADE_TESTS_ROOM_H
#define SACCADE_TESTS_ROOM_H

#include <stdlib.h>

/* Memory for a workspace of so many bytes, rounded up to whole 64: *whole. The caller frees
 * it. */
static inline void *room(size_t bytes, size_t *whole)
{
    *whole = (bytes + 63) / 64 * 64;
    void *made = aligned_alloc(64, *whole);
    assert_non_null(made);
    return made;
}

#endif
