/* Attention of few new tokens over contiguous keys and values. See attend.h for the interface.
 *
 * The work is a line: every sequence, kv head and block of query rows is a unit, as long as the keys it meets. The
 * line is cut into tasks of equal cost, wherever that falls, so that all threads are busy however few heads there are.
 * A unit that was cut leaves partial results, which whoever finishes its last part merges in the order of its keys:
 * what comes out depends on the shapes and the number of threads, and not on who was faster.
 */
#include "attend.h"

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MOST_ROWS 32  /* query rows of a unit */
#define MOST_SLOTS 40 /* places for them in a tile of scores */
#define MOST_TILE 64  /* keys of a tile */
#define TILE_BYTES 8192 /* of values: with the keys, and the next ones, they fit the smallest caches */
#define GRAIN 16          /* units are cut at multiples of so many keys */
#define TASKS_A_THREAD 4  /* so that a thread that is held up holds up the others but little */
#define NS_A_THREAD 4000  /* estimated work that pays for waking one more thread */
#define NS_A_TASK 20000   /* estimated work that makes further tasks pay */

#define SIZE_OF(dtype) ((dtype) == KVCACHE_F32 ? 4 : 2)

/* Some rows of queries, some keys, and the state of the online softmax between them. */
typedef struct {
    const char *key, *value; /* row 0 of the kv head */
    int64_t key_token, value_token;
    int64_t num_elsewhere, shift;
    int64_t dim, dim_padded, value_dim, value_padded; /* padded to whole chunks */
    const float *query;                               /* [rows, dim_padded], in the order of the chunks */
    float scale;                                      /* positive, and for powers of 2 */
    int tile;
    float *most, *total; /* [rows]: largest score, sum of weights */
    float *sums;         /* [rows, value_padded]: weighed values */
} piece;

typedef void meet_rows(const piece *x, int row, int rows, int64_t first, int64_t stop);

typedef void take_row(const char *row, int64_t dim, float sign, float *out);
typedef void give_row(const float *sums, int64_t dim, float share, char *row);

typedef struct {
    int width; /* floats in a vector */
    meet_rows *meet[3];
    take_row *take[3];
    give_row *give[3];
} level_kernel;

/* -- elements ------------------------------------------------------------------------------------------------- */

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t to_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float half_to_float(uint16_t h)
{
    const uint32_t magnitude = h & 0x7fffu;
    const uint32_t bits = to_bits(from_bits(magnitude << 13) * 0x1p112f);
    return from_bits(bits | (magnitude >= 0x7c00u ? 0x7f800000u : 0) | (uint32_t)(h & 0x8000u) << 16);
}

static uint16_t float_to_half(float x)
{
    const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u)
        half = 0x7e00u;
    else if (magnitude >= 0x477ff000u) /* 65520 and above */
        half = 0x7c00u;
    else if (magnitude < 0x38800000u) /* subnormal: in units of the last place of 0.5 */
        half = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
    else
        half = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    return (uint16_t)(sign | half);
}

