/* saccade_mod_sums_keys: which gradients of captures want an output in f32. */
#include "api/api.h"

#include "base/arena.h"

#include <string.h>

static saccade_status check_names(const mod_fn *fn, const char *const *names, int32_t n,
                                  saccade_error *err)
{
    for (int32_t i = 0; i < n; i++) {
        FAIL_AT(!names[i], SACCADE_EINVAL, "captures", 0, 0, "got no name in entry %d", i);
        uint32_t c = 0;
        while (c < fn->n_captures && strcmp(fn->captures[c].name, names[i]) != 0)
            c++;
        FAIL_AT(c == fn->n_captures, SACCADE_EINVAL, "captures", 0, 0,
                "got '%.60s', expected a capture of the score", names[i]);
    }
    return SACCADE_OK;
}

/* Simplification, as plans have it, keeps names and may drop captures. */
static saccade_status find_sums(const mod_fn *fn, const char *const *names, int32_t n,
                                int32_t *sums, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    const mod_fn *simple;
    const pass_read *reads;
    uint32_t n_reads;
    arena arena;
    arena_init(&arena);
    TRY_GOTO(pass_simplify(fn, &arena, &simple, err));
    TRY_GOTO(pass_find_reads(simple, &arena, &reads, &n_reads, err));
    *sums = 0;
    for (uint32_t i = 0; i < n_reads; i++)
        for (int32_t k = 0; k < n; k++)
            if (reads[i].scatter != SCATTER_NONE && pass_sums_keys(&reads[i])
                && strcmp(simple->captures[reads[i].capture].name, names[k]) == 0)
                *sums = 1;
out:
    arena_free(&arena);
    return status;
}

saccade_status saccade_mod_sums_keys(const saccade_mod *score, const char *const *captures,
                                     int32_t n_captures, int32_t *sums, saccade_error *err)
{
    const mod_fn *fn = score ? mod_function(score) : NULL;
    FAIL_AT(!fn || fn->kind != SACCADE_SCORE || !sums, SACCADE_EINVAL, "score", 0, 0,
            "got %s, expected a bound score and room for the answer",
            !score ? "NULL"
            : !fn  ? "a mod that is not bound"
                   : "another mod or NULL");
    FAIL_AT(n_captures < 0 || n_captures > MOD_MAX_CAPTURES || (n_captures && !captures),
            SACCADE_EINVAL, "captures", 0, 0, "got %d%s, expected 0 to %d and their names",
            n_captures, captures ? "" : " and NULL", MOD_MAX_CAPTURES);
    TRY(check_names(fn, captures, n_captures, err));
    return find_sums(fn, captures, n_captures, sums, err);
}
