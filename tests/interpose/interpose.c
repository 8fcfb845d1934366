/* A libcuda.so.1 that forwards everything to the real one, counts each function and can fail any call.
 *
 * Pointers reach a program in two ways, and both are covered: the symbols it links or dlsyms (stubs.S exports
 * a stub for every cu* name of the real library, exports.inc) and cuGetProcAddress, which is wrapped here and
 * answers with a stub instead of the real pointer. Tables from cuGetExportTable pass through untouched and
 * are not counted. */
#define _GNU_SOURCE
#include "interpose.h"

#include "layout.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_BYTES = 96, SLOTS = 2048 };

enum { SUCCESS = 0, SYMBOL_NOT_FOUND = 302, LIBRARY_INIT_FAILED = 303 }; /* CUresult */

/* One per base name. The stubs touch count and armed only; the rest belongs to `lock`. */
struct slot {
    uint64_t count;
    uint32_t armed;
    int32_t code;
    int64_t skip;  /* calls to let pass before the first failure */
    int64_t times; /* failures left; negative: without end */
    uint64_t injected;
    char name[NAME_BYTES];
};

/* One per stub. */
struct record {
    void *target;
    struct slot *slot;
};

_Static_assert(sizeof(struct record) == RECORD_BYTES, "stubs.S");
_Static_assert(offsetof(struct record, target) == RECORD_TARGET, "stubs.S");
_Static_assert(offsetof(struct record, slot) == RECORD_SLOT, "stubs.S");
_Static_assert(offsetof(struct slot, count) == SLOT_COUNT, "stubs.S");
_Static_assert(offsetof(struct slot, armed) == SLOT_ARMED, "stubs.S");

#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORTED __attribute__((visibility("default")))

/* Not static: the assembler names them. */
HIDDEN struct record kina_interpose_records[STUBS];
extern HIDDEN char kina_interpose_stubs[];
extern HIDDEN void kina_interpose_lazy(void);
HIDDEN void *kina_interpose_bind(struct record *record);
HIDDEN int64_t kina_interpose_decide(struct record *record);

#define EXPORT(index, name) #name,
static const char *const exported[] = {
#include "exports.inc"
    NULL};
enum { EXPORTS = sizeof exported / sizeof *exported - 1 };
_Static_assert(EXPORTS < STUBS, "more names than stubs");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct slot slots[SLOTS];
static int slot_count;
static int record_count = EXPORTS; /* record i < EXPORTS belongs to the exported name i for good */
static struct slot *lookup_slot;   /* cuGetProcAddress itself */

static pthread_once_t real_once = PTHREAD_ONCE_INIT;
static void *real_library;
static char real_path[4096];
static void *real_lookup_v1, *real_lookup_v2;

typedef int (*lookup_v1)(const char *, void **, int, uint64_t);
typedef int (*lookup_v2)(const char *, void **, int, uint64_t, int *);

static void open_real(void) {
    static const char *const usual[] = {"/usr/local/nvidia/lib64/libcuda.so.1",
                                        "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
                                        "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
                                        "/usr/lib64/libcuda.so.1",
                                        "/usr/lib/libcuda.so.1",
                                        "/usr/lib/wsl/lib/libcuda.so.1",
                                        NULL};
    const char *named = getenv("KINA_INTERPOSE_REAL");
    const char *const one[] = {named, NULL};
    /* The real library must find its own functions, not these stubs, when this library was preloaded: its
     * internal calls are not the program's. Sanitizers abort on the flag; with them, do not preload. */
    int mode = RTLD_NOW | RTLD_LOCAL;
    if (!dlsym(RTLD_DEFAULT, "__asan_init") && !dlsym(RTLD_DEFAULT, "__tsan_init")) mode |= RTLD_DEEPBIND;
    /* Only absolute paths: by its bare name the loader would hand back this very library. */
    for (const char *const *path = named && *named ? one : usual; *path && !real_library; ++path) {
        void *library = dlopen(*path, mode);
        if (!library) {
            if (named && *named) fprintf(stderr, "kina_interpose: %s\n", dlerror());
            continue;
        }
        if (dlsym(library, "kina_interpose_reset")) { /* this library, or another build of it: calls would circle */
            fprintf(stderr, "kina_interpose: %s is an interposer itself\n", *path);
            dlclose(library);
            continue;
        }
        real_library = library;
        snprintf(real_path, sizeof real_path, "%s", *path);
    }
    if (!real_library) {
        fprintf(stderr, "kina_interpose: no real libcuda.so.1; name it in KINA_INTERPOSE_REAL\n");
        return;
    }
    real_lookup_v1 = dlsym(real_library, "cuGetProcAddress");
    real_lookup_v2 = dlsym(real_library, "cuGetProcAddress_v2");
}

