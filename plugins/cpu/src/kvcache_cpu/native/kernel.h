/* The kernel, compiled once for each instruction set: online softmax over a run of keys for some rows of queries.
 *
 * Keys are taken in tiles. The scores of a tile lie in fours of tokens, `[fours][slots][4]`: a vector holds a few rows
 * of four tokens each, so that the exponential and the sums need no other order. A slot is the place of a row.
 */

#define FOLDED (W / 4) /* rows in one vector of scores */

/* 2 to the power of t, for t <= 0; NaN for NaN. Below the smallest normal number it is 0. */
FN V L(v_exp2)(V t)
{
    const V magic = L(v_set)(12582912.0f + 127.0f);
    V clamped = L(v_max)(L(v_set)(-127.0f), t);
    V shifted = L(v_add)(clamped, magic);
    V f = L(v_sub)(clamped, L(v_sub)(shifted, magic));
    V p = L(v_set)(1.5403530e-4f); /* ln(2)^k / k! */
    p = L(v_fma)(p, f, L(v_set)(1.3333558e-3f));
    p = L(v_fma)(p, f, L(v_set)(9.6181291e-3f));
    p = L(v_fma)(p, f, L(v_set)(5.5504109e-2f));
    p = L(v_fma)(p, f, L(v_set)(2.4022651e-1f));
    p = L(v_fma)(p, f, L(v_set)(6.9314718e-1f));
    p = L(v_fma)(p, f, L(v_set)(1.0f));
    return L(v_zero_below)(L(v_mul)(p, L(v_power)(shifted)), t, -126.0f);
}

