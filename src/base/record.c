/* Public structs that may grow, in and out of the library. A caller compiled against an older
   header gives a smaller struct, against a newer one a larger; size, the first member, says
   which. A member unknown here that is not 0 asks for something this library cannot do. */
#include "base/record.h"

#include "base/status.h"

#include <string.h>

enum { SIZE_MAX_SANE = 1 << 16 }; /* no struct of the header comes near; garbage does */

saccade_status record_check_size(const void *given, const char *name, saccade_error *err)
{
    size_t size;
    FAIL_AT(!given, SACCADE_EINVAL, name, 0, 0, "got NULL, expected a struct");
    memcpy(&size, given, sizeof size);
    FAIL_AT(size < sizeof size || size > SIZE_MAX_SANE || size % sizeof size, SACCADE_EINVAL,
            name, 0, 0, "got size %zu, expected the one its _init function writes", size);
    return SACCADE_OK;
}

saccade_status record_read(void *own, size_t own_bytes, const void *given, const char *name,
                           saccade_error *err)
{
    const unsigned char *bytes = given;
    size_t size;
    TRY(record_check_size(given, name, err));
    memcpy(&size, given, sizeof size);
    for (size_t i = own_bytes; i < size; i++)
        FAIL_AT(bytes[i], SACCADE_EINVAL, name, 0, 0,
                "got a member at byte %zu of %zu, expected 0 past byte %zu: the caller was "
                "built for a newer saccade than %s",
                i, size, own_bytes, saccade_version());
    memcpy((unsigned char *)own + sizeof size, bytes + sizeof size,
           (size < own_bytes ? size : own_bytes) - sizeof size);
    return SACCADE_OK;
}

void record_write(void *given, const void *own, size_t own_bytes)
{
    unsigned char *to = given;
    size_t size;
    memcpy(&size, given, sizeof size);
    const size_t shared = size < own_bytes ? size : own_bytes;
    memcpy(to + sizeof size, (const unsigned char *)own + sizeof size, shared - sizeof size);
    memset(to + shared, 0, size - shared);
}
