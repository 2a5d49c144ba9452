/* Sixteen floats at a time with AVX-512 F, BW, DQ and VL. Functions mean what those of portable.h mean. */

#define W 16
#define V __m512
#define SCORE_TOKENS(rows) 4
#define IN_REGISTER(rows, row) 1

FN V L(v_zero)(void) { return _mm512_setzero_ps(); }
FN V L(v_set)(float x) { return _mm512_set1_ps(x); }
FN V L(v_load)(const float *p) { return _mm512_loadu_ps(p); }
FN void L(v_store)(float *p, V x) { _mm512_storeu_ps(p, x); }
FN V L(v_add)(V a, V b) { return _mm512_add_ps(a, b); }
FN V L(v_sub)(V a, V b) { return _mm512_sub_ps(a, b); }
FN V L(v_mul)(V a, V b) { return _mm512_mul_ps(a, b); }
FN V L(v_fma)(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
FN void L(v_gather)(V *sum, V a, V b) { *sum = _mm512_fmadd_ps(a, b, *sum); }
FN void L(v_gather_from)(V *sum, V a, const float *b) { *sum = _mm512_fmadd_ps(a, _mm512_loadu_ps(b), *sum); }
FN V L(v_keep)(const float *p) { return _mm512_loadu_ps(p); }
FN V L(v_spread)(const float *p) { return _mm512_set1_ps(*p); }
FN V L(v_max)(V a, V b) { return _mm512_max_ps(a, b); }
FN V L(v_zero_below)(V x, V t, float limit)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(t, _mm512_set1_ps(limit), _CMP_NLT_UQ), x);
}
FN V L(v_power)(V t) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(t), 23)); }
FN int L(v_differ)(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ) != 0; }
FN V L(v_halves)(V a, V b)
{
    return _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, a, b), _mm512_shuffle_ps(a, b, 0x4e));
}
FN V L(v_pairs)(V a, V b)
{
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
FN V L(v_fold)(const V *x)
{
    V a = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
    V b = _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x88), _mm512_shuffle_f32x4(x[2], x[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
FN V L(v_max4)(V x)
{
    V y = _mm512_max_ps(x, _mm512_permute_ps(x, 0x4e));
    return _mm512_max_ps(y, _mm512_permute_ps(y, 0xb1));
}

FN void L(v_split)(__m512i x, V *a, V *b)
{
    *a = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    *b = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
}
FN void L(v_chunk)(int dtype, const char *p, V *a, V *b)
{
    if (dtype == KVCACHE_F32) {
        *a = _mm512_loadu_ps(p);
        *b = _mm512_loadu_ps(p + 4 * W);
    } else if (dtype == KVCACHE_BF16) {
        L(v_split)(_mm512_loadu_si512(p), a, b);
    } else {
        *a = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
        *b = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p + 1));
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
FN void L(v_part)(int dtype, const char *p, int count, V *a, V *b)
{
    __mmask32 both = (__mmask32)((1u << count) - 1);
    __mmask16 first = (__mmask16)both, second = (__mmask16)(both >> 16);
    if (dtype == KVCACHE_F32) {
        *a = _mm512_maskz_loadu_ps(first, p);
        *b = _mm512_maskz_loadu_ps(second, (const float *)p + W);
    } else if (dtype == KVCACHE_BF16) {
        L(v_split)(_mm512_maskz_loadu_epi16(both, p), a, b);
    } else {
        *a = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first, p));
        *b = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(second, (const __m256i *)p + 1));
    }
}
FN __m512i L(v_round)(V x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
    const __m512i nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    return _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
}
FN void L(v_write)(int dtype, char *p, V a, V b)
{
    if (dtype == KVCACHE_F32) {
        _mm512_storeu_ps((float *)p, a);
        _mm512_storeu_ps((float *)p + W, b);
    } else if (dtype == KVCACHE_BF16) {
        const __m512i even = _mm512_srli_epi32(L(v_round)(a), 16);
        _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaa, even, L(v_round)(b)));
    } else {
        _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
        _mm256_storeu_si256((__m256i *)p + 1, _mm512_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
    }
}
