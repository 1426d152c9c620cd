/* What a name means: locals and parameters, then index variables and sizes, then captures;
   for calls, the text's definitions from the inside out, then the prelude's. */
#include "mod/elab.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *const ast_vars[] = {"b", "h", "q", "kv", "score"};
const char *const ast_sizes[] = {"B", "H", "Hkv", "Q", "KV", "D", "Dv"};

/* ---- messages ---- */

static bool in_prelude(const elab *e)
{
    return e->frame != NULL && e->frame->source->is_prelude && e->call_source != NULL;
}

ast_place elab_place(const elab *e, ast_place place)
{
    return in_prelude(e) ? e->call_place : place;
}

saccade_status elab_fail(const elab *e, ast_place place, saccade_status code, const char *fmt,
                         ...)
{
    char message[400];
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    if (in_prelude(e))
        return source_fail(e->call_source, e->call_place, e->err, code, "in %s: %s",
                           e->frame->def->signature, message);
    return source_fail(e->frame->source, place, e->err, code, "%s", message);
}

saccade_status elab_no_memory(const elab *e)
{
    saccade_error *err = e->err;
    FAIL(SACCADE_ENOMEM, "out of memory");
}

/* ---- locals ---- */

static uint32_t bucket(const frame *f, const char *name)
{
    uint32_t hash = 2166136261u;
    for (; *name != '\0'; name++)
        hash = (hash ^ (unsigned char)*name) * 16777619u;
    return (hash ^ hash >> 15) & (f->n_buckets - 1);
}

bool frame_init(elab *e, frame *f, uint32_t n_names)
{
    f->n_buckets = 4;
    while (f->n_buckets < n_names)
        f->n_buckets *= 2;
    f->buckets = arena_array(e->scratch, f->n_buckets, sizeof(local *));
    return f->buckets != NULL;
}

local *frame_find(const frame *f, const char *name)
{
    local *at = f->buckets[bucket(f, name)];
    while (at != NULL && strcmp(at->name, name) != 0)
        at = at->next;
    return at;
}

saccade_status frame_set(elab *e, frame *f, const char *name, local what)
{
    local *at = frame_find(f, name);
    what.name = name;
    if (at == NULL) {
        local **head = &f->buckets[bucket(f, name)];
        at = arena_alloc(e->scratch, sizeof *at);
        if (at == NULL)
            return elab_no_memory(e);
        at->next = *head;
        *head = at;
    }
    what.next = at->next;
    *at = what;
    return SACCADE_OK;
}

void frame_drop(frame *f, const char *name)
{
    local **at = &f->buckets[bucket(f, name)];
    while (*at != NULL && strcmp((*at)->name, name) != 0)
        at = &(*at)->next;
    if (*at != NULL)
        *at = (*at)->next;
}

/* ---- index variables and sizes ---- */

static int find(const char *const *names, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (strcmp(names[i], name) == 0)
            return i;
    return -1;
}

int scope_var(const char *name)
{
    return find(ast_vars, FRAME_VARS, name);
}

int scope_size(const char *name)
{
    return find(ast_sizes, MOD_SIZE_COUNT, name);
}

/* ---- definitions ---- */

static const ast_def *find_def(const ast_body *body, const char *name, uint32_t *looked_at)
{
    const ast_def *def = body->defs;
    for (; def != NULL && strcmp(def->name, name) != 0; def = def->next)
        ++*looked_at;
    return def;
}

saccade_status scope_find(elab *e, const char *name, const ast_def **def, const scope **where)
{
    saccade_error *err = e->err;
    enum { PER_STEP = 16 }; /* definitions looked at in the time of a step */
    const scope *s = e->frame->scope;
    uint32_t looked_at = 0;
    *def = NULL;
    for (; s != NULL && *def == NULL; s = s->parent) {
        *where = s;
        if (s->parent == NULL)
            TRY(prelude_find(name, def, &looked_at, err));
        else
            *def = find_def(s->body, name, &looked_at);
    }
    *e->steps += looked_at / PER_STEP;
    return SACCADE_OK;
}

saccade_status scope_unknown(const elab *e, const ast_node *call)
{
    enum { MOST = 256 };
    const char *names[MOST];
    uint32_t n = 0;
    if (strcmp(call->name, "dropout") == 0)
        return elab_fail(e, call->place, SACCADE_EPARSE,
                         "got 'dropout(' in a mask or score, expected it as a weight, a text "
                         "of its own: it says what becomes of weights after softmax");
    for (const scope *s = e->frame->scope; s != NULL; s = s->parent)
        for (const ast_def *def = s->body->defs; def != NULL && n < MOST; def = def->next)
            names[n++] = def->name;
    const saccade_prelude_entry *entry;
    for (int32_t i = 0; n < MOST && (entry = saccade_prelude(i)) != NULL; i++)
        names[n++] = entry->name;
    const char *nearest = types_nearest_builtin(call->name);
    if (nearest == NULL)
        nearest = source_nearest(call->name, names, n);
    return elab_fail(e, call->place, SACCADE_EPARSE,
                     "got '%s(', expected a built-in, a definition of this text or a named "
                     "variant%s%.*s%s",
                     call->name, nearest ? "; did you mean '" : "",
                     nearest ? (int)strcspn(nearest, "(") : 0, nearest ? nearest : "",
                     nearest ? "'?" : "");
}

/* ---- captures ---- */

static const char *rank_words(uint32_t rank, char text[32])
{
    if (rank == 0)
        return "a scalar";
    snprintf(text, 32, "a tensor of rank %u", rank);
    return text;
}

static saccade_status wrong_rank(const elab *e, const elab_capture *c, uint32_t rank,
                                 ast_place place, const ast_source *source)
{
    char got[32], expected[32];
    return source_fail(source, place, e->err, SACCADE_ETYPE,
                       "got '%s' as %s, expected %s as at %u:%u", c->name,
                       rank_words(rank, got), rank_words(c->rank, expected), c->place.line,
                       c->place.column);
}

saccade_status scope_capture(elab *e, const char *name, uint32_t rank, ast_place place,
                             const ast_source *source, uint32_t *index)
{
    elab_captures *all = e->captures;
    if (source == e->frame->source && in_prelude(e)) {
        place = e->call_place;
        source = e->call_source;
    }
    for (uint32_t i = 0; i < all->n; i++) {
        *index = i;
        if (strcmp(all->list[i].name, name) == 0)
            return all->list[i].rank == rank
                       ? SACCADE_OK
                       : wrong_rank(e, &all->list[i], rank, place, source);
    }
    if (all->is_fixed)
        return elab_fail(e, place, SACCADE_EINTERNAL, "capture '%s' has appeared", name);
    if (all->n == MOD_MAX_CAPTURES)
        return source_fail(source, place, e->err, SACCADE_ELIMIT,
                           "got '%s', expected at most %d captures", name, MOD_MAX_CAPTURES);
    *index = all->n;
    all->list[all->n++] = (elab_capture){name, place, source, rank, T_ANY};
    return SACCADE_OK;
}
