/* Eight floats at a time in the vector extension of gcc and clang: SSE2, NEON or whatever the target has. */

#define W 8
typedef float L(vec) __attribute__((vector_size(32)));
typedef uint32_t L(bits) __attribute__((vector_size(32)));
typedef int32_t L(mask) __attribute__((vector_size(32)));
#define V L(vec)
#define SCORE_TOKENS(rows) ((rows) > 3 ? 2 : 4) /* keys whose scores are summed at once */
#define IN_REGISTER(rows, row) 1                /* whether a row of the query is kept in a register meanwhile */

FN V L(v_zero)(void) { return (V){0}; }
FN V L(v_set)(float x) { return (V){x, x, x, x, x, x, x, x}; }
FN V L(v_load)(const float *p)
{
    V x;
    memcpy(&x, p, sizeof x);
    return x;
}
FN void L(v_store)(float *p, V x) { memcpy(p, &x, sizeof x); }
FN V L(v_add)(V a, V b) { return a + b; }
FN V L(v_sub)(V a, V b) { return a - b; }
FN V L(v_mul)(V a, V b) { return a * b; }
FN V L(v_fma)(V a, V b, V c) { return a * b + c; }
FN void L(v_gather)(V *sum, V a, V b) { *sum = a * b + *sum; }
FN void L(v_gather_from)(V *sum, V a, const float *b) { *sum = a * L(v_load)(b) + *sum; }
FN V L(v_keep)(const float *p) { return L(v_load)(p); }
FN V L(v_spread)(const float *p) { return L(v_set)(*p); }
FN V L(v_pick)(L(mask) m, V a, V b) { return (V)(((L(mask))a & m) | ((L(mask))b & ~m)); }
/* The larger; b where either is NaN, as the instruction of x86 does. */
FN V L(v_max)(V a, V b) { return L(v_pick)(a > b, a, b); }
/* x, but 0 where t is below the limit. */
FN V L(v_zero_below)(V x, V t, float limit) { return (V)((L(mask))x & ~(t < L(v_set)(limit))); }
/* 2 to the power of the integer that the low bits of `t` hold, offset by the bias. */
FN V L(v_power)(V t) { return (V)((L(bits))t << 23); }
FN int L(v_differ)(V a, V b)
{
    L(mask) m = a == b;
    int32_t all = -1;
    for (int i = 0; i < W; i++)
        all &= m[i];
    return all == 0;
}
/* Sums of every other one, within each four floats: those of a, then those of b. */
FN V L(v_halves)(V a, V b)
{
    return (V){a[0] + a[2], a[1] + a[3], b[0] + b[2], b[1] + b[3],
               a[4] + a[6], a[5] + a[7], b[4] + b[6], b[5] + b[7]};
}
/* Sums of neighbours, within each four floats: those of a, then those of b. */
FN V L(v_pairs)(V a, V b)
{
    return (V){a[0] + a[1], a[2] + a[3], b[0] + b[1], b[2] + b[3],
               a[4] + a[5], a[6] + a[7], b[4] + b[5], b[6] + b[7]};
}
/* Adds the fours of each vector, and lays the results of the rows side by side. */
FN V L(v_fold)(const V *x)
{
    V a = x[0], b = x[1];
    return (V){a[0] + a[4], a[1] + a[5], a[2] + a[6], a[3] + a[7],
               b[0] + b[4], b[1] + b[5], b[2] + b[6], b[3] + b[7]};
}
/* The largest of each four, in all four places. */
FN V L(v_max4)(V x)
{
    V y = L(v_max)(x, (V){x[2], x[3], x[0], x[1], x[6], x[7], x[4], x[5]});
    return L(v_max)(y, (V){y[1], y[0], y[3], y[2], y[5], y[4], y[7], y[6]});
}

FN V L(v_half)(const char *p)
{
    uint16_t h[W];
    memcpy(h, p, sizeof h);
    L(bits) x = {h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]};
    L(bits) magnitude = x & 0x7fff;
    L(bits) special = (L(bits))(magnitude >= 0x7c00);
    V f = (V)(magnitude << 13) * L(v_set)(0x1p112f);
    return (V)((L(bits))f | (special & 0x7f800000) | ((x & 0x8000) << 16));
}
/* A chunk of 2 W elements in two vectors; bfloat16 gives the even and the odd ones, the others the halves. */
FN void L(v_chunk)(int dtype, const char *p, V *a, V *b)
{
    if (dtype == KVCACHE_F32) {
        memcpy(a, p, sizeof *a);
        memcpy(b, p + sizeof *a, sizeof *b);
    } else if (dtype == KVCACHE_BF16) {
        L(bits) x;
        memcpy(&x, p, sizeof x);
        *a = (V)(x << 16);
        *b = (V)(x & 0xffff0000u);
    } else {
        *a = L(v_half)(p);
        *b = L(v_half)(p + 2 * W);
    }
}
FN V L(v_first)(int dtype, const char *p)
{
    V a, b;
    L(v_chunk)(dtype, p, &a, &b);
    return a;
}
FN V L(v_second)(int dtype, const char *p)
{
    V a, b;
    L(v_chunk)(dtype, p, &a, &b);
    return b;
}
/* The first `count` elements of a chunk, a multiple of 8, and zeros. */
FN void L(v_part)(int dtype, const char *p, int count, V *a, V *b)
{
    char whole[2 * W * 4] = {0};
    memcpy(whole, p, (size_t)count * SIZE_OF(dtype));
    L(v_chunk)(dtype, whole, a, b);
}
/* The reverse of v_chunk, rounding to nearest. */
FN void L(v_write)(int dtype, char *p, V a, V b)
{
    if (dtype == KVCACHE_F32) {
        memcpy(p, &a, sizeof a);
        memcpy(p + sizeof a, &b, sizeof b);
        return;
    }
    uint16_t out[2 * W];
    for (int i = 0; i < W; i++) {
        if (dtype == KVCACHE_BF16) {
            out[2 * i] = float_to_bfloat(a[i]);
            out[2 * i + 1] = float_to_bfloat(b[i]);
        } else {
            out[i] = float_to_half(a[i]);
            out[W + i] = float_to_half(b[i]);
        }
    }
    memcpy(p, out, sizeof out);
}