static void *real_symbol(const char *name) {
    pthread_once(&real_once, open_real);
    return real_library ? dlsym(real_library, name) : NULL;
}

static void base_name(const char *name, char out[NAME_BYTES]) {
    snprintf(out, NAME_BYTES, "%s", name);
    size_t length = strlen(out);
    if (length > 5 && (!strcmp(out + length - 5, "_ptsz") || !strcmp(out + length - 5, "_ptds"))) length -= 5;
    out[length] = 0;
    size_t digits = length;
    while (digits > 2 && out[digits - 1] >= '0' && out[digits - 1] <= '9') --digits;
    if (digits < length && out[digits - 1] == 'v' && out[digits - 2] == '_') out[digits - 2] = 0;
}

/* The slot of a name. Under the lock, but for the constructor. */
static struct slot *find_slot(const char *name, int create) {
    char base[NAME_BYTES];
    base_name(name, base);
    for (int i = 0; i < slot_count; ++i)
        if (!strcmp(slots[i].name, base)) return &slots[i];
    if (!create || slot_count == SLOTS) return NULL;
    memcpy(slots[slot_count].name, base, sizeof base);
    return &slots[slot_count++];
}

__attribute__((constructor)) static void prepare(void) {
    lookup_slot = find_slot("cuGetProcAddress", 1);
    for (int i = 0; i < EXPORTS; ++i)
        kina_interpose_records[i] = (struct record){(void *)kina_interpose_lazy, find_slot(exported[i], 1)};
}

static int answer_missing(void) { return real_library ? SYMBOL_NOT_FOUND : LIBRARY_INIT_FAILED; }

void *kina_interpose_bind(struct record *record) {
    const char *name = exported[record - kina_interpose_records];
    void *target = real_symbol(name);
    if (!target) {
        if (real_library) fprintf(stderr, "kina_interpose: %s has no %s\n", real_path, name);
        target = (void *)answer_missing;
    }
    __atomic_store_n(&record->target, target, __ATOMIC_RELEASE);
    return target;
}

/* What an armed call does: a negative number lets it pass, any other is the CUresult to return. */
static int64_t decide(struct slot *slot) {
    int64_t answer = -1;
    pthread_mutex_lock(&lock);
    if (slot->armed) { /* may have been spent while this call waited */
        if (slot->skip > 0) {
            --slot->skip;
        } else {
            answer = (uint32_t)slot->code;
            ++slot->injected;
            if (slot->times > 0 && --slot->times == 0) __atomic_store_n(&slot->armed, 0, __ATOMIC_RELAXED);
        }
    }
    pthread_mutex_unlock(&lock);
    return answer;
}

int64_t kina_interpose_decide(struct record *record) { return decide(record->slot); }

/* The stub for one real pointer: made once, so that equal questions get equal pointers. */
static void *stub_for(const char *name, void *target) {
    void *stub = NULL;
    pthread_mutex_lock(&lock);
    struct slot *slot = find_slot(name, 1);
    for (int i = EXPORTS; slot && i < record_count && !stub; ++i)
        if (kina_interpose_records[i].target == target && kina_interpose_records[i].slot == slot)
            stub = kina_interpose_stubs + (size_t)i * STUB_BYTES;
    if (!stub && slot && record_count < STUBS) {
        kina_interpose_records[record_count] = (struct record){target, slot};
        stub = kina_interpose_stubs + (size_t)record_count++ * STUB_BYTES;
    }
    pthread_mutex_unlock(&lock);
    if (!stub) { /* a call that escapes the counts would make a test lie */
        fprintf(stderr, "kina_interpose: out of stubs at %s\n", name);
        abort();
    }
    return stub;
}

