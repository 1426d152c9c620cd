/* saccade completions SHELL: what bash, zsh or fish complete after `saccade`, made of the
 * tables of commands and options. Files are completed where a file is wanted, words where a
 * value is one of some words. */
#include "options.h"

#include <string.h>

/* In single quotes of a shell; zsh's and fish's own marks are kept from being read as such. */
static void put_quoted(const char *text, const char *marks)
{
    for (; *text; text++) {
        if (*text == '\'')
            fputs("'\\''", stdout);
        else if (*text == '\\' || strchr(marks, *text))
            printf("\\%c", *text);
        else
            putchar(*text);
    }
}

static void put_words(const cli_option *o)
{
    const char *at = NULL, *word;
    int bytes;
    for (bool later = false; cli_next_word(o, &at, &word, &bytes); later = true)
        printf("%s%.*s", later ? " " : "", bytes, word);
}

static bool has_words(const cli_option *o)
{
    const char *at = NULL, *word;
    int bytes;
    return cli_next_word(o, &at, &word, &bytes);
}

/* ---- bash ---- */

static void bash_options(const cli_command *c)
{
    for (const cli_option *o = NULL; (o = cli_next_option(c, o)) != NULL;) {
        if (o->name[0] != '-' || o->kind == FLAG)
            continue;
        printf("    %s,%s) words='", c->name, o->name);
        put_words(o);
        puts("' ;;");
    }
    printf("    %s,*) words='", c->name);
    for (const cli_option *o = NULL; (o = cli_next_option(c, o)) != NULL;) {
        if (o->name[0] == '-')
            printf("%s ", o->name);
        else
            put_words(o), putchar(' ');
    }
    puts("' ;;");
}

static void bash(void)
{
    puts("# bash completion for saccade; printed by: saccade completions bash\n"
         "_saccade()\n"
         "{\n"
         "    local word=${COMP_WORDS[COMP_CWORD]} words=\n"
         "    case $COMP_CWORD in");
    fputs("    1) words='", stdout);
    for (const cli_command *c = NULL; (c = cli_next_command(c)) != NULL;)
        printf("%s ", c->name);
    puts("--help --version' ;;\n"
         "    *)\n"
         "    case ${COMP_WORDS[1]},${COMP_WORDS[COMP_CWORD-1]} in");
    for (const cli_command *c = NULL; (c = cli_next_command(c)) != NULL;)
        bash_options(c);
    puts("    esac ;;\n"
         "    esac\n"
         "    COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n"
         "} &&\n"
         "complete -o default -F _saccade saccade");
}

/* ---- zsh ---- */

static void zsh_option(const cli_option *o)
{
    const bool stands = o->name[0] != '-';
    fputs(" \\\n            '", stdout);
    if (stands)
        putchar('1');
    else
        printf("%s%s[", o->kind == LIST ? "*" : "", o->name);
    if (!stands) {
        put_quoted(o->help, "[]:");
        putchar(']');
    }
    if (o->value) {
        putchar(':');
        put_quoted(stands ? o->name : o->value, "[]:");
        putchar(':');
        if (has_words(o)) {
            putchar('(');
            put_words(o);
            putchar(')');
        } else if (cli_is_file(o)) {
            fputs("_files", stdout);
        }
    }
    putchar('\'');
}

static void zsh(void)
{
    puts("#compdef saccade\n"
         "# zsh completion for saccade; printed by: saccade completions zsh\n"
         "_saccade()\n"
         "{\n"
         "    local -a commands=(");
    for (const cli_command *c = NULL; (c = cli_next_command(c)) != NULL;) {
        printf("        '%s:", c->name);
        put_quoted(c->summary, ":");
        puts("'");
    }
    puts("    )\n"
         "    if (( CURRENT == 2 )); then\n"
         "        _describe command commands\n"
         "        return\n"
         "    fi\n"
         "    shift words\n"
         "    (( CURRENT-- ))\n"
         "    case $words[1] in");
    for (const cli_command *c = NULL; (c = cli_next_command(c)) != NULL;) {
        printf("    %s)\n        _arguments", c->name);
        for (const cli_option *o = NULL; (o = cli_next_option(c, o)) != NULL;)
            zsh_option(o);
        puts(" ;;");
    }
    puts("    esac\n"
         "}\n"
         "if [ \"$funcstack[1]\" = _saccade ]; then _saccade \"$@\"; else compdef _saccade "
         "saccade; fi");
}

/* ---- fish ---- */

static void fish_about(const char *text)
{
    fputs(" -d '", stdout);
    for (; *text; text++)
        printf(*text == '\'' || *text == '\\' ? "\\%c" : "%c", *text);
    puts("'");
}

static void fish_option(const cli_command *c, const cli_option *o)
{
    printf("complete -c saccade -n '__fish_seen_subcommand_from %s'", c->name);
    if (o->name[0] == '-')
        printf(o->name[1] == '-' ? " -l %s" : " -s %s", o->name + (o->name[1] == '-' ? 2 : 1));
    else
        fputs(" -f", stdout);
    if (o->value && o->name[0] == '-')
        fputs(cli_is_file(o) && !has_words(o) ? " -r -F" : " -x", stdout);
    if (has_words(o)) {
        fputs(" -a '", stdout);
        put_words(o);
        putchar('\'');
    }
    fish_about(o->help);
}

static void fish(void)
{
    puts("# fish completion for saccade; printed by: saccade completions fish");
    for (const cli_command *c = NULL; (c = cli_next_command(c)) != NULL;) {
        printf("complete -c saccade -n __fish_use_subcommand -f -a %s", c->name);
        fish_about(c->summary);
    }
    for (const cli_command *c = NULL; (c = cli_next_command(c)) != NULL;)
        for (const cli_option *o = NULL; (o = cli_next_option(c, o)) != NULL;)
            fish_option(c, o);
}

saccade_status cmd_completions(const cli_args *args, saccade_error *err)
{
    static const struct {
        const char *name;
        void (*print)(void);
    } shells[] = {{"bash", bash}, {"zsh", zsh}, {"fish", fish}};
    for (int i = 0; args->shell && i < 3; i++) {
        if (strcmp(args->shell, shells[i].name) == 0) {
            shells[i].print();
            return SACCADE_OK;
        }
    }
    return cli_fail(err, SACCADE_EINVAL, "completions",
                    "got '%.40s', expected bash, zsh or fish", args->shell ? args->shell : "");
}
