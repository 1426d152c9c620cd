/* Contexts: how many threads and which instruction sets a caller lets the library use. */
#include "api/api.h"

#include "base/cpu_features.h"
#include "base/parallel.h"

#include <stdlib.h>

saccade_status api_context(const saccade_context_options *options, saccade_context *out,
                           saccade_error *err)
{
    saccade_context_options o;
    cpu_level level, wanted;
    saccade_context_options_init(&o);
    if (options)
        TRY(RECORD_READ(&o, options, "context options"));
    FAIL_AT(o.threads < -4096 || o.threads > 4096, SACCADE_EINVAL, "threads", 0, 0,
            "got %d, expected 0 (all), up to 4096, or down to -4096 (at most so many)",
            o.threads);
    TRY(cpu_level_allowed(&level, err));
    if (o.level) {
        TRY(cpu_level_parse(o.level, &wanted, err));
        FAIL_AT(wanted > level, SACCADE_EBACKEND, "level", 0, 0,
                "got %s, expected at most %s, %s", o.level, cpu_level_name(level),
                cpu_level_bound());
        level = wanted;
    }
    out->threads = o.threads > 0    ? o.threads
                   : o.threads == 0 ? par_max_threads()
                                    : par_threads_available(-o.threads);
    out->level = (int32_t)level;
    return SACCADE_OK;
}

saccade_status saccade_context_create(const saccade_context_options *options,
                                      saccade_context **out, saccade_error *err)
{
    saccade_context filled;
    FAIL_AT(!out, SACCADE_EINVAL, "context", 0, 0, "got NULL, expected a result");
    TRY(api_context(options, &filled, err));
    saccade_context *c = malloc(sizeof *c);
    FAIL_IF_NULL(c);
    *c = filled;
    *out = c;
    return SACCADE_OK;
}

void saccade_context_destroy(saccade_context *context)
{
    free(context);
}

void saccade_free(void *bytes)
{
    free(bytes);
}
