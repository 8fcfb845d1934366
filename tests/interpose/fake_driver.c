/* A driver library with just enough to prove that the interposer forwards: odd signatures, versions, lookup.
 * Every function answers with a number that depends on each of its arguments. */
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t a, b, c;
} large; /* by value in memory */
typedef struct {
    double a, b;
} vectors; /* by value in two vector registers */
typedef struct {
    int32_t type, id;
} small; /* by value in one integer register, as CUmemLocation */

int cuInit(unsigned flags) { return (int)flags; }

int cuMemAlloc(uint32_t *address, unsigned nbytes) { return *address = nbytes, 1; }
int cuMemAlloc_v2(uint64_t *address, size_t nbytes) { return *address = nbytes << 32, 2; }

int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    return (int)((uintptr_t)f + 2 * gx + 3 * gy + 5 * gz + 7 * bx + 11 * by + 13 * bz + 17 * shared +
                 19 * (uintptr_t)stream + 23 * (uintptr_t)parameters + 29 * (uintptr_t)extra);
}
int cuLaunchKernel_ptsz(void *f) { return -(int)(uintptr_t)f; }

/* More than eight vector and six integer arguments: both kinds spill to the stack. */
double cuMixed(double a, int b, float c, long d, double e, float f, long g, double h, int i, double j, double k, int l,
               double m, float n, long o, double p, int q) {
    return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h + 9 * i + 10 * j + 11 * k + 12 * l + 13 * m +
           14 * n + 15 * o + 16 * p + 17 * q;
}
double cuByValue(large x, vectors y, small z) {
    return (double)(x.a + 2 * x.b + 3 * x.c) + 4 * y.a + 5 * y.b + 6 * z.type + 7 * z.id;
}
large cuLargeResult(int64_t a) { return (large){a, 2 * a, 3 * a}; }
double cuVariadic(int count, ...) {
    double sum = 0;
    va_list rest;
    va_start(rest, count);
    for (int i = 0; i < count; ++i) sum += (i + 1) * va_arg(rest, double);
    va_end(rest);
    return sum;
}

/* Only the lookup knows it. */
static int only_by_lookup(int x) { return 10 * x; }

int cuGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags);
int cuGetProcAddress_v2(const char *symbol, void **pfn, int version, uint64_t flags, int *status);

static int look_up(const char *symbol, void **pfn, int version, uint64_t flags) {
    int per_thread = (flags & 2) != 0; /* CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM */
    void *found = 0;
    if (!strcmp(symbol, "cuInit")) found = (void *)cuInit;
    if (!strcmp(symbol, "cuMemAlloc")) found = version < 3020 ? (void *)cuMemAlloc : (void *)cuMemAlloc_v2;
    if (!strcmp(symbol, "cuLaunchKernel")) found = per_thread ? (void *)cuLaunchKernel_ptsz : (void *)cuLaunchKernel;
    if (!strcmp(symbol, "cuHidden")) found = (void *)only_by_lookup;
    if (!strcmp(symbol, "cuGetProcAddress"))
        found = version < 12000 ? (void *)cuGetProcAddress : (void *)cuGetProcAddress_v2;
    *pfn = found;
    return found ? 0 : 500;
}
int cuGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags) {
    return look_up(symbol, pfn, version, flags);
}
int cuGetProcAddress_v2(const char *symbol, void **pfn, int version, uint64_t flags, int *status) {
    int result = look_up(symbol, pfn, version, flags);
    if (status) *status = result ? 1 : 0;
    return result;
}
