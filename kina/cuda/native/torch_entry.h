/* The functions that PyTorch's CUDAPluggableAllocator finds by name in the extension module, and what they call.
 *
 * They are C++ for one reason: PyTorch learns of a failure by a C++ exception alone. */
#ifndef KINA_TORCH_ENTRY_H
#define KINA_TORCH_ENTRY_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Set by the module when it is loaded. All are called from any thread, with or without the GIL. */
typedef struct kina_torch_functions {
    /* 0 and *out (NULL for no bytes), or a detail code. */
    int (*allocate)(void **out, ptrdiff_t nbytes, int ordinal, void *stream);
    void (*deallocate)(void *data);
    /* 0 or a detail code. */
    int (*record_stream)(void *data, void *stream);
    void (*empty_cache)(void);
    /* Write the calling thread's error in words, at most `room` bytes with the end, and forget it. */
    void (*describe)(char *text, size_t room);
} kina_torch_functions;

void kina_torch_install(const kina_torch_functions *functions);

/* Whether each throws, and what: std::bad_alloc for KINA_OUT_OF_MEMORY, else std::exception, with kina's words. */
void *kina_torch_allocate(ptrdiff_t nbytes, int ordinal, void *stream);
void kina_torch_record_stream(void *data, void *stream);
/* These throw nothing. */
void kina_torch_deallocate(void *data, ptrdiff_t nbytes, int ordinal, void *stream);
void kina_torch_empty_cache(void);

#ifdef __cplusplus
}
#endif
#endif
