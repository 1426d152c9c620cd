/* saccade_dist_merge: parts of the keys that ranks have attended to become all of them, on
 * every rank. Each rank gets every other's part and adds them up itself, in the order of ranks:
 * parts of few rows are small, and so results are the same bits everywhere. */
#include "api/api.h"
#include "dist/dist.h"

#include <string.h>

/* What the workspace holds: the parts, [ranks][out then lse], and lists of all of them. */
typedef struct merge_space {
    size_t outs, lses, sends, receives, parts, part_bytes, bytes;
    int64_t out_floats;
} merge_space;

static size_t aligned(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static merge_space space_of(const saccade_transport *t, const saccade_tensor *out)
{
    const size_t n = (size_t)t->ranks;
    const int64_t rows = out->shape[0] * out->shape[1] * out->shape[2];
    merge_space s = {.out_floats = rows * out->shape[3]};
    s.part_bytes = (size_t)(s.out_floats + rows) * sizeof(float);
    s.lses = aligned(n * sizeof(saccade_tensor));
    s.sends = 2 * s.lses;
    s.receives = s.sends + aligned(n * sizeof(saccade_message));
    s.parts = s.receives + aligned(n * sizeof(saccade_message));
    s.bytes = s.parts + n * aligned(s.part_bytes);
    return s;
}

static int is_part(const saccade_tensor *out)
{
    int64_t most = INT64_MAX / 8;
    for (int i = 0; out && out->rank == 4 && i < 4; i++) {
        if (out->shape[i] < 1 || out->shape[i] > most)
            return 0;
        most /= out->shape[i];
    }
    return out && out->rank == 4;
}

size_t saccade_dist_merge_workspace(const saccade_transport *transport,
                                    const saccade_tensor *out)
{
    return transport && transport->ranks > 0 && transport->ranks <= SACCADE_MAX_RANKS
                   && is_part(out)
               ? space_of(transport, out).bytes
               : SIZE_MAX;
}

static saccade_status check_dense(const saccade_tensor *t, const char *name, int32_t rank,
                                  saccade_error *err)
{
    int64_t step = 1;
    for (int32_t i = rank; i-- > 0; step *= t->shape[i])
        FAIL_AT(t->shape[i] > 1 && t->stride[i] != step, SACCADE_EINVAL, name, 0, 0,
                "got rows that do not follow each other, expected a dense tensor");
    return SACCADE_OK;
}

/* lists: room for all of this rank's messages, one to and one from each other. */
static saccade_status gather_parts(const saccade_transport *t, const merge_space *s,
                                   char *memory, saccade_error *err)
{
    saccade_message *sends = (saccade_message *)(void *)(memory + s->sends);
    saccade_message *receives = (saccade_message *)(void *)(memory + s->receives);
    char *parts = memory + s->parts;
    const size_t each = aligned(s->part_bytes);
    int32_t n = 0;
    for (int32_t r = 0; r < t->ranks; r++) {
        if (r == t->rank)
            continue;
        sends[n] = (saccade_message){parts + (size_t)t->rank * each, s->part_bytes, r};
        receives[n++] = (saccade_message){parts + (size_t)r * each, s->part_bytes, r};
    }
    return dist_exchange(t, sends, n, receives, n, err);
}

static saccade_status merge_parts(const saccade_context *context, const saccade_transport *t,
                                  const merge_space *s, const saccade_tensor *out,
                                  const saccade_tensor *lse, const saccade_tensor *result,
                                  char *memory, saccade_error *err)
{
    saccade_tensor *outs = (saccade_tensor *)(void *)(memory + s->outs);
    saccade_tensor *lses = (saccade_tensor *)(void *)(memory + s->lses);
    saccade_merge_args a;
    for (int32_t r = 0; r < t->ranks; r++) {
        float *part = (float *)(void *)(memory + s->parts + (size_t)r * aligned(s->part_bytes));
        outs[r] = saccade_tensor_of(part, SACCADE_F32, 4, out->shape);
        lses[r] = saccade_tensor_of(part + s->out_floats, SACCADE_F32, 3, out->shape);
    }
    saccade_merge_args_init(&a);
    a.outs = outs;
    a.lses = lses;
    a.n = t->ranks;
    a.out = result;
    a.lse = lse;
    return saccade_merge(context, &a, err);
}

static saccade_status merge(const saccade_context *context, const saccade_transport *t,
                            const saccade_tensor *out, const saccade_tensor *lse,
                            const saccade_tensor *result, char *memory, size_t bytes,
                            saccade_error *err)
{
    int64_t shape[4] = {0};
    TRY(api_check_tensor(out, &(api_expected){"out", SACCADE_F32, 4, SACCADE_CPU}, shape, err));
    TRY(api_check_tensor(lse, &(api_expected){"lse", SACCADE_F32, 3, SACCADE_CPU}, shape, err));
    TRY(check_dense(out, "out", 4, err));
    TRY(check_dense(lse, "lse", 3, err));
    const merge_space s = space_of(t, out);
    FAIL_AT(!memory || (uintptr_t)memory % 64 || bytes < s.bytes, SACCADE_EINVAL, "workspace",
            0, 0, "got %zu bytes, expected %zu aligned to 64 (saccade_dist_merge_workspace)",
            bytes, s.bytes);
    char *own = memory + s.parts + (size_t)t->rank * aligned(s.part_bytes);
    memcpy(own, out->data, (size_t)s.out_floats * sizeof(float));
    memcpy(own + (size_t)s.out_floats * sizeof(float), lse->data,
           s.part_bytes - (size_t)s.out_floats * sizeof(float));
    TRY(gather_parts(t, &s, memory, err));
    return merge_parts(context, t, &s, out, lse, result, memory, err);
}

saccade_status saccade_dist_merge(const saccade_context *context,
                                  const saccade_transport *transport, const saccade_tensor *out,
                                  const saccade_tensor *lse, const saccade_tensor *result,
                                  void *workspace, size_t workspace_bytes, saccade_error *err)
{
    saccade_transport own;
    FAIL_AT(!transport || !out || !lse || !result, SACCADE_EINVAL, "dist merge", 0, 0,
            "got NULL, expected a transport, this rank's out and lse, and a result");
    saccade_transport_init(&own);
    TRY(RECORD_READ(&own, transport, "transport"));
    FAIL_AT(own.ranks < 1 || own.ranks > SACCADE_MAX_RANKS || own.rank < 0
                || own.rank >= own.ranks,
            SACCADE_EINVAL, "transport", 0, 0, "got rank %d of %d, expected one of 1 to %d",
            own.rank, own.ranks, SACCADE_MAX_RANKS);
    saccade_status status = api_check_transport(&own, err);
    if (status == SACCADE_OK)
        status = merge(context, &own, out, lse, result, workspace, workspace_bytes, err);
    if (status != SACCADE_OK)
        dist_abort(&own);
    return status;
}