static uint16_t float_to_bfloat(float x)
{
    const uint32_t bits = to_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#define FN static inline __attribute__((always_inline)) TARGET
#define L(name) name##_portable
#define TARGET
#include "portable.h"
#include "kernel.h"

#if defined(__x86_64__)
#define FN static inline __attribute__((always_inline)) TARGET
#define L(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#include "avx2.h"
#include "kernel.h"

#define FN static inline __attribute__((always_inline)) TARGET
#define L(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#include "avx512.h"
#include "kernel.h"
#endif

/* -- which instructions, which threads ------------------------------------------------------------------------ */

typedef void gomp_parallel(void (*run)(void *), void *data, unsigned threads, unsigned flags);

static int level_in_use = -1;
static gomp_parallel *openmp;
static int forked; /* the threads of OpenMP stayed in the parent */

#if defined(__unix__) || defined(__APPLE__)
static void after_fork(void) { forked = 1; }
#endif

int kvcache_abi(void) { return KVCACHE_ABI; }

int kvcache_best_level(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return KVCACHE_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return KVCACHE_AVX2;
#endif
    return KVCACHE_PORTABLE;
}

int kvcache_use_level(int level)
{
    const int best = kvcache_best_level();
    return level_in_use = level < 0 || level > best ? best : level;
}

static const level_kernel *kernel_in_use(void)
{
    if (level_in_use < 0)
        kvcache_use_level(-1);
#if defined(__x86_64__)
    if (level_in_use == KVCACHE_AVX2)
        return &kernel_avx2;
    if (level_in_use == KVCACHE_AVX512)
        return &kernel_avx512;
#endif
    return &kernel_portable;
}

void kvcache_use_openmp(void *function)
{
#if defined(__unix__) || defined(__APPLE__)
    static int watching;
    if (!watching)
        watching = pthread_atfork(NULL, NULL, after_fork) == 0;
    if (watching) {
        openmp = (gomp_parallel *)function;
        forked = 0;
    }
#else
    (void)function;
#endif
}

/* -- rows of any dtype ----------------------------------------------------------------------------------------- */

/* Where element `i` of a row lies among the chunks of `2 * width` that the kernel works on. */
static inline int64_t place(int dtype, int64_t width, int64_t i)
{
    const int64_t in_chunk = i & (2 * width - 1);
    return dtype == KVCACHE_BF16 ? i - in_chunk + (in_chunk & 1) * width + (in_chunk >> 1) : i;
}

static void load_row(const level_kernel *kernel, int kv_dtype, const char *row, int dtype, int64_t dim, float sign,
                     int64_t padded, float *out)
{
    if (dtype == kv_dtype) {
        kernel->take[dtype](row, dim, sign, out);
        return;
    }
    memset(out, 0, (size_t)padded * sizeof *out);
    for (int64_t i = 0; i < dim; i++) {
        const float x = dtype == KVCACHE_F32    ? ((const float *)row)[i]
                        : dtype == KVCACHE_BF16 ? from_bits((uint32_t)((const uint16_t *)row)[i] << 16)
                                                : half_to_float(((const uint16_t *)row)[i]);
        out[place(kv_dtype, kernel->width, i)] = sign * x;
    }
}

static void store_row(const level_kernel *kernel, int kv_dtype, const float *sums, float total, int dtype, int64_t dim,
                      char *row)
{
    const float share = 1.0f / total;
    if (dtype == kv_dtype) {
        kernel->give[dtype](sums, dim, share, row);
        return;
    }
    for (int64_t i = 0; i < dim; i++) {
        const float x = sums[place(kv_dtype, kernel->width, i)] * share;
        if (dtype == KVCACHE_F32)
            ((float *)row)[i] = x;
        else
            ((uint16_t *)row)[i] = dtype == KVCACHE_BF16 ? float_to_bfloat(x) : float_to_half(x);
    }
}

/* -- the line of work ----------------------------------------------------------------------------------------- */

typedef struct {
    int64_t sequence, head;
    int64_t row;  /* first query row: token * group size + member of the group, from the sequence's first new token */
    int64_t rows;
    int64_t low, high; /* keys that any of them sees */
    int64_t before;    /* cost of all units before it */
    int64_t left;      /* keys not met yet; atomic */
} unit;

typedef struct {
    const kvcache_group *group;
    const kvcache_sequence *sequences;
    int64_t layer, window, num_heads, group_size;
    const char *query;
    int64_t query_token, query_head;
    int query_dtype;
    char *out;
    float sign;  /* factor on queries: the sign of the scale, so that the largest score is the largest product */
    float scale; /* what remains, for powers of 2 */
    const level_kernel *kernel;
    unit *units;
    int64_t num_units, cost, num_tasks;
    int64_t dim_padded, value_padded, rows; /* of the largest unit */
    float *memory;                          /* [tasks][query, three states] */
    int64_t state_floats, task_floats;
    int tile;
    int64_t next; /* task nobody has taken; atomic */
} job;

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

/* What a key costs a unit: reading it, and a product for each row. */
static int64_t key_cost(const unit *u) { return u->rows + 2; }

/* Keys of a unit that lie before a point of the line. */
static int64_t keys_before(const unit *u, int64_t point)
{
    const int64_t keys = u->high - u->low;
    const int64_t past = point <= u->before ? 0 : (point - u->before) / key_cost(u);
    return past >= keys ? keys : past / GRAIN * GRAIN;
}

/* Where a task begins. The last one ends behind all units, whatever the rounding. */
static int64_t task_start(const job *j, int64_t task)
{
    return task >= j->num_tasks ? INT64_MAX : j->cost * task / j->num_tasks;
}

enum { CONTINUED, BEGUN, WHOLE }; /* kinds of parts of a unit: each task has one state for each */

static void set_state(const job *j, int64_t task, int kind, piece *x)
{
    float *state = j->memory + task * j->task_floats + round_up(j->rows * j->dim_padded, 16) + kind * j->state_floats;
    x->most = state;
    x->total = state + MOST_ROWS;
    x->sums = state + 2 * MOST_ROWS;
}

static void meet_seen(const job *j, const unit *u, const piece *x, int64_t first, int64_t stop)
{
    const kvcache_sequence *s = &j->sequences[u->sequence];
    meet_rows *meet = j->kernel->meet[j->group->dtype];
    const int64_t start = s->length - s->num_new;
    const int64_t token = u->row / j->group_size, last = (u->row + u->rows - 1) / j->group_size;
    /* What the last token does not see any more and the first does not see yet, each token meets alone. */
    const int64_t low = j->window > 0 ? max64(0, start + last - j->window + 1) : 0, high = start + token + 1;
    meet(x, 0, (int)u->rows, max64(first, low), min64(stop, high));
    for (int64_t t = token; t <= last && last > token; t++) {
        const int64_t own_low = j->window > 0 ? max64(0, start + t - j->window + 1) : 0, own_high = start + t + 1;
        const int row = (int)(max64(t * j->group_size, u->row) - u->row);
        const int rows = (int)(min64((t + 1) * j->group_size, u->row + u->rows) - u->row) - row;
        if (low >= high) {
            meet(x, row, rows, max64(first, own_low), min64(stop, own_high));
        } else {
            meet(x, row, rows, max64(first, own_low), min64(stop, low));
            meet(x, row, rows, max64(first, high), min64(stop, own_high));
        }
    }
}

static void finish(const job *j, const unit *u, const piece *x)
{
    const kvcache_group *g = j->group;
    const int64_t bytes = g->value_head_dim * SIZE_OF(j->query_dtype);
    for (int64_t r = 0; r < u->rows; r++) {
        const int64_t token = j->sequences[u->sequence].row + (u->row + r) / j->group_size;
        const int64_t head = u->head * j->group_size + (u->row + r) % j->group_size;
        store_row(j->kernel, (int)g->dtype, x->sums + r * j->value_padded, x->total[r], j->query_dtype,
                  g->value_head_dim, j->out + (token * j->num_heads + head) * bytes);
    }
}

/* Adds a later part of a unit to an earlier one. */
static void merge_into(const job *j, const unit *u, piece *into, const piece *from)
{
    for (int64_t r = 0; r < u->rows; r++) {
        const float most = from->most[r] > into->most[r] ? from->most[r] : into->most[r];
        const float keep = exp2f((into->most[r] - most) * j->scale),
                    add = exp2f((from->most[r] - most) * j->scale);
        float *sums = into->sums + r * j->value_padded;
        const float *more = from->sums + r * j->value_padded;
        into->most[r] = most;
        into->total[r] = into->total[r] * keep + from->total[r] * add;
        for (int64_t i = 0; i < j->value_padded; i++)
            sums[i] = sums[i] * keep + more[i] * add;
    }
}

static void merge(const job *j, const unit *u)
{
    piece into, from;
    int64_t task = u->before * j->num_tasks / j->cost;
    int merged = 0;
    for (; task < j->num_tasks && task_start(j, task) < u->before + (u->high - u->low) * key_cost(u); task++) {
        const int64_t first = keys_before(u, task_start(j, task)), stop = keys_before(u, task_start(j, task + 1));
        if (first == stop)
            continue;
        set_state(j, task, first > 0 ? CONTINUED : BEGUN, merged ? &from : &into);
        if (merged)
            merge_into(j, u, &into, &from);
        merged = 1;
    }
    finish(j, u, &into);
}

static void do_part(job *j, int64_t task, unit *u, int64_t first, int64_t stop)
{
    const kvcache_group *g = j->group;
    const kvcache_sequence *s = &j->sequences[u->sequence];
    const int whole = first == 0 && stop == u->high - u->low;
    float *query = j->memory + task * j->task_floats;
    piece x = {
        .key = s->key + j->layer * s->key_layer + u->head * s->key_head,
        .value = s->value + j->layer * s->value_layer + u->head * s->value_head,
        .key_token = s->key_token,
        .value_token = s->value_token,
        .num_elsewhere = s->num_elsewhere,
        .shift = s->shift,
        .dim = g->head_dim,
        .dim_padded = j->dim_padded,
        .value_dim = g->value_head_dim,
        .value_padded = j->value_padded,
        .query = query,
        .scale = j->scale,
        .tile = j->tile,
    };
    set_state(j, task, whole ? WHOLE : first > 0 ? CONTINUED : BEGUN, &x);
    memset(x.sums, 0, (size_t)(u->rows * j->value_padded) * sizeof *x.sums);
    for (int64_t r = 0; r < u->rows; r++) {
        const int64_t token = j->sequences[u->sequence].row + (u->row + r) / j->group_size;
        const int64_t head = u->head * j->group_size + (u->row + r) % j->group_size;
        load_row(j->kernel, (int)g->dtype, j->query + token * j->query_token + head * j->query_head, j->query_dtype,
                 g->head_dim, j->sign, j->dim_padded, query + r * j->dim_padded);
        x.most[r] = -FLT_MAX;
        x.total[r] = 0;
    }
    meet_seen(j, u, &x, u->low + first, u->low + stop);
    if (whole)
        finish(j, u, &x);
    else if (__atomic_fetch_sub(&u->left, stop - first, __ATOMIC_ACQ_REL) == stop - first)
        merge(j, u);
}

static void do_task(job *j, int64_t task)
{
    const int64_t start = task_start(j, task), end = task_start(j, task + 1);
    int64_t low = 0, high = j->num_units - 1; /* the last unit that begins at or before the start */
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (j->units[middle].before <= start)
            low = middle;
        else
            high = middle - 1;
    }
    for (; low < j->num_units && j->units[low].before < end; low++) {
        unit *u = &j->units[low];
        const int64_t first = keys_before(u, start), stop = keys_before(u, end);
        if (first < stop)
            do_part(j, task, u, first, stop);
    }
}

