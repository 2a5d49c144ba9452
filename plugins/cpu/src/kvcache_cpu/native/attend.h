/* Attention of few new tokens over contiguous keys and values: the interface, called through ctypes.
 *
 * Strides are in bytes, everything is little more than pointers and 64-bit integers, and no header of torch or Python
 * is needed, so that one build serves every version of both.
 */
#ifndef KVCACHE_ATTEND_H
#define KVCACHE_ATTEND_H

#include <stdint.h>

/* Changes whenever anything in this header does. */
#define KVCACHE_ABI 4

enum { KVCACHE_F32 = 0, KVCACHE_BF16 = 1, KVCACHE_F16 = 2 };

enum { KVCACHE_PORTABLE = 0, KVCACHE_AVX2 = 1, KVCACHE_AVX512 = 2 };

/* One sequence: where its rows of layer 0 of a layer group are. Elements of a row are adjacent. */
typedef struct {
    const char *key, *value;
    int64_t key_layer, key_head, key_token;
    int64_t value_layer, value_head, value_token;
    int64_t length;  /* tokens, the new ones included */
    int64_t num_new; /* new tokens, at most `length`; may be 0 */
    int64_t row;     /* where the first of them is in the query and in the result */
    /* The same keys and values of the first `num_elsewhere` tokens are `shift` bytes further on too, and are read
     * there, but for three of them at most. */
    int64_t num_elsewhere, shift;
} kvcache_sequence;

/* What all layers of a group have in common. */
typedef struct {
    int64_t dtype; /* of keys and values */
    int64_t num_kv_heads;
    int64_t head_dim, value_head_dim; /* multiples of 8 */
} kvcache_group;

#if defined(_WIN32)
#define KVCACHE_API __declspec(dllexport)
#else
#define KVCACHE_API __attribute__((visibility("default")))
#endif

KVCACHE_API int kvcache_abi(void);

/* The best instruction set of this machine. */
KVCACHE_API int kvcache_best_level(void);

/* Use an instruction set from now on; returns the one in use, which is a lower one where this machine lacks it. */
KVCACHE_API int kvcache_use_level(int level);

/* Run on the threads of the OpenMP runtime whose `GOMP_parallel` this is; NULL for the calling thread alone. */
KVCACHE_API void kvcache_use_openmp(void *gomp_parallel);

/* One call. The result has the dtype of the query and is contiguous; rows that are of no sequence are left alone. */
typedef struct {
    const kvcache_group *group;
    const kvcache_sequence *sequences;
    int64_t num_sequences;
    int64_t layer;     /* its number within the group */
    const void *query; /* [rows, num_heads, head_dim]; elements of a row are adjacent */
    int64_t query_token, query_head;
    int64_t num_heads;
    int64_t query_dtype;
    void *out; /* [rows, num_heads, value_head_dim] */
    double scale;
    int64_t window;  /* tokens a query sees, itself included; 0 for all */
    int64_t threads; /* at most so many are used */
} kvcache_call;

/* Attend causally, the last query of a sequence seeing all its keys.
 *
 * Returns 0, or -1 when there is no memory for intermediate results; the result is then undefined.
 */
KVCACHE_API int kvcache_attend(const kvcache_call *call);

/* One write. Elements of a row are adjacent, and have the dtype of the group. */
typedef struct {
    const kvcache_group *group;
    const kvcache_sequence *sequences;
    int64_t num_sequences;
    int64_t layer;
    const char *key; /* [rows, num_kv_heads, head_dim] */
    int64_t key_token, key_head;
    const char *value; /* [rows, num_kv_heads, value_head_dim] */
    int64_t value_token, value_head;
} kvcache_new_rows;

/* Write the new tokens of each sequence to where attention reads them. */
KVCACHE_API void kvcache_store(const kvcache_new_rows *rows);

/* Read the same keys and values, whose rows must be adjacent, and do nothing with them: what attention is measured
 * against. */
KVCACHE_API void kvcache_read(const kvcache_group *group, const kvcache_sequence *sequences, int64_t num_sequences,
                              int64_t layer, int threads);

#endif
