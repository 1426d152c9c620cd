/* generate.c: text in, text out. Tokens of the prompt go through the decoder in chunks, then
 * each new one alone; progress goes to stderr, the text to stdout. */
#include "blas.h"
#include "bpe.h"
#include "decoder.h"
#include "generate_options.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct session {
    generate_options o;
    gguf file;
    bpe *words; /* NULL with --tokens */
    decoder *model;
    int32_t *tokens;
    int64_t n;
    int64_t eos;
    int shows; /* progress */
    trouble t;
} session;

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + 1e-9 * (double)at.tv_nsec;
}

/* ---- the prompt ---- */

static char *read_text(const char *path, size_t *bytes, trouble *t)
{
    FILE *f = fopen(path, "rb");
    size_t room = 1 << 16;
    char *text = malloc(room);
    *bytes = 0;
    while (f && text) {
        *bytes += fread(text + *bytes, 1, room - *bytes, f);
        if (*bytes < room)
            break;
        char *more = room < 1 << 28 ? realloc(text, room *= 2) : NULL;
        if (!more)
            free(text);
        text = more;
    }
    const int is_read = f && text && !ferror(f);
    if (f)
        fclose(f);
    if (is_read)
        return text;
    refuse(t, "%s: expected a file that can be read, of less than 256 MiB", path);
    free(text);
    return NULL;
}

static int read_numbers(session *s, const char *text)
{
    int64_t room = 1;
    for (const char *p = text; *p; p++)
        room += *p == ',';
    s->tokens = malloc((size_t)room * sizeof *s->tokens);
    if (!s->tokens)
        return refuse(&s->t, "--tokens: no memory");
    for (char *end; *text; text = end + (*end == ',')) {
        const long x = strtol(text, &end, 10);
        if (end == text || (*end && *end != ',') || x < 0 || x > INT32_MAX)
            return refuse(&s->t, "--tokens: got \"%.20s\", expected numbers and commas", text);
        s->tokens[s->n++] = (int32_t)x;
    }
    return 0;
}

/* ChatML: the question within the model's own marks. */
static char *in_chat(session *s, const char *text, size_t *bytes)
{
    static const char before[] = "<|im_start|>user\n";
    static const char after[] = "<|im_end|>\n<|im_start|>assistant\n";
    if (bpe_find(s->words, "<|im_start|>", 12) < 0
        || bpe_find(s->words, "<|im_end|>", 10) < 0) {
        refuse(&s->t, "%s: got no tokens <|im_start|> and <|im_end|>, which --chat needs",
               s->o.model);
        return NULL;
    }
    char *all = malloc(*bytes + sizeof before + sizeof after);
    if (!all) {
        refuse(&s->t, "--chat: no memory");
        return NULL;
    }
    memcpy(all, before, sizeof before - 1);
    memcpy(all + sizeof before - 1, text, *bytes);
    memcpy(all + sizeof before - 1 + *bytes, after, sizeof after - 1);
    *bytes += sizeof before - 1 + sizeof after - 1;
    return all;
}

static int encode(session *s, const char *text, size_t bytes)
{
    int64_t begins, first, n;
    const gguf_value *adds = gguf_find(&s->file, "tokenizer.ggml.add_bos_token");
    s->tokens = malloc((bytes + 2) * sizeof *s->tokens);
    if (!s->tokens)
        return refuse(&s->t, "no memory for the tokens of %zu bytes", bytes);
    begins = adds && adds->type == GGUF_BOOL && !adds->is_array && adds->at[0];
    if (begins) {
        if (gguf_integer(&s->file, "tokenizer.ggml.bos_token_id", 0, bpe_tokens(s->words) - 1,
                         -1, &first, &s->t))
            return -1;
        s->tokens[s->n++] = (int32_t)first;
    }
    if (bpe_encode(s->words, text, bytes, s->tokens + s->n, &n, &s->t))
        return -1;
    s->n += n;
    return 0;
}

static int read_prompt(session *s)
{
    const char *path = s->o.perplexity_file ? s->o.perplexity_file : s->o.prompt_file;
    const char *prompt = s->o.prompt ? s->o.prompt : "Once upon a time";
    if (s->o.tokens)
        return read_numbers(s, s->o.tokens);
    size_t bytes = strlen(prompt);
    char *text = path ? read_text(path, &bytes, &s->t) : strdup(prompt);
    if (!text)
        return -1;
    if (s->o.is_chat) {
        char *asked = in_chat(s, text, &bytes);
        free(text);
        if (!asked)
            return -1;
        text = asked;
    }
    const int status = encode(s, text, bytes);
    free(text);
    return status;
}

/* ---- what is seen ---- */

static void show_reading(int64_t done, int64_t all)
{
    fprintf(stderr, "\rreading weights: %3d %%", (int)(100 * done / all));
    if (done == all)
        fputs("\r                      \r", stderr);
}

static void put_token(const session *s, int32_t token)
{
    char text[1024];
    if (s->o.prints_tokens || !s->words)
        printf("%d ", token);
    else
        fwrite(text, 1, bpe_decode(s->words, token, text, sizeof text), stdout);
    fflush(stdout);
}

static void show_speed(const session *s, const char *what, int64_t tokens, double seconds,
                       double attention)
{
    if (s->o.is_quiet || tokens <= 0)
        return;
    fprintf(stderr, "%s: %lld tokens, %.1f tokens/s, %.1f ms each, attention %.1f %% of it\n",
            what, (long long)tokens, (double)tokens / seconds, 1e3 * seconds / (double)tokens,
            100 * attention / seconds);
}

