/* Exchanges with their failures made errors, and what is agreed on by them. */
#include "dist/dist.h"

#include "base/status.h"

#include <stdlib.h>
#include <string.h>

saccade_status dist_exchange(const saccade_transport *t, const saccade_message *sends,
                             int32_t n_sends, const saccade_message *receives,
                             int32_t n_receives, saccade_error *err)
{
    if (n_sends + n_receives == 0)
        return SACCADE_OK;
    const int failed = t->exchange(t->user, sends, n_sends, receives, n_receives, t->seconds);
    FAIL_AT(failed == SACCADE_OTHER_BYTES, SACCADE_EPEER, "transport", 0, 0,
            "rank %d: a message of another rank has other bytes than expected: their calls, or "
            "their batches, differ",
            t->rank);
    FAIL_AT(failed, SACCADE_EPEER, "transport", 0, 0,
            "another rank failed, or did not answer rank %d within %g s (code %d)", t->rank,
            t->seconds, failed);
    return SACCADE_OK;
}

void dist_abort(const saccade_transport *t)
{
    if (t->abort)
        t->abort(t->user);
}

static saccade_status compare(const saccade_transport *t, const uint64_t digest[2],
                              const uint64_t *all, saccade_error *err)
{
    for (int32_t r = 0; r < t->ranks; r++)
        FAIL_AT(r != t->rank && memcmp(all + 2 * r, digest, 2 * sizeof *digest) != 0,
                SACCADE_EINVAL, "dist", 0, 0,
                "rank %d has another shard plan or problem than rank %d, expected the same",
                t->rank, r);
    return SACCADE_OK;
}

saccade_status dist_agree(const saccade_transport *t, const uint64_t digest[2], int *is_heard,
                          saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    const size_t bytes = 2 * sizeof *digest, ranks = (size_t)t->ranks;
    uint64_t *all = calloc(2 * ranks + 2, sizeof *all);
    saccade_message *messages = calloc(2 * ranks, sizeof *messages);
    int32_t n = 0;
    FAIL_IF_GOTO(!all || !messages, SACCADE_ENOMEM, "out of memory");
    memcpy(all + 2 * ranks, digest, bytes);
    for (int32_t r = 0; r < t->ranks; r++) {
        if (r == t->rank)
            continue;
        messages[n] = (saccade_message){all + 2 * ranks, bytes, r};
        messages[ranks + (size_t)n++] = (saccade_message){all + 2 * r, bytes, r};
    }
    TRY_GOTO(dist_exchange(t, messages, n, messages + ranks, n, err));
    *is_heard = 1;
    status = compare(t, digest, all, err);
out:
    free(all);
    free(messages);
    return status;
}
