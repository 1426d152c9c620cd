/* The named variants: prelude.sac, embedded at build time. Its definitions are found once for
   the process, by their first words, and parsed when first asked for: all of them take 0.3 ms,
   one a few us. Threads may race to do either; the first to finish is kept. */
#include "mod/ast.h"

#include "base/embed.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct parsed {
    arena arena;
    ast_source source;
    saccade_prelude_entry entry;
} parsed;

/* One definition with the line comment above it. */
typedef struct place {
    const char *name;
    size_t name_bytes, end;
    ast_place begin;
    _Atomic(parsed *) parsed;
} place;

typedef struct prelude {
    int32_t n;
    place places[AST_MAX_DEFS];
} prelude;

static _Atomic(prelude *) shared;

/* ---- where definitions are ---- */

static bool starts_with(const char *text, const char *word)
{
    return strncmp(text, word, strlen(word)) == 0;
}

/* Definitions begin at the start of a line; nothing else there does so. */
static void find_places(prelude *p)
{
    const char *text = mod_prelude_files[0].text, *comment = NULL, *after;
    uint32_t number = 1;
    for (const char *line = text; *line != '\0'; line = after, number++) {
        after = line + strcspn(line, "\n");
        after += *after == '\n';
        if (starts_with(line, "mask ") || starts_with(line, "score ")) {
            const char *begin = comment ? comment : line, *name = strchr(line, ' ') + 1;
            assert(p->n < AST_MAX_DEFS);
            if (p->n > 0)
                p->places[p->n - 1].end = (size_t)(begin - text);
            p->places[p->n++] = (place){
                .name = name,
                .name_bytes = strcspn(name, "("),
                .end = mod_prelude_files[0].bytes,
                .begin = {(uint32_t)(begin - text), number - (comment != NULL), 1},
            };
        }
        comment = starts_with(line, "//") ? line : NULL;
    }
}

static saccade_status get(prelude **out, saccade_error *err)
{
    prelude *first = atomic_load(&shared);
    if (first == NULL) {
        prelude *mine = calloc(1, sizeof *mine);
        FAIL_IF_NULL(mine);
        find_places(mine);
        if (atomic_compare_exchange_strong(&shared, &first, mine))
            first = mine;
        else
            free(mine);
    }
    *out = first;
    return SACCADE_OK;
}

/* ---- what they say ---- */

static void destroy(parsed *p)
{
    arena_free(&p->arena);
    free(p);
}

static saccade_status parse(const place *at, parsed **out, saccade_error *err)
{
    saccade_status status = SACCADE_OK;
    parsed *p = calloc(1, sizeof *p);
    FAIL_IF_NULL(p);
    arena_init(&p->arena);
    p->source =
        (ast_source){.text = mod_prelude_files[0].text, .bytes = at->end, .is_prelude = true};
    TRY_GOTO(parser_run_from(&p->source, at->begin, &p->arena, err));
    const ast_def *def = p->source.body.defs;
    assert(def != NULL && def->next == NULL);
    p->entry = (saccade_prelude_entry){def->name, def->signature, def->comment, def->kind};
    *out = p;
    return SACCADE_OK;
out:
    destroy(p);
    return status;
}

static saccade_status get_parsed(place *at, const parsed **out, saccade_error *err)
{
    parsed *mine = NULL, *first = atomic_load(&at->parsed);
    if (first == NULL) {
        TRY(parse(at, &mine, err));
        if (atomic_compare_exchange_strong(&at->parsed, &first, mine))
            first = mine;
        else
            destroy(mine);
    }
    *out = first;
    return SACCADE_OK;
}

const ast_source *prelude_source(void)
{
    static const ast_source source = {.text = "", .is_prelude = true};
    return &source;
}

saccade_status prelude_find(const char *name, const ast_def **out, uint32_t *looked_at,
                            saccade_error *err)
{
    const size_t bytes = strlen(name);
    const parsed *found;
    prelude *p;
    TRY(get(&p, err));
    *out = NULL;
    for (int32_t i = 0; i < p->n; i++, ++*looked_at) {
        place *at = &p->places[i];
        if (at->name_bytes != bytes || memcmp(at->name, name, bytes) != 0)
            continue;
        TRY(get_parsed(at, &found, err));
        *out = found->source.body.defs;
        return SACCADE_OK;
    }
    return SACCADE_OK;
}

const saccade_prelude_entry *saccade_prelude(int32_t i)
{
    const parsed *found;
    prelude *p;
    if (i < 0 || get(&p, NULL) != SACCADE_OK || i >= p->n
        || get_parsed(&p->places[i], &found, NULL) != SACCADE_OK)
        return NULL;
    return &found->entry;
}