EXPORTED int cuGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags);
EXPORTED int cuGetProcAddress_v2(const char *symbol, void **pfn, int version, uint64_t flags, int *status);

static void substitute(const char *symbol, void **pfn) {
    void *target = *pfn;
    if (!target) return;
    if (target == real_lookup_v2) *pfn = (void *)cuGetProcAddress_v2;
    else if (target == real_lookup_v1) *pfn = (void *)cuGetProcAddress;
    else *pfn = stub_for(symbol, target);
}

/* Counts a call of a wrapped lookup; negative: go on. */
static int64_t enter_lookup(void) {
    pthread_once(&real_once, open_real);
    __atomic_fetch_add(&lookup_slot->count, 1, __ATOMIC_RELAXED);
    return __atomic_load_n(&lookup_slot->armed, __ATOMIC_RELAXED) ? decide(lookup_slot) : -1;
}

int cuGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags) {
    int64_t injected = enter_lookup();
    if (injected >= 0) return (int)injected;
    if (!real_lookup_v1) return answer_missing();
    int result = ((lookup_v1)real_lookup_v1)(symbol, pfn, version, flags);
    if (result == SUCCESS && symbol && pfn) substitute(symbol, pfn);
    return result;
}

int cuGetProcAddress_v2(const char *symbol, void **pfn, int version, uint64_t flags, int *status) {
    int64_t injected = enter_lookup();
    if (injected >= 0) return (int)injected;
    if (!real_lookup_v2) return answer_missing();
    int result = ((lookup_v2)real_lookup_v2)(symbol, pfn, version, flags, status);
    if (result == SUCCESS && symbol && pfn) substitute(symbol, pfn);
    return result;
}

EXPORTED uint64_t kina_interpose_count(const char *name) {
    pthread_mutex_lock(&lock);
    struct slot *slot = find_slot(name, 0);
    uint64_t count = slot ? __atomic_load_n(&slot->count, __ATOMIC_RELAXED) : KINA_INTERPOSE_UNKNOWN;
    pthread_mutex_unlock(&lock);
    return count;
}

EXPORTED uint64_t kina_interpose_injected(const char *name) {
    pthread_mutex_lock(&lock);
    struct slot *slot = find_slot(name, 0);
    uint64_t injected = slot ? slot->injected : KINA_INTERPOSE_UNKNOWN;
    pthread_mutex_unlock(&lock);
    return injected;
}

EXPORTED void kina_interpose_reset(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < slot_count; ++i) {
        __atomic_store_n(&slots[i].armed, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&slots[i].count, 0, __ATOMIC_RELAXED);
        slots[i].injected = 0;
    }
    pthread_mutex_unlock(&lock);
}

EXPORTED int kina_interpose_fail(const char *name, int64_t nth, int32_t code, int64_t times) {
    pthread_mutex_lock(&lock);
    struct slot *slot = nth < 1 ? NULL : find_slot(name, 0);
    if (slot) {
        slot->skip = nth - 1;
        slot->code = code;
        slot->times = times;
        __atomic_store_n(&slot->armed, times != 0, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&lock);
    return slot ? 0 : -1;
}

EXPORTED size_t kina_interpose_dump(char *buffer, size_t size) {
    size_t length = 0;
#define PUT(...) \
    length += (size_t)snprintf(length < size ? buffer + length : NULL, length < size ? size - length : 0, __VA_ARGS__)
    pthread_mutex_lock(&lock);
    PUT("{\"counts\": {");
    for (int i = 0; i < slot_count; ++i)
        PUT("%s\"%s\": %llu", i ? ", " : "", slots[i].name,
            (unsigned long long)__atomic_load_n(&slots[i].count, __ATOMIC_RELAXED));
    PUT("}, \"injected\": {");
    const char *comma = "";
    for (int i = 0; i < slot_count; ++i)
        if (slots[i].injected) {
            PUT("%s\"%s\": %llu", comma, slots[i].name, (unsigned long long)slots[i].injected);
            comma = ", ";
        }
    PUT("}}");
    pthread_mutex_unlock(&lock);
#undef PUT
    return length;
}

EXPORTED const char *kina_interpose_real(void) {
    pthread_once(&real_once, open_real);
    return real_library ? real_path : NULL;
}