/* ---- running ---- */

/* All tokens; `each` is given the logits after each of a chunk, or NULL with those of the last
 * token of all in `logits`. */
static int run_prompt(session *s, float *logits, int all,
                      void each(session *s, const float *logits, int64_t first, int64_t n))
{
    for (int64_t at = 0; at < s->n; at += DECODER_CHUNK) {
        const int64_t n = s->n - at < DECODER_CHUNK ? s->n - at : DECODER_CHUNK;
        const int is_last = at + n == s->n;
        if (decoder_run(s->model, s->tokens + at, n, all, all || is_last ? logits : NULL,
                        &s->t))
            return -1;
        if (each)
            each(s, logits, at, n);
        if (s->shows && !is_last)
            fprintf(stderr, "\rprompt: %3d %%", (int)(100 * (at + n) / s->n));
    }
    if (s->shows && s->n > DECODER_CHUNK)
        fputs("\r              \r", stderr);
    return 0;
}

static int generate(session *s)
{
    const int64_t vocab = decoder_shape_of(s->model)->vocab;
    float *logits = malloc((size_t)vocab * sizeof *logits);
    candidate *room = malloc((size_t)vocab * sizeof *room);
    int status = logits && room ? 0 : refuse(&s->t, "no memory for logits");
    const double begin = now();
    if (status == 0)
        status = run_prompt(s, logits, 0, NULL);
    const double between = now(), of_prompt = decoder_attention_seconds(s->model);
    int64_t made = 0;
    while (!status && made < s->o.count) {
        const int32_t token = sample(&s->o.sampling, logits, vocab, room);
        if (token == s->eos)
            break;
        put_token(s, token);
        made++;
        if (made < s->o.count)
            status = decoder_run(s->model, &token, 1, 0, logits, &s->t);
    }
    const double end = now();
    if (!status) {
        putchar('\n');
        show_speed(s, "prompt", s->n, between - begin, of_prompt);
        show_speed(s, "made", made, end - between,
                   decoder_attention_seconds(s->model) - of_prompt);
    }
    free(logits);
    free(room);
    return status;
}

static double lost; /* -log of the probability of all tokens but the first */

static void add_loss(session *s, const float *logits, int64_t first, int64_t n)
{
    const int64_t vocab = decoder_shape_of(s->model)->vocab;
    for (int64_t r = 0; r < n && first + r + 1 < s->n; r++, logits += vocab) {
        double most = logits[0], sum = 0;
        for (int64_t i = 1; i < vocab; i++)
            most = logits[i] > most ? logits[i] : most;
        for (int64_t i = 0; i < vocab; i++)
            sum += exp(logits[i] - most);
        lost += log(sum) + most - logits[s->tokens[first + r + 1]];
    }
}

static int perplexity(session *s)
{
    const size_t vocab = (size_t)decoder_shape_of(s->model)->vocab;
    if (s->n < 2)
        return refuse(&s->t, "%s: got %lld tokens, expected 2 or more", s->o.perplexity_file,
                      (long long)s->n);
    float *logits = malloc(vocab * DECODER_CHUNK * sizeof *logits);
    if (!logits)
        return refuse(&s->t, "no memory for logits");
    const double begin = now();
    const int status = run_prompt(s, logits, 1, add_loss);
    free(logits);
    if (status)
        return -1;
    printf("perplexity %.6f over %lld tokens\n", exp(lost / (double)(s->n - 1)),
           (long long)s->n - 1);
    show_speed(s, "text", s->n, now() - begin, decoder_attention_seconds(s->model));
    return 0;
}

static int explain(session *s)
{
    const char *text = decoder_explain(s->model, &s->t);
    if (!text)
        return -1;
    fputs(text, stdout);
    free((void *)(uintptr_t)text);
    return 0;
}

static int run(session *s)
{
    if (gguf_open(s->o.model, &s->file, &s->t)
        || (!s->o.tokens && bpe_make(&s->file, &s->words, &s->t)) || read_prompt(s)
        || gguf_integer(&s->file, "tokenizer.ggml.eos_token_id", -1, INT32_MAX, -1, &s->eos,
                        &s->t))
        return -1;
    if (s->n == 0)
        return refuse(&s->t, "prompt: got no tokens, expected one or more");
    const int64_t needed = s->n + (s->o.perplexity_file ? 0 : s->o.count);
    s->o.context = s->o.context ? s->o.context : needed;
    blas_threads((int)s->o.threads);
    const decoder_options how = {s->o.context, (int)s->o.threads,
                                 s->o.cache,   s->o.group,
                                 s->o.page,    s->shows ? show_reading : NULL};
    if (decoder_make(&s->file, &how, &s->model, &s->t))
        return -1;
    if (s->words && bpe_tokens(s->words) != decoder_shape_of(s->model)->vocab)
        return refuse(&s->t, "%s: got %d tokens for %lld rows of token_embd.weight", s->o.model,
                      bpe_tokens(s->words), (long long)decoder_shape_of(s->model)->vocab);
    if (s->o.explains)
        return explain(s);
    return s->o.perplexity_file ? perplexity(s) : generate(s);
}

int main(int argc, char **argv)
{
    session s = {0};
    int status = generate_options_read(argc, argv, &s.o, &s.t);
    s.shows = !s.o.is_quiet && isatty(2);
    if (status == 0)
        status = run(&s);
    if (status < 0)
        fprintf(stderr, "generate: %s\n", s.t.text);
    decoder_free(s.model);
    bpe_free(s.words);
    gguf_close(&s.file);
    free(s.tokens);
    return status < 0 ? 2 : 0;
}
