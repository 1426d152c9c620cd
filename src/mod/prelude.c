/* The named variants: prelude.sac, embedded at build time, parsed once for the process when
   first asked for. Threads may race to parse it; the first to finish is kept. */
#include "mod/ast.h"

#include "base/embed.h"

#include <stdatomic.h>
#include <stdlib.h>

typedef struct prelude {
    arena arena;
    ast_source source;
    saccade_prelude_entry *entries;
    int32_t n_entries;
} prelude;

static _Atomic(prelude *) shared;

static void destroy(prelude *p)
{
    arena_free(&p->arena);
    free(p);
}

static saccade_status list_entries(prelude *p, saccade_error *err)
{
    int32_t n = 0;
    for (const ast_def *def = p->source.body.defs; def != NULL; def = def->next)
        n++;
    p->entries = arena_array(&p->arena, (size_t)n, sizeof *p->entries);
    FAIL_IF_NULL(p->entries);
    for (const ast_def *def = p->source.body.defs; def != NULL; def = def->next)
        p->entries[p->n_entries++] =
            (saccade_prelude_entry){def->name, def->signature, def->comment, def->kind};
    return SACCADE_OK;
}

static saccade_status make(prelude **out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    prelude *p = calloc(1, sizeof *p);
    FAIL_IF_NULL(p);
    arena_init(&p->arena);
    p->source = (ast_source){.text = mod_prelude_files[0].text,
                             .bytes = mod_prelude_files[0].bytes,
                             .is_prelude = true};
    TRY_GOTO(parser_run(&p->source, &p->arena, err));
    TRY_GOTO(list_entries(p, err));
    *out = p;
    return SACCADE_OK;
out:
    destroy(p);
    return status;
}

static saccade_status get(const prelude **out, saccade_error *err)
{
    prelude *mine = NULL, *first = atomic_load(&shared);
    if (first == NULL) {
        TRY(make(&mine, err));
        if (atomic_compare_exchange_strong(&shared, &first, mine))
            first = mine;
        else
            destroy(mine);
    }
    *out = first;
    return SACCADE_OK;
}

saccade_status prelude_get(const ast_source **out, saccade_error *err)
{
    const prelude *p;
    TRY(get(&p, err));
    *out = &p->source;
    return SACCADE_OK;
}

const saccade_prelude_entry *saccade_prelude(int32_t i)
{
    const prelude *p;
    if (i < 0 || get(&p, NULL) != SACCADE_OK || i >= p->n_entries)
        return NULL;
    return &p->entries[i];
}