/* Scores of `rows` queries and four keys, written to `out[slots][4]`. */
FN void L(score_four)(const int dtype, const int rows, const piece *x, const float *q, const char *const key[4],
                      float *out)
{
    enum { MOST = 4 };
    const int step = SCORE_TOKENS(rows);
    const int twice = rows == 1; /* enough sums in flight to hide the latency of an addition */
    const int64_t whole = x->dim / (2 * W);
    const int rest = (int)(x->dim % (2 * W));
    V half[MOST][2], four[MOST];
#pragma GCC unroll 2
    for (int first = 0; first < 4; first += step) {
        V sum[MOST][4], more[4];
#pragma GCC unroll 4
        for (int t = 0; t < step; t++) {
            more[t] = L(v_zero)();
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                sum[r][t] = L(v_zero)();
        }
        const float *at = q;
        int64_t offset = 0;
        for (int64_t c = 0; c < whole; c++, at += 2 * W, offset += 2 * W * SIZE_OF(dtype)) {
#pragma GCC unroll 2
            for (int part = 0; part < 2; part++) {
                V qs[MOST];
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
                    if (IN_REGISTER(rows, r))
                        qs[r] = L(v_keep)(at + r * x->dim_padded + part * W);
#pragma GCC unroll 4
                for (int t = 0; t < step; t++) {
                    const char *p = key[first + t] + offset;
                    const V k = part ? L(v_second)(dtype, p) : L(v_first)(dtype, p);
#pragma GCC unroll 4
                    for (int r = 0; r < rows; r++) {
                        V *s = twice && part ? &more[t] : &sum[r][t];
                        if (IN_REGISTER(rows, r))
                            L(v_gather)(s, k, qs[r]);
                        else
                            L(v_gather_from)(s, k, at + r * x->dim_padded + part * W);
                    }
                }
            }
        }
        if (rest) {
#pragma GCC unroll 4
            for (int t = 0; t < step; t++) {
                V a, b;
                L(v_part)(dtype, key[first + t] + offset, rest, &a, &b);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) {
                    L(v_gather_from)(&sum[r][t], a, at + r * x->dim_padded);
                    L(v_gather_from)(&sum[r][t], b, at + r * x->dim_padded + W);
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            if (twice) {
#pragma GCC unroll 4
                for (int t = 0; t < step; t++)
                    sum[r][t] = L(v_add)(sum[r][t], more[t]);
            }
            half[r][first / 2] = L(v_halves)(sum[r][0], sum[r][1]);
            if (step == 4)
                half[r][1] = L(v_halves)(sum[r][2], sum[r][3]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < MOST; r++)
        four[r] = r < rows ? L(v_pairs)(half[r][0], half[r][1]) : four[0];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r += FOLDED)
        L(v_store)(out + r * 4, L(v_fold)(four + r));
}

FN void L(score_tile)(const int dtype, const int rows, const piece *x, const float *q, int64_t first, int count,
                      float *out, int slots, int fetch)
{
    const int64_t last = first + count - 1;
    const int64_t bytes = fetch ? 4 * x->value_dim * SIZE_OF(dtype) : 0; /* of values to bring near, as if adjacent */
    const char *value = x->value + first * x->value_token;
    for (int t = 0; t < count; t += 4, value += bytes) {
        const char *key[4];
        for (int i = 0; i < 4; i++)
            key[i] = x->key + (first + t + i < last ? first + t + i : last) * x->key_token;
        for (int64_t at = 0; at < bytes; at += 64)
            __builtin_prefetch(value + at);
        L(score_four)(dtype, rows, x, q, key, out + (int64_t)t * slots);
    }
}

/* Adds one weighed value to `chunks` chunks of the sums of `rows` rows. */
FN void L(weigh_one)(const int dtype, const int rows, const int chunks, const char *value, const int part,
                     const float *weight, V sum[4][8])
{
#pragma GCC unroll 4
    for (int c = 0; c < chunks; c++) {
        V a, b;
        if (part)
            L(v_part)(dtype, value, part, &a, &b);
        else
            L(v_chunk)(dtype, value + c * 2 * W * SIZE_OF(dtype), &a, &b);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const V p = L(v_spread)(weight + r * 4);
            L(v_gather)(&sum[r][2 * c], p, a);
            L(v_gather)(&sum[r][2 * c + 1], p, b);
        }
    }
}

/* Adds the weighed values of a tile to `chunks` chunks of the sums of `rows` rows. */
FN void L(weigh_chunks)(const int dtype, const int rows, const int chunks, const piece *x, const char *value,
                        const int part, int count, const float *weight, int slots, float *sums, const char *fetch)
{
    V sum[4][8];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < 2 * chunks; c++)
            sum[r][c] = L(v_load)(sums + r * x->value_padded + c * W);
    }
    const int64_t step = x->value_token;
    const int lines = 4 * chunks * 2 * W * SIZE_OF(dtype) / 64; /* as much as is read meanwhile */
    int left = count;
    for (; left >= 4; left -= 4, weight += slots * 4, fetch += lines * 64) {
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++) {
#pragma GCC unroll 8
            for (int line = t * lines / 4; line < (t + 1) * lines / 4; line++)
                __builtin_prefetch(fetch + line * 64);
            L(weigh_one)(dtype, rows, chunks, value, part, weight + t, sum);
            value += step;
        }
    }
    for (; left > 0; left--, weight++, value += step)
        L(weigh_one)(dtype, rows, chunks, value, part, weight, sum);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 8
        for (int c = 0; c < 2 * chunks; c++)
            L(v_store)(sums + r * x->value_padded + c * W, sum[r][c]);
    }
}

FN void L(weigh_tile)(const int dtype, const int rows, const piece *x, int64_t first, int count, const float *weight,
                      int slots, float *sums, int64_t next)
{
    const int together = rows > 2 ? (W == 16 ? 2 : rows == 3 ? 2 : 1) : rows == 2 ? 2 : 4;
    const int64_t whole = x->value_dim / (2 * W), size = 2 * W * SIZE_OF(dtype);
    const int rest = (int)(x->value_dim % (2 * W));
    const char *value = x->value + first * x->value_token;
    const char *key = x->key + next * x->key_token; /* brought near meanwhile, as if rows were adjacent */
    int64_t c = 0;
#define FETCH (key + c * size * count)
    for (; c + together <= whole; c += together)
        L(weigh_chunks)(dtype, rows, together, x, value + c * size, 0, count, weight, slots, sums + c * 2 * W, FETCH);
    for (; together > 1 && c < whole; c++)
        L(weigh_chunks)(dtype, rows, 1, x, value + c * size, 0, count, weight, slots, sums + c * 2 * W, FETCH);
    if (rest)
        L(weigh_chunks)(dtype, rows, 1, x, value + c * size, rest, count, weight, slots, sums + c * 2 * W, FETCH);
#undef FETCH
}

/* Continues the softmax over a tile's scores, which become weights. The largest score is subtracted before scaling,
 * which is exact where it matters: at the scores near it. `lanes` is four times the slots. */
