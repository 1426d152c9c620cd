/* Problems as text: `/kv heads`, `kv` and `dv` default to the query's; words in any order. */
#include "problem_text.h"

#include <string.h>

/* Sizes that no word has named are 0. */
static bool size_word(const char *word, saccade_sizes *s)
{
    const struct {
        const char *key;
        int64_t *value;
    } keys[] = {{"kv", &s->KV}, {"dv", &s->Dv}, {"b", &s->B},
                {"h", &s->H},   {"q", &s->Q},   {"d", &s->D}};
    for (int i = 0; i < 6; i++) {
        const size_t n = strlen(keys[i].key);
        char number[24], *slash;
        if (strncmp(word, keys[i].key, n) != 0 || word[n] < '0' || word[n] > '9')
            continue;
        snprintf(number, sizeof number, "%s", word + n);
        slash = strchr(number, '/');
        if (*keys[i].value || (slash && keys[i].value != &s->H))
            return false;
        if (slash)
            *slash = 0;
        return cli_parse_int(number, keys[i].value) && *keys[i].value > 0
               && (!slash || (cli_parse_int(slash + 1, &s->Hkv) && s->Hkv > 0));
    }
    return false;
}

static bool dtype_word(const char *word, saccade_dtype *dtype)
{
    static const saccade_dtype floats[] = {SACCADE_F32, SACCADE_F16, SACCADE_BF16, SACCADE_F64};
    for (int i = 0; i < 4 && *dtype == SACCADE_NONE; i++)
        if (strcmp(word, saccade_dtype_name(floats[i])) == 0) {
            *dtype = floats[i];
            return true;
        }
    return false;
}

static saccade_status check(const char *text, const saccade_sizes *s, saccade_error *err)
{
    const int64_t lengths[] = {s->B, s->H, s->Hkv, s->Q, s->KV, s->D, s->Dv};
    for (int i = 0; i < 7; i++)
        CLI_FAIL_IF(lengths[i] < 1 || lengths[i] > (int64_t)1 << 30, SACCADE_EINVAL,
                    "--problem", "got '%.80s', expected at least q and d, all 1 to 2^30", text);
    CLI_FAIL_IF(s->H % s->Hkv != 0, SACCADE_EINVAL, "--problem",
                "got h%lld/%lld, expected query heads a multiple of key heads", (long long)s->H,
                (long long)s->Hkv);
    return SACCADE_OK;
}

saccade_status problem_read(const char *text, saccade_sizes *sizes, saccade_dtype *dtype,
                            saccade_error *err)
{
    saccade_sizes s = {.B = 0};
    saccade_dtype t = SACCADE_NONE;
    for (const char *at = text; *(at += strspn(at, " ")); at += strcspn(at, " ")) {
        char word[32];
        const int n = (int)strcspn(at, " ");
        snprintf(word, sizeof word, "%.*s", n, at);
        CLI_FAIL_IF(n >= (int)sizeof word || (!size_word(word, &s) && !dtype_word(word, &t)),
                    SACCADE_EINVAL, "--problem",
                    "got '%s', expected words like b2 h16/4 q4096 kv4096 d128 dv64 bf16, each "
                    "once and from 1",
                    word);
    }
    s.B = s.B ? s.B : 1;
    s.H = s.H ? s.H : 1;
    s.Hkv = s.Hkv ? s.Hkv : s.H;
    s.KV = s.KV ? s.KV : s.Q;
    s.Dv = s.Dv ? s.Dv : s.D;
    CLI_TRY(check(text, &s, err));
    *sizes = s;
    *dtype = t ? t : SACCADE_F32;
    return SACCADE_OK;
}

void problem_show(const saccade_sizes *s, saccade_dtype dtype, char *out)
{
    char group[24] = "", dv[24] = "";
    if (s->Hkv != s->H)
        snprintf(group, sizeof group, "/%lld", (long long)s->Hkv);
    if (s->Dv != s->D)
        snprintf(dv, sizeof dv, "dv%lld ", (long long)s->Dv);
    snprintf(out, PROBLEM_BYTES, "b%lld h%lld%s q%lld kv%lld d%lld %s%s", (long long)s->B,
             (long long)s->H, group, (long long)s->Q, (long long)s->KV, (long long)s->D, dv,
             saccade_dtype_name(dtype));
}
