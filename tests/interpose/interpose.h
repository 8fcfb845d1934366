/* Control calls of the interposer: a libcuda.so.1 that counts, and on request fails, what passes through it.
 *
 * Names are base names: every version of a function ("cuMemAlloc", "cuMemAlloc_v2", "..._ptsz") counts under
 * the name without its suffix. All calls are safe from any thread. */
#ifndef KINA_INTERPOSE_H
#define KINA_INTERPOSE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KINA_INTERPOSE_UNKNOWN UINT64_MAX

/* Calls of `name` since the last reset, injected failures included; KINA_INTERPOSE_UNKNOWN for a name that
 * the real library does not export and nobody asked it for. */
uint64_t kina_interpose_count(const char *name);

/* How many of them were answered by kina_interpose_fail. */
uint64_t kina_interpose_injected(const char *name);

/* Zero every count and forget every failure not injected yet. */
void kina_interpose_reset(void);

/* Calls number nth .. nth + times - 1 of `name`, counted from now (the next call is 1), return `code` and
 * never reach the driver; times < 0 means all from the nth on, times 0 takes an earlier order back. Returns
 * 0, or -1 for a name that kina_interpose_count would call unknown or for nth < 1. */
int kina_interpose_fail(const char *name, int64_t nth, int32_t code, int64_t times);

/* Writes {"counts": {name: calls}, "injected": {name: calls}} and a NUL into buffer as far as it fits;
 * returns the length needed without the NUL. `counts` has every known name, also those never called. */
size_t kina_interpose_dump(char *buffer, size_t size);

/* Path of the library that calls are forwarded to, or NULL if it could not be loaded. */
const char *kina_interpose_real(void);

#ifdef __cplusplus
}
#endif
#endif