FN int L(soften_tile)(float scale, float *scores, int fours, int lanes, float *most, float *total, float *shrink)
{
    const V factor = L(v_set)(scale);
    int shrunk = 0;
    for (int i = 0; i < lanes; i += W) {
        const V before = L(v_load)(most + i);
        V m = before;
        for (int f = 0; f < fours; f++)
            m = L(v_max)(L(v_load)(scores + f * lanes + i), m);
        m = L(v_max4)(m);
        const V corrected = L(v_exp2)(L(v_mul)(L(v_sub)(before, m), factor));
        V sum = L(v_mul)(L(v_load)(total + i), corrected);
        for (int f = 0; f < fours; f++) {
            float *s = scores + f * lanes + i;
            const V p = L(v_exp2)(L(v_mul)(L(v_sub)(L(v_load)(s), m), factor));
            L(v_store)(s, p);
            sum = L(v_add)(sum, p);
        }
        shrunk |= L(v_differ)(before, m);
        L(v_store)(most + i, m);
        L(v_store)(total + i, sum);
        L(v_store)(shrink + i, corrected);
    }
    return shrunk;
}

#define WITH_ROWS(number, call) \
    {                           \
        enum { ROWS = number }; \
        call;                   \
        break;                  \
    }
#define BY_ROWS(rows, call)               \
    switch (rows) {                       \
    case 1: WITH_ROWS(1, call)            \
    case 2: WITH_ROWS(2, call)            \
    case 3: WITH_ROWS(3, call)            \
    default: WITH_ROWS(4, call)           \
    }

