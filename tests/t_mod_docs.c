/* docs/language.md is true: every ```mask and ```score block compiles, its comment lines
   "// q=5 kv=3: 1" are what it gives there, "//! 1:3 message" is how it is refused, and the
   tables name every built-in and every named variant with its formula. */
#include "base/status.h"
#include "eval/eval.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static char *document(void)
{
    FILE *file = fopen(SACCADE_SOURCE_DIR "/docs/language.md", "r");
    char *text = calloc(1, 1 << 17);
    assert_non_null(file);
    assert_true(fread(text, 1, (1 << 17) - 1, file) > 1000);
    fclose(file);
    return text;
}

/* ---- examples ---- */

static saccade_status bind(const saccade_mod *generic, saccade_dtype tensors, saccade_mod **out,
                           saccade_error *err)
{
    saccade_capture captures[MOD_MAX_CAPTURES];
    const int32_t n = saccade_mod_capture_count(generic);
    for (int32_t i = 0; i < n; i++) {
        captures[i] = saccade_mod_capture(generic, i);
        captures[i].dtype = captures[i].rank == 0 ? SACCADE_I32 : tensors;
    }
    return saccade_mod_bind(generic, captures, n, out, err);
}

/* bound with int tensors, or bool ones where only they fit. */
static saccade_status compile(saccade_kind kind, const char *text, saccade_mod **out,
                              saccade_error *err)
{
    saccade_mod *generic;
    TRY(saccade_mod_parse(kind, text, strlen(text), &generic, err));
    saccade_status status = bind(generic, SACCADE_I32, out, err);
    if (status == SACCADE_ETYPE)
        status = bind(generic, SACCADE_BOOL, out, err);
    saccade_mod_destroy(generic);
    return status;
}

/* Where an example is evaluated: index variables, sizes, scalar captures. */
typedef struct place {
    eval_point at;
    eval_env env;
    saccade_tensor tensors[MOD_MAX_CAPTURES];
    int32_t scalars[MOD_MAX_CAPTURES];
} place;

static void set(place *p, const mod_fn *fn, const char *name, double value)
{
    static const char *const sizes[] = {"B", "H", "Hkv", "Q", "KV", "D", "Dv"};
    if (strcmp(name, "b") == 0)
        p->at.b = (int32_t)value;
    else if (strcmp(name, "h") == 0)
        p->at.h = (int32_t)value;
    else if (strcmp(name, "q") == 0)
        p->at.q = (int32_t)value;
    else if (strcmp(name, "kv") == 0)
        p->at.kv = (int32_t)value;
    else if (strcmp(name, "score") == 0)
        p->at.score = value;
    for (int i = 0; i < MOD_SIZE_COUNT; i++)
        if (strcmp(name, sizes[i]) == 0)
            p->env.size[i] = (int32_t)value;
    for (uint32_t i = 0; i < fn->n_captures; i++) {
        p->scalars[i] =
            strcmp(name, fn->captures[i].name) == 0 ? (int32_t)value : p->scalars[i];
        p->tensors[i] = saccade_tensor_of(&p->scalars[i], SACCADE_I32, 0, NULL);
    }
}

/* "W=2 q=5 kv=3: 1" */
static void check_value(const mod_fn *fn, const char *line)
{
    static place p;
    char name[32];
    double value, values[512];
    int used;
    memset(&p, 0, sizeof p);
    p.env.tensors = p.tensors;
    const char *at = line;
    while (sscanf(at, " %31[A-Za-z]=%lf%n", name, &value, &used) == 2) {
        set(&p, fn, name, value);
        at += used;
    }
    assert_int_equal(*at, ':');
    const double want = strtod(at + 1, NULL);
    assert_true(fn->n_nodes <= 512);
    const double got = eval_scalar(fn, &p.env, &p.at, values, NULL);
    if (got != want && !(fabs(got - want) <= 1e-5 * fabs(want)))
        fail_msg("%s\ngot %g", line, got);
}

static void check_error(const saccade_error *err, const char *text)
{
    char got[600];
    const char *want = strstr(text, "//! ");
    if (want == NULL)
        fail_msg("%s\n%d:%d %s", text, err->line, err->column, err->message);
    snprintf(got, sizeof got, "%d:%d %s", err->line, err->column, err->message);
    if (strncmp(want + 4, got, strlen(got)) != 0)
        fail_msg("%s\ngot %s", text, got);
}

/* values given in the block; their number. */
static int check_block(saccade_kind kind, const char *text)
{
    saccade_error err = {0};
    saccade_mod *mod;
    int n = 0;
    if (compile(kind, text, &mod, &err) != SACCADE_OK) {
        check_error(&err, text);
        return 1;
    }
    assert_null(strstr(text, "//! "));
    for (const char *at = strstr(text, "\n// "); at != NULL; at = strstr(at + 1, "\n// ")) {
        char line[200] = "";
        snprintf(line, sizeof line, "%.*s", (int)strcspn(at + 4, "\n"), at + 4);
        check_value(mod_function(mod), line);
        n++;
    }
    saccade_mod_destroy(mod);
    return n;
}

static void examples_hold(void **state)
{
    char *text = document(), *at = text;
    int values = 0, blocks = 0;
    (void)state;
    while ((at = strstr(at, "\n```")) != NULL) {
        char *info = at + 4, *start = strchr(info, '\n'), *end = strstr(start, "\n```");
        assert_non_null(end);
        end[1] = '\0';
        if (strncmp(info, "mask", 4) == 0 || strncmp(info, "score", 5) == 0) {
            values += check_block(info[0] == 'm' ? SACCADE_MASK : SACCADE_SCORE, start + 1);
            blocks++;
        }
        at = end + 4;
    }
    assert_true(blocks >= 7 && values >= 10);
    free(text);
}

/* ---- tables ---- */

/* "| `causal()` | formula; source |", with | escaped as Markdown wants it. */
static void check_variant(const char *text, const saccade_prelude_entry *e)
{
    char row[512];
    int n = snprintf(row, sizeof row, "\n| `%s` | ", e->signature);
    for (const char *c = e->comment; *c != '\0'; c++)
        n += snprintf(row + n, sizeof row - (size_t)n, *c == '|' ? "\\|" : "%c", *c);
    snprintf(row + n, sizeof row - (size_t)n, " |\n");
    if (strstr(text, row) == NULL)
        fail_msg("not in docs/language.md: %s", row);
}

static void tables_are_complete(void **state)
{
    char *text = document(), name[32];
    const saccade_prelude_entry *e;
    (void)state;
    for (int32_t i = 0; (e = saccade_prelude(i)) != NULL; i++)
        check_variant(text, e);
    for (int op = 0; op < MOD_OP_COUNT; op++) {
        const char *form = mod_op_infos[op].form;
        snprintf(name, sizeof name, "`%s", form);
        if (form[strlen(form) - 1] == '(' && strstr(text, name) == NULL)
            fail_msg("docs/language.md does not explain %s)", form);
    }
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(examples_hold),
        cmocka_unit_test(tables_are_complete),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
