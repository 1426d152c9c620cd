/* Files that are written apart from each other and from what is read. Two paths may lead to one
 * file, so what exists is compared by device and inode, and what does not by its folder's and
 * its name. */
#include "apart.h"
#include "inputs.h"
#include "outfile.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { FILES = 8 + 4 * CLI_LIST };

typedef struct file_list {
    cli_file item[FILES];
    int n;
} file_list;

static void add(file_list *list, const char *option, const char *path)
{
    if (path)
        list->item[list->n++] = (cli_file){option, path};
}

static void list_inputs(const cli_args *args, file_list *list)
{
    add(list, "-q", args->q_file);
    add(list, "-k", args->k_file);
    add(list, "-v", args->v_file);
    add(list, "--grad", args->d_out_file);
    add(list, "--sinks", input_file_of_value(args->sinks));
    add(list, "--q-offset", input_file_of_value(args->q_offset));
    add(list, "--kv-len", input_file_of_value(args->kv_len));
    add(list, "--mask", input_file_of_text(args->mask));
    add(list, "--weight", input_file_of_text(args->weight));
    for (int i = 0; i < args->score.n; i++)
        add(list, "--score", input_file_of_text(args->score.item[i]));
    for (int i = 0; i < args->bind.n; i++) {
        const char *equals = strchr(args->bind.item[i], '=');
        add(list, "--bind", input_file_of_value(equals ? equals + 1 : NULL));
    }
}

/* Where a path leads. */
typedef struct place {
    const char *name; /* in the folder, of a file that does not exist */
    struct stat info; /* the file's, else its folder's */
    bool exists, is_known;
} place;

static place look(const char *path)
{
    const char *slash = strrchr(path, '/');
    place p = {.name = slash ? slash + 1 : path};
    p.exists = p.is_known = outfile_stat(path, &p.info);
    if (p.exists)
        return p;
    char *folder = slash ? strndup(path, (size_t)(slash + 1 - path)) : strdup(".");
    p.is_known = folder && stat(folder, &p.info) == 0;
    free(folder);
    return p;
}

static bool is_same(const place *a, const place *b)
{
    return a->is_known && b->is_known && a->exists == b->exists
           && a->info.st_dev == b->info.st_dev && a->info.st_ino == b->info.st_ino
           && (a->exists || strcmp(a->name, b->name) == 0);
}

/* Of the n files the first that lies at `at`, or NULL. */
static const cli_file *find(const cli_file *files, int n, const place *at)
{
    for (int i = 0; i < n; i++) {
        const place other = look(files[i].path);
        if (is_same(&other, at))
            return &files[i];
    }
    return NULL;
}

saccade_status apart_check(const cli_args *args, const cli_file *written, int n,
                           saccade_error *err)
{
    file_list inputs = {.n = 0};
    list_inputs(args, &inputs);
    for (int i = 0; i < n; i++) {
        const cli_file *w = &written[i];
        const place at = look(w->path);
        const cli_file *other = find(written, i, &at);
        CLI_FAIL_IF(other, SACCADE_EINVAL, w->option,
                    "got '%.80s' to write, which %s writes, expected another file", w->path,
                    other->option);
        if (at.exists && !S_ISREG(at.info.st_mode))
            continue; /* what a device or a pipe is given is not what it gives */
        other = find(inputs.item, inputs.n, &at);
        CLI_FAIL_IF(other, SACCADE_EINVAL, w->option,
                    "got '%.80s' to write, which %s reads, expected another file", w->path,
                    other->option);
    }
    return SACCADE_OK;
}