/* Rows `row` to `row + rows` of the piece meet the keys `first` to `stop`, all of which they see. */
FN void L(meet)(const int dtype, const piece *x, int row, int rows, int64_t first, int64_t stop)
{
    if (first >= stop)
        return;
    const int block = rows <= 4 ? rows : rows % 4 == 0 ? 4 : rows % 3 == 0 ? 3 : 4;
    const int room = (block + FOLDED - 1) / FOLDED * FOLDED; /* slots of a block */
    const int blocks = (rows + block - 1) / block;
    const int slots = blocks * room, lanes = slots * 4;
    float scores[MOST_SLOTS * MOST_TILE], most[MOST_SLOTS * 4], total[MOST_SLOTS * 4], shrink[MOST_SLOTS * 4];
    for (int i = 0; i < lanes; i++) {
        most[i] = -FLT_MAX; /* not -infinity: a row of scores that are all -infinity is then 0 / 0, NaN */
        total[i] = 0;
    }
    for (int r = 0; r < rows; r++) {
        const int slot = r / block * room + r % block;
        for (int i = 0; i < 4; i++)
            most[slot * 4 + i] = x->most[row + r];
        total[slot * 4] = x->total[row + r];
    }
    piece elsewhere = *x;
    elsewhere.key += x->shift;
    elsewhere.value += x->shift;
    for (int64_t at = first; at < stop; at += x->tile) {
        const int count = stop - at < x->tile ? (int)(stop - at) : x->tile;
        const int64_t left = x->num_elsewhere - at;
        const int there = left >= count ? count : left > 0 ? (int)left / 4 * 4 : 0; /* keys to read elsewhere */
        const struct {
            const piece *x;
            int from, to;
        } places[2] = {{&elsewhere, 0, there}, {x, there, count}}; /* both in whole fours: sums come out the same */
        const int fours = (count + 3) / 4;
        for (int b = 0; b < blocks; b++) {
            const int here = rows - b * block < block ? rows - b * block : block;
            const float *q = x->query + (row + b * block) * x->dim_padded;
            for (int i = 0; i < 2; i++) {
                const int from = places[i].from, part = places[i].to - from;
                float *s = scores + b * room * 4 + from * slots;
                if (part > 0)
                    BY_ROWS(here, L(score_tile)(dtype, ROWS, places[i].x, q, at + from, part, s, slots, b == 0))
            }
            for (int r = (here + FOLDED - 1) / FOLDED * FOLDED; r < room; r++)
                for (int f = 0; f < fours; f++)
                    for (int i = 0; i < 4; i++)
                        scores[(f * slots + b * room + r) * 4 + i] = 0;
        }
        for (int t = count; t < fours * 4; t++)
            for (int slot = 0; slot < slots; slot++)
                scores[((fours - 1) * slots + slot) * 4 + t % 4] = -INFINITY;
        if (L(soften_tile)(x->scale, scores, fours, lanes, most, total, shrink)) {
            for (int r = 0; r < rows; r++) {
                const V factor = L(v_set)(shrink[(r / block * room + r % block) * 4]);
                float *sum = x->sums + (row + r) * x->value_padded;
                for (int64_t i = 0; i < x->value_padded; i += W)
                    L(v_store)(sum + i, L(v_mul)(L(v_load)(sum + i), factor));
            }
        }
        for (int b = 0; b < blocks; b++) {
            const int here = rows - b * block < block ? rows - b * block : block;
            float *sums = x->sums + (row + b * block) * x->value_padded;
            const int64_t next = stop - at >= 2 * x->tile ? at + x->tile : at;
            for (int i = 0; i < 2; i++) {
                const int from = places[i].from, part = places[i].to - from;
                const float *s = scores + b * room * 4 + from * slots;
                if (part > 0)
                    BY_ROWS(here, L(weigh_tile)(dtype, ROWS, places[i].x, at + from, part, s, slots, sums, next))
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        const int slot = r / block * room + r % block;
        x->most[row + r] = most[slot * 4];
        x->total[row + r] = (total[slot * 4] + total[slot * 4 + 1]) + (total[slot * 4 + 2] + total[slot * 4 + 3]);
    }
}

/* Spreads a row over chunks; it has the dtype of the keys, so that these lie alike. */
FN void L(take)(const int dtype, const char *row, int64_t dim, float sign, float *out)
{
    const V factor = L(v_set)(sign);
    for (int64_t i = 0; i < dim; i += 2 * W, row += 2 * W * SIZE_OF(dtype)) {
        V a, b;
        if (dim - i < 2 * W)
            L(v_part)(dtype, row, (int)(dim - i), &a, &b);
        else
            L(v_chunk)(dtype, row, &a, &b);
        L(v_store)(out + i, L(v_mul)(a, factor));
        L(v_store)(out + i + W, L(v_mul)(b, factor));
    }
}

/* The reverse, with a factor on all elements. */
FN void L(give)(const int dtype, const float *sums, int64_t dim, float share, char *row)
{
    const V factor = L(v_set)(share);
    for (int64_t i = 0; i < dim; i += 2 * W, row += 2 * W * SIZE_OF(dtype)) {
        const V a = L(v_mul)(L(v_load)(sums + i), factor), b = L(v_mul)(L(v_load)(sums + i + W), factor);
        if (dim - i >= 2 * W) {
            L(v_write)(dtype, row, a, b);
        } else {
            char whole[2 * W * 4];
            L(v_write)(dtype, whole, a, b);
            memcpy(row, whole, (size_t)(dim - i) * SIZE_OF(dtype));
        }
    }
}

#define FOR_DTYPE(NAME, DTYPE)                                                                                     \
    TARGET static void L(meet_##NAME)(const piece *x, int row, int rows, int64_t first, int64_t stop)              \
    {                                                                                                              \
        L(meet)(DTYPE, x, row, rows, first, stop);                                                                 \
    }                                                                                                              \
    TARGET static void L(take_##NAME)(const char *row, int64_t dim, float sign, float *out)                        \
    {                                                                                                              \
        L(take)(DTYPE, row, dim, sign, out);                                                                       \
    }                                                                                                              \
    TARGET static void L(give_##NAME)(const float *sums, int64_t dim, float share, char *row)                      \
    {                                                                                                              \
        L(give)(DTYPE, sums, dim, share, row);                                                                     \
    }
FOR_DTYPE(f32, KVCACHE_F32)
FOR_DTYPE(bf16, KVCACHE_BF16)
FOR_DTYPE(f16, KVCACHE_F16)

static const level_kernel L(kernel) = {
    W,
    {L(meet_f32), L(meet_bf16), L(meet_f16)},
    {L(take_f32), L(take_bf16), L(take_f16)},
    {L(give_f32), L(give_bf16), L(give_f16)},
};

#undef FOR_DTYPE
#undef FOLDED
#undef BY_ROWS
#undef WITH_ROWS
#undef W
#undef V
#undef SCORE_TOKENS
#undef IN_REGISTER
#undef L
#undef FN
#undef TARGET
