/* saccade man: the manual page, made of the tables of commands and options. The markup is
 * man(7)'s; commands' texts have examples in lines that four spaces begin. */
#include "options.h"

#include <string.h>

static const char *const variables[][2] = {
    {"SACCADE_LEVEL", "at most this instruction set: portable, avx2, avx512 or amx"},
    {"OMP_NUM_THREADS", "threads where --threads says nothing, instead of all that are usable"},
    {"OMP_THREAD_LIMIT", "the most threads that a command has where --threads says nothing"},
    {"SACCADE_CACHE_DIR", "where compiled code for GPUs is kept; else XDG_CACHE_HOME/saccade, "
                          "else HOME/.cache/saccade"},
};

static const char *const codes[][2] = {
    {"0", "done"},
    {"1", "a check failed"},
    {"2", "something to change in what was given, or not there: a file, a back end"},
    {"3", "a mistake of the program's own"},
};

/* Text as it is: dashes that can be copied, no requests, no escapes. */
static void put(const char *text, size_t bytes)
{
    if (bytes && (text[0] == '.' || text[0] == '\''))
        fputs("\\&", stdout);
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] == '\\')
            fputs("\\e", stdout);
        else if (text[i] == '-')
            fputs("\\-", stdout);
        else
            putchar(text[i]);
    }
}

static void put_line(const char *text)
{
    put(text, strlen(text));
    putchar('\n');
}

static void put_item(const char *name, const char *value, const char *text)
{
    fputs(".TP\n.B ", stdout);
    put(name, strlen(name));
    if (value) {
        fputs(" \\fI", stdout);
        put(value, strlen(value));
        fputs("\\fR", stdout);
    }
    putchar('\n');
    put_line(text);
}

/* Paragraphs, and examples in lines of their own. */
static void put_text(const char *text)
{
    bool is_example = false, is_new = true;
    for (const char *line = text; *line;) {
        const size_t bytes = strcspn(line, "\n");
        const bool indented = bytes > 4 && strncmp(line, "    ", 4) == 0;
        if (is_example && !indented)
            puts(".EE");
        if (bytes && is_new && !indented)
            puts(".PP");
        if (indented && !is_example)
            puts(".PP\n.EX");
        is_example = indented;
        is_new = bytes == 0;
        if (bytes) {
            put(line + (indented ? 4 : 0), bytes - (indented ? 4 : 0));
            putchar('\n');
        }
        line += bytes + (line[bytes] == '\n');
    }
    if (is_example)
        puts(".EE");
}

static void put_command(const cli_command *command)
{
    fputs(".SS saccade ", stdout);
    put_line(command->name);
    fputs(".B saccade ", stdout);
    put_line(command->name);
    if (command->synopsis[0])
        put_line(command->synopsis);
    put_text(command->text);
    for (const cli_option *o = NULL; (o = cli_next_option(command, o)) != NULL;)
        put_item(o->name, o->value, o->help);
}

saccade_status cmd_man(const cli_args *args, saccade_error *err)
{
    (void)args, (void)err;
    printf(".TH SACCADE 1 \"\" \"saccade %s\" \"User Commands\"\n", saccade_version());
    puts(".SH NAME\nsaccade \\- exact, fused attention with your own masks and scores");
    puts(".SH SYNOPSIS\n.B saccade\n.I COMMAND\n.RI [ option ]...");
    puts(".SH DESCRIPTION\n"
         "Masks and scores are one line of text: which scores count, and how they change.\n"
         "Files are NumPy's. An option's value may follow it or an equals sign,\n"
         "and may begin with a dash.");
    puts(".SH COMMANDS");
    for (const cli_command *c = NULL; (c = cli_next_command(c)) != NULL;)
        put_item(c->name, NULL, c->summary);
    puts(".SH OPTIONS");
    for (const cli_command *c = NULL; (c = cli_next_command(c)) != NULL;)
        put_command(c);
    puts(".SH EXIT STATUS");
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++)
        put_item(codes[i][0], NULL, codes[i][1]);
    puts(".SH ENVIRONMENT");
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++)
        put_item(variables[i][0], NULL, variables[i][1]);
    return SACCADE_OK;
}
