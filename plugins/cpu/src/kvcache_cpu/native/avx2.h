/* Eight floats at a time with AVX2, FMA and F16C. Functions mean what those of portable.h of the same names mean. */

#define W 8
#define V __m256
#define SCORE_TOKENS(rows) ((rows) > 3 ? 2 : 4)
#define IN_REGISTER(rows, row) ((rows) != 3 || (row) < 2) /* 12 sums leave room for two, a key and nothing else */

FN V L(v_zero)(void) { return _mm256_setzero_ps(); }
FN V L(v_set)(float x) { return _mm256_set1_ps(x); }
FN V L(v_load)(const float *p) { return _mm256_loadu_ps(p); }
FN void L(v_store)(float *p, V x) { _mm256_storeu_ps(p, x); }
FN V L(v_add)(V a, V b) { return _mm256_add_ps(a, b); }
FN V L(v_sub)(V a, V b) { return _mm256_sub_ps(a, b); }
FN V L(v_mul)(V a, V b) { return _mm256_mul_ps(a, b); }
FN V L(v_fma)(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
#if defined(__SANITIZE_ADDRESS__) /* which does not look into assembler */
#define READS(p, size) ((void)((const volatile char *)(p))[0], (void)((const volatile char *)(p))[(size)-1])
#else
#define READS(p, size) ((void)0)
#endif

/* Sixteen registers are few: these keep the compiler from holding more in them than there is room for beside twelve
 * sums, and so from spilling sums in the innermost loops. */
FN void L(v_gather)(V *sum, V a, V b) { __asm__("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b)); }
FN void L(v_gather_from)(V *sum, V a, const float *b)
{
    READS(b, 32);
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"(a), "m"(*(const __m256_u *)b));
}
FN V L(v_keep)(const float *p)
{
    V x;
    READS(p, 32);
    __asm__ volatile("vmovups %1, %0" : "=x"(x) : "m"(*(const __m256_u *)p));
    return x;
}
FN V L(v_spread)(const float *p)
{
    V x;
    READS(p, 4);
    __asm__ volatile("vbroadcastss %1, %0" : "=x"(x) : "m"(*p));
    return x;
}
static const uint32_t L(odd)[8] __attribute__((aligned(32))) = {
    0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};
FN V L(v_odd)(__m256i x)
{
    V y;
    __asm__("vpand %2, %1, %0" : "=x"(y) : "x"(x), "m"(*(const __m256i *)L(odd)));
    return y;
}
FN V L(v_max)(V a, V b) { return _mm256_max_ps(a, b); }
FN V L(v_zero_below)(V x, V t, float limit)
{
    return _mm256_andnot_ps(_mm256_cmp_ps(t, _mm256_set1_ps(limit), _CMP_LT_OQ), x);
}
FN V L(v_power)(V t) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23)); }
FN int L(v_differ)(V a, V b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)) != 0; }
FN V L(v_halves)(V a, V b) { return _mm256_add_ps(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e)); }
FN V L(v_pairs)(V a, V b) { return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd)); }
FN V L(v_fold)(const V *x)
{
    return _mm256_add_ps(_mm256_permute2f128_ps(x[0], x[1], 0x20), _mm256_permute2f128_ps(x[0], x[1], 0x31));
}
FN V L(v_max4)(V x)
{
    V y = _mm256_max_ps(x, _mm256_permute_ps(x, 0x4e));
    return _mm256_max_ps(y, _mm256_permute_ps(y, 0xb1));
}

FN void L(v_chunk)(int dtype, const char *p, V *a, V *b)
{
    if (dtype == KVCACHE_F32) {
        *a = _mm256_loadu_ps((const float *)p);
        *b = _mm256_loadu_ps((const float *)p + W);
    } else if (dtype == KVCACHE_BF16) {
        __m256i x = (__m256i)L(v_keep)((const float *)p);
        *a = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
        *b = L(v_odd)(x);
    } else {
        *a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
        *b = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1));
    }
}
FN V L(v_first)(int dtype, const char *p)
{
    if (dtype == KVCACHE_F32)
        return _mm256_loadu_ps((const float *)p);
    if (dtype == KVCACHE_BF16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)p), 16));
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
FN V L(v_second)(int dtype, const char *p)
{
    V y;
    if (dtype == KVCACHE_F32)
        return _mm256_loadu_ps((const float *)p + W);
    if (dtype == KVCACHE_F16)
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1));
    READS(p, 32);
    __asm__("vmovdqu %1, %0\n\tvpand %2, %0, %0"
            : "=&x"(y)
            : "m"(*(const __m256i_u *)p), "m"(*(const __m256i *)L(odd)));
    return y;
}
/* `count` is 8. */
FN void L(v_part)(int dtype, const char *p, int count, V *a, V *b)
{
    (void)count;
    if (dtype == KVCACHE_F32) {
        *a = _mm256_loadu_ps((const float *)p);
        *b = _mm256_setzero_ps();
    } else if (dtype == KVCACHE_BF16) {
        __m256i x = _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)p));
        *a = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
        *b = L(v_odd)(x);
    } else {
        *a = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
        *b = _mm256_setzero_ps();
    }
}
/* To bfloat16, in the upper half of each. */
FN __m256i L(v_round)(V x)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(near, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
FN void L(v_write)(int dtype, char *p, V a, V b)
{
    if (dtype == KVCACHE_F32) {
        _mm256_storeu_ps((float *)p, a);
        _mm256_storeu_ps((float *)p + W, b);
    } else if (dtype == KVCACHE_BF16) {
        const __m256i even = _mm256_srli_epi32(L(v_round)(a), 16);
        _mm256_storeu_si256((__m256i *)p, _mm256_blend_epi16(even, L(v_round)(b), 0xaa));
    } else {
        _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
        _mm_storeu_si128((__m128i *)p + 1, _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
    }
}

#undef READS