static void do_tasks(void *data)
{
    job *j = data;
    int64_t task;
    while ((task = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED)) < j->num_tasks)
        do_task(j, task);
}

/* Rows of each unit of a sequence; the last may have fewer. */
static int64_t rows_of_units(const job *j, const kvcache_sequence *s)
{
    const int64_t rows = s->num_new * j->group_size;
    const int64_t units = (rows + MOST_ROWS - 1) / MOST_ROWS;
    return units <= 1 ? rows : round_up((rows + units - 1) / units, 4);
}

static void list_units(job *j, int64_t num_sequences)
{
    unit *u = j->units;
    j->cost = 0;
    for (int64_t i = 0; i < num_sequences; i++) {
        const kvcache_sequence *s = &j->sequences[i];
        const int64_t rows = s->num_new * j->group_size, step = rows_of_units(j, s);
        const int64_t start = s->length - s->num_new;
        for (int64_t head = 0; head < j->group->num_kv_heads; head++) {
            for (int64_t row = 0; row < rows; row += step, u++) {
                u->sequence = i;
                u->head = head;
                u->row = row;
                u->rows = min64(step, rows - row);
                u->low = j->window > 0 ? max64(0, start + row / j->group_size - j->window + 1) : 0;
                u->high = start + (row + u->rows - 1) / j->group_size + 1;
                u->before = j->cost;
                u->left = u->high - u->low;
                j->cost += u->left * key_cost(u);
            }
        }
    }
    j->num_units = u - j->units;
}

