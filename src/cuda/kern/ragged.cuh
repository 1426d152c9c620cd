/* Where the rows and keys of a batch lie among those of the tensors: all of them, or with
 * CFG_RAGGED those of its sequence. */
#pragma once

struct sequence {
    int q_first, q_len, kv_first, keys;
};

#if CFG_RAGGED
/* Rows, or keys, of sequence b; at most `most`, and inside of the tensor. */
DEVICE void sequence_of(const int *starts, int b, int all, int most, int &first, int &count)
{
    first = 0;
    count = most;
    if (!starts)
        return;
    first = max(0, min(__ldg(starts + b), all));
    int past = max(first, min(__ldg(starts + b + 1), all));
    count = min(past - first, most);
}
#endif

DEVICE sequence sequence_at(const cu_fwd &p, int b)
{
    sequence s = {0, p.M, 0, p.N};
#if CFG_RAGGED
    sequence_of(p.ragged.q_first, b, p.ragged.rows, p.M, s.q_first, s.q_len);
    sequence_of(p.ragged.kv_first, b, p.ragged.keys, p.N, s.kv_first, s.keys);
#endif
    return s;
}
