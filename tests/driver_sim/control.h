/* Control of the simulated driver, for tests of the same process. C99.
 *
 * Stream arguments are CUstream values as the driver gave them; 0/1 is the legacy stream of the
 * calling thread's current context, 2 its per-thread stream. Functions return 0, or -1 for a
 * handle that is not live. Strings that are returned are freed with kina_sim_free.
 */
#ifndef KINA_DRIVER_SIM_CONTROL_H
#define KINA_DRIVER_SIM_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KINA_SIM_API __attribute__((visibility("default")))

/* Streams. A stalled stream runs nothing, or as many operations as it is stepped. */
KINA_SIM_API int kina_sim_stall(void *stream);
KINA_SIM_API int kina_sim_step(void *stream, uint64_t operations);
KINA_SIM_API int kina_sim_resume(void *stream);
KINA_SIM_API int64_t kina_sim_pending(void *stream);
KINA_SIM_API void kina_sim_stall_all(void);
KINA_SIM_API void kina_sim_resume_all(void);
KINA_SIM_API void kina_sim_stall_new_streams(int on);
/* Waits for every stream to be empty; -1 after the timeout. */
KINA_SIM_API int kina_sim_wait_idle(uint64_t timeout_ms);
/* One operation at a time, on a stream drawn from the seed. Work runs as late as possible: when a
 * driver call waits or asks, or after 50 ms without any driver call. */
KINA_SIM_API void kina_sim_shuffle(uint64_t seed);
KINA_SIM_API void kina_sim_stop_shuffle(void);
KINA_SIM_API void kina_sim_set_latency_us(uint64_t latency_us);

/* Faults. name "*" counts every call but the constant ones (cuGetProcAddress, error names). */
KINA_SIM_API void kina_sim_fail(const char *name, uint64_t nth, int result, int from_then_on);
KINA_SIM_API void kina_sim_clear_faults(void);
KINA_SIM_API uint64_t kina_sim_faults_delivered(void);
/* Every context of the device is dead from now on, as after a fault of its work. */
KINA_SIM_API int kina_sim_break_device(int device, int result);

/* Counters and trace. */
KINA_SIM_API uint64_t kina_sim_calls(const char *name); /* "*" for all */
KINA_SIM_API char *kina_sim_call_counts(void);          /* JSON object */
KINA_SIM_API void kina_sim_reset_counts(void);
KINA_SIM_API uint64_t kina_sim_trace_position(void);
KINA_SIM_API char *kina_sim_trace(uint64_t since); /* JSON lines */
KINA_SIM_API void kina_sim_clear_trace(void);
KINA_SIM_API uint64_t kina_sim_violations(void);
KINA_SIM_API char *kina_sim_live(void); /* JSON object: what is not released */
KINA_SIM_API void kina_sim_free(void *text);

/* Device memory seen past all rules of ordering; -1 if the range is not device memory. */
KINA_SIM_API int kina_sim_read(unsigned long long address, void *to, size_t nbytes);
KINA_SIM_API int kina_sim_write(unsigned long long address, const void *from, size_t nbytes);

/* The result of loading an image of exactly these bytes for a device of that capability (90). */
KINA_SIM_API int kina_sim_parse_image(const void *bytes, size_t nbytes, int capability);

/* Kernels with host code of the test, found by the beginning of the entry's name. A body returns
 * 0, or the CUresult that its context dies of. */
typedef struct kina_sim_launch {
    const char *name;
    const unsigned char *parameters;
    size_t parameter_bytes;
    size_t parameter_count;
    const size_t *offsets;
    const size_t *sizes;
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    void *opaque;
} kina_sim_launch;
typedef int (*kina_sim_kernel)(const kina_sim_launch *launch, void *user);
KINA_SIM_API void kina_sim_register_kernel(const char *prefix, kina_sim_kernel body, void *user);
/* Where the bytes of a device range are, or NULL if the launch may not touch it. */
KINA_SIM_API void *kina_sim_launch_at(const kina_sim_launch *launch, unsigned long long address, size_t nbytes,
                                      int write);

#ifdef __cplusplus
}
#endif
#endif