int kvcache_attend(const kvcache_call *call)
{
    const kvcache_group *group = call->group;
    const kvcache_sequence *sequences = call->sequences;
    const level_kernel *kernel = kernel_in_use();
    const int64_t chunk = 2 * kernel->width;
    const int64_t value_bytes = group->value_head_dim * SIZE_OF(group->dtype);
    job j = {
        .group = group,
        .sequences = sequences,
        .layer = call->layer,
        .window = call->window,
        .num_heads = call->num_heads,
        .group_size = call->num_heads / group->num_kv_heads,
        .query = call->query,
        .query_token = call->query_token,
        .query_head = call->query_head,
        .query_dtype = (int)call->query_dtype,
        .out = call->out,
        .sign = call->scale > 0 ? 1.0f : call->scale < 0 ? -1.0f : call->scale == 0 ? 0.0f : NAN,
        .scale = call->scale == 0 ? 1.0f : (float)(fabs(call->scale) * 1.4426950408889634), /* e^x = 2^(x log2 e) */
        .kernel = kernel,
        .dim_padded = round_up(group->head_dim, chunk),
        .value_padded = round_up(group->value_head_dim, chunk),
        .tile = (int)max64(GRAIN, min64(MOST_TILE, TILE_BYTES / value_bytes / 4 * 4)),
    };
    int64_t most_units = 0;
    for (int64_t i = 0; i < call->num_sequences; i++) {
        const int64_t rows = sequences[i].num_new * j.group_size;
        if (rows == 0)
            continue;
        const int64_t step = rows_of_units(&j, &sequences[i]);
        most_units += (rows + step - 1) / step * group->num_kv_heads;
        j.rows = max64(j.rows, step);
    }
    if (most_units == 0)
        return 0;
    j.units = malloc((size_t)most_units * sizeof(unit));
    if (j.units == NULL)
        return -1;
    list_units(&j, call->num_sequences);

    /* A core multiplies some 32 pairs of numbers a nanosecond. */
    const int64_t ns = j.cost * (group->head_dim + group->value_head_dim) / 32;
    const int64_t workers = openmp == NULL || forked ? 1 : max64(1, min64(call->threads, ns / NS_A_THREAD));
    j.num_tasks = workers == 1 ? 1 : workers * max64(1, min64(TASKS_A_THREAD, ns / workers / NS_A_TASK));
    j.state_floats = round_up(2 * MOST_ROWS + j.rows * j.value_padded, 16);
    j.task_floats = round_up(j.rows * j.dim_padded, 16) + 3 * j.state_floats;
    j.memory = malloc((size_t)(j.num_tasks * j.task_floats) * sizeof(float));
    if (j.memory == NULL) {
        free(j.units);
        return -1;
    }
    if (workers == 1)
        do_tasks(&j);
    else
        openmp(do_tasks, &j, (unsigned)workers, 0);
    free(j.memory);
    free(j.units);
    return 0;
}

