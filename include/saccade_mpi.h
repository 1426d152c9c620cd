/* saccade_mpi.h: ranks that are MPI processes. A library of its own (libsaccade_mpi): that way
 * libsaccade needs no MPI; built where MPI is found. */
#ifndef SACCADE_MPI_H
#define SACCADE_MPI_H

#include "saccade_dist.h"

#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A transport over the processes of a communicator, which is duplicated: called by all of them.
 * MPI has been initialised; a thread at a time calls, the one that may call MPI. In staged mode
 * keys travel while windows are computed if MPI was initialised with MPI_THREAD_MULTIPLE, else
 * in between. A message that does not come is waited for until its time is up, and then the
 * process may still end in MPI_Finalize's hands: after a failure MPI_Abort is the sure way
 * out. */
SACCADE_API saccade_status saccade_mpi_create(MPI_Comm comm, saccade_transport *out,
                                              saccade_error *err);
/* Gives back what create took; before MPI_Finalize, by all processes. */
SACCADE_API void saccade_mpi_destroy(saccade_transport *transport);

#ifdef __cplusplus
}
#endif
#endif
