/* Where the members of the public structs lie, for mirrors of them in other languages. The list
   of members is read from the headers when the library is configured (cmake/layout.cmake); the
   numbers are the compiler's. */
#include "saccade_dist.h"
#include "saccade_kv.h"
#include "saccade_measure.h"

static const saccade_layout_entry entries[] = {
#define RECORD(record) {#record, NULL, 0, (int32_t)sizeof(record)},
#define MEMBER(record, member)                            \
    {#record, #member, (int32_t)offsetof(record, member), \
     (int32_t)sizeof(((record *)0)->member)},
#include "layout_table.h"
};
enum { ENTRIES = sizeof entries / sizeof entries[0] };

const saccade_layout_entry *saccade_layout(int32_t i)
{
    return i >= 0 && i < ENTRIES ? &entries[i] : NULL;
}