/* -- writing ---------------------------------------------------------------------------------------------------- */

void kvcache_store(const kvcache_new_rows *rows)
{
    const kvcache_group *g = rows->group;
    const size_t key_bytes = (size_t)(g->head_dim * SIZE_OF(g->dtype));
    const size_t value_bytes = (size_t)(g->value_head_dim * SIZE_OF(g->dtype));
    for (int64_t i = 0; i < rows->num_sequences; i++) {
        const kvcache_sequence *s = &rows->sequences[i];
        const int64_t start = s->length - s->num_new;
        char *keys = (char *)s->key + rows->layer * s->key_layer + start * s->key_token;
        char *values = (char *)s->value + rows->layer * s->value_layer + start * s->value_token;
        for (int64_t head = 0; head < g->num_kv_heads; head++) {
            for (int64_t t = 0; t < s->num_new; t++) {
                const int64_t row = s->row + t;
                memcpy(keys + head * s->key_head + t * s->key_token,
                       rows->key + row * rows->key_token + head * rows->key_head, key_bytes);
                memcpy(values + head * s->value_head + t * s->value_token,
                       rows->value + row * rows->value_token + head * rows->value_head, value_bytes);
            }
        }
    }
}

/* -- reading, to measure against -------------------------------------------------------------------------------- */

