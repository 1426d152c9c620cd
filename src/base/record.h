/* Public structs that may grow: their first member is their size as the caller was compiled. */
#ifndef SACCADE_BASE_RECORD_H
#define SACCADE_BASE_RECORD_H

#include "saccade.h"

/* Reads a caller's struct into *own, the library's with `own_bytes` and its defaults filled in.
 * Members that the caller's size leaves out keep their defaults; EINVAL where it was never
 * initialised, or sets a member this library does not know. */
saccade_status record_read(void *own, size_t own_bytes, const void *given, const char *name,
                           saccade_error *err);
/* Writes as much of *own as the caller's struct holds, and 0 to what is left of it. Its size
 * stays. `given` has passed record_check_size. */
void record_write(void *given, const void *own, size_t own_bytes);
saccade_status record_check_size(const void *given, const char *name, saccade_error *err);

/* For a struct with an _init function: own is a local of its type. */
#define RECORD_READ(own, given, name) record_read(own, sizeof *(own), given, name, err)

#endif
