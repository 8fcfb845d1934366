/* Status codes. One table: kina/errors.py gives each exception class its detail code and coarse
 * status; tests/core/test_status.py compares the two. */
#ifndef KINA_STATUS_H
#define KINA_STATUS_H

#include <stdint.h>

enum kina_status {
    KINA_SUCCESS = 0,
    KINA_STATUS_VALIDATION = 1,
    KINA_STATUS_RESOURCE = 2,
    KINA_STATUS_GPU = 3,
    KINA_STATUS_UNIMPLEMENTED = 4,
    KINA_STATUS_INTERNAL = 5,
    KINA_STATUS_TYPE = 6
};

/* detail / 100 is the coarse status */
enum kina_detail {
    KINA_INVALID_SHAPE = 101,
    KINA_INVALID_LAYOUT = 102,
    KINA_NON_CONTIGUOUS = 103,
    KINA_INVALID_CONFIG = 104,
    KINA_FOREIGN_RUNTIME = 105,
    KINA_FOREIGN_DEVICE = 106,
    KINA_FOREIGN_DOMAIN = 107,
    KINA_SESSION_CLOSED = 108,
    KINA_WRONG_THREAD = 109,
    KINA_RUNTIME_BUSY = 110,
    KINA_DLPACK = 111,
    KINA_UNAVAILABLE = 201,
    KINA_OUT_OF_MEMORY = 202,
    KINA_COMPILE = 301,
    KINA_MODULE_LOAD = 302,
    KINA_SYMBOL_LOOKUP = 303,
    KINA_LAUNCH = 304,
    KINA_SYNCHRONIZE = 305,
    KINA_PEER_ACCESS = 306,
    KINA_RUNTIME_POISONED = 307,
    KINA_DRIVER = 308,
    KINA_UNSUPPORTED = 401,
    KINA_INTERNAL = 501,
    KINA_DTYPE = 601,
    KINA_ARGUMENT = 602
};

/* What a memory resource knows about a request that it could not serve, in bytes; -1: not known. */
typedef struct kina_memory_figures {
    int64_t requested;
    int64_t live;
    int64_t cached;
    int64_t pending;
    int64_t largest_free;
    int64_t limit;
} kina_memory_figures;

/* The error of the calling thread, written by nogil code, read by whoever reports it. */
typedef struct kina_error {
    int detail;      /* enum kina_detail, or 0 */
    int driver_code; /* CUresult, or 0 */
    char driver_name[64];
    char driver_string[160];
    char operation[64];
    char message[1024];
    int has_figures;   /* `figures` is filled: KINA_OUT_OF_MEMORY only */
    int has_exception; /* a Python exception is kept for this thread, to be raised as it is */
    kina_memory_figures figures;
} kina_error;

#endif