typedef struct {
    const kvcache_group *group;
    const kvcache_sequence *sequences;
    int64_t num_sequences, layer, bytes, num_tasks;
    int64_t next; /* atomic */
    uint64_t seen;
} reading;

/* Reads `length` bytes, whatever they are. */
static uint64_t read_run(const char *p, int64_t length)
{
    typedef uint64_t lump __attribute__((vector_size(32)));
    lump seen[4] = {{0}};
    for (; length >= (int64_t)sizeof seen; length -= (int64_t)sizeof seen, p += sizeof seen) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            lump x;
            memcpy(&x, p + i * sizeof x, sizeof x);
            seen[i] |= x;
        }
    }
    const lump all = seen[0] | seen[1] | seen[2] | seen[3];
    return all[0] | all[1] | all[2] | all[3];
}

static void read_parts(void *data)
{
    reading *r = data;
    const kvcache_group *g = r->group;
    uint64_t seen = 0;
    int64_t task;
    while ((task = __atomic_fetch_add(&r->next, 1, __ATOMIC_RELAXED)) < r->num_tasks) {
        const int64_t start = r->bytes * task / r->num_tasks, end = r->bytes * (task + 1) / r->num_tasks;
        int64_t at = 0; /* all runs form a line, of which this task reads a part */
        for (int64_t i = 0; i < r->num_sequences; i++) {
            const kvcache_sequence *s = &r->sequences[i];
            for (int64_t run = 0; run < 2 * g->num_kv_heads; run++) {
                const int64_t head = run / 2;
                const char *p = run % 2 ? s->value + r->layer * s->value_layer + head * s->value_head
                                        : s->key + r->layer * s->key_layer + head * s->key_head;
                const int64_t token = run % 2 ? s->value_token : s->key_token, size = s->length * token;
                const int64_t first = max64(start - at, 0), stop = min64(end - at, size);
                const int64_t here = max64(first, min64(stop, s->num_elsewhere * token));
                if (first < here)
                    seen |= read_run(p + s->shift + first, here - first);
                if (here < stop)
                    seen |= read_run(p + here, stop - here);
                at += size;
            }
        }
    }
    __atomic_fetch_or(&r->seen, seen, __ATOMIC_RELAXED);
}

void kvcache_read(const kvcache_group *group, const kvcache_sequence *sequences, int64_t num_sequences, int64_t layer,
                  int threads)
{
    reading r = {.group = group, .sequences = sequences, .num_sequences = num_sequences, .layer = layer};
    for (int64_t i = 0; i < num_sequences; i++)
        r.bytes += group->num_kv_heads * sequences[i].length * (sequences[i].key_token + sequences[i].value_token);
    r.num_tasks = (int64_t)threads * TASKS_A_THREAD;
    if (openmp == NULL || forked || threads <= 1)
        read_parts(&r);
    else
        openmp(read_parts, &r, (unsigned)threads, 0);
}
