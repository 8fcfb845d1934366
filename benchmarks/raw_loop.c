/* What the hardware and the driver allow: the same calls as the libraries make, in loops in C, through the
 * pointers that cuGetProcAddress gives. Every function returns the first CUresult that is not 0. Needs no
 * CUDA headers. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    void *function, *stream;
    unsigned grid, block;
} launch;

static int (*init)(unsigned);
static int (*driver_version)(int *);
static int (*device_name)(char *, int, int);
static int (*primary_retain)(void **, int);
static int (*push)(void *);
static int (*pop)(void **);
static int (*current_synchronize)(void);
static int (*module_load)(void **, const void *);
static int (*module_function)(void **, void *, const char *);
static int (*stream_create)(void **, unsigned);
static int (*stream_synchronize)(void *);
static int (*kernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                     void **);

static int (*begin_capture)(void *, int);
static int (*end_capture)(void *, void **);
static int (*instantiate)(void **, void *, unsigned long long);
static int (*graph_launch)(void *, void *);

int raw_open(void) {
    static const struct {
        const char *name;
        void *pointer;
    } wanted[] = {{"cuInit", &init},
                  {"cuDriverGetVersion", &driver_version},
                  {"cuDeviceGetName", &device_name},
                  {"cuDevicePrimaryCtxRetain", &primary_retain},
                  {"cuCtxPushCurrent", &push},
                  {"cuCtxPopCurrent", &pop},
                  {"cuCtxSynchronize", &current_synchronize},
                  {"cuModuleLoadData", &module_load},
                  {"cuModuleGetFunction", &module_function},
                  {"cuStreamCreate", &stream_create},
                  {"cuStreamSynchronize", &stream_synchronize},
                  {"cuStreamBeginCapture", &begin_capture},
                  {"cuStreamEndCapture", &end_capture},
                  {"cuGraphInstantiateWithFlags", &instantiate},
                  {"cuGraphLaunch", &graph_launch},
                  {"cuLaunchKernel", &kernel}};
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*lookup)(const char *, void **, int, uint64_t, int *) =
        library ? (int (*)(const char *, void **, int, uint64_t, int *))dlsym(library, "cuGetProcAddress_v2") : NULL;
    if (!lookup) return 303;
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; ++i) {
        int found = 0;
        /* 12000: the newest forms whose arguments are those above (13000 changes cuCtxSynchronize). */
        int result = lookup(wanted[i].name, (void **)wanted[i].pointer, 12000, 0, &found);
        if (result || !*(void **)wanted[i].pointer) return result ? result : 500;
    }
    return init(0);
}

int raw_driver_version(int *version) { return driver_version(version); }
int raw_device_name(char *name, int size) { return device_name(name, size, 0); }
int raw_context(void **context) { return primary_retain(context, 0); }
int raw_stream(void **stream) { return stream_create(stream, 1); /* non-blocking */ }
int raw_settle(void) { return current_synchronize(); }

int raw_function(const char *image, const char *name, void **function) {
    void *module;
    int result = module_load(&module, image);
    return result ? result : module_function(function, module, name);
}

int raw_launch_parameters(const launch *l, void **parameters, int count) {
    int result = 0;
    for (int i = 0; i < count && !result; ++i)
        result = kernel(l->function, l->grid, 1, 1, l->block, 1, 1, 0, l->stream, parameters, NULL);
    return result;
}

/* A graph of `count` launches. */
int raw_graph(const launch *l, void **parameters, int count, void **graph) {
    void *captured = NULL;
    int result = begin_capture(l->stream, 2); /* relaxed */
    if (!result) result = raw_launch_parameters(l, parameters, count);
    int ended = end_capture(l->stream, &captured);
    if (!result) result = ended;
    return result ? result : instantiate(graph, captured, 0);
}

int raw_graph_launch(void *graph, void *stream, int count) {
    int result = 0;
    for (int i = 0; i < count && !result; ++i) result = graph_launch(graph, stream);
    return result;
}

int raw_launch_extra(const launch *l, void *buffer, size_t size, int count) {
    void *extra[] = {(void *)1, buffer, (void *)2, &size, NULL}; /* CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE, _END */
    int result = 0;
    for (int i = 0; i < count && !result; ++i)
        result = kernel(l->function, l->grid, 1, 1, l->block, 1, 1, 0, l->stream, NULL, extra);
    return result;
}

/* kina's own entry for code without the GIL, called through the pointer that its module exports. */
int raw_launch_prepared(int (*entry)(void *, const void *, void **, int), void *prepared, const void *buffer,
                        int count) {
    int result = 0;
    for (int i = 0; i < count && !result; ++i) result = entry(prepared, buffer, NULL, 0);
    return result;
}

int raw_launch_and_synchronize(const launch *l, void **parameters, int count) {
    int result = 0;
    for (int i = 0; i < count && !result; ++i) {
        result = kernel(l->function, l->grid, 1, 1, l->block, 1, 1, 0, l->stream, parameters, NULL);
        if (!result) result = stream_synchronize(l->stream);
    }
    return result;
}

int raw_synchronize(void *stream, int count) {
    int result = 0;
    for (int i = 0; i < count && !result; ++i) result = stream_synchronize(stream);
    return result;
}

int raw_push_pop(void *context, int count) {
    int result = 0;
    for (int i = 0; i < count && !result; ++i) {
        void *popped;
        result = push(context);
        if (!result) result = pop(&popped);
    }
    return result;
}

/* A DLManagedTensorVersioned, as far as its deleter. */
typedef struct managed {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct managed *);
} managed;

/* Exports of a tensor by kina's function for code without the GIL, each given back at once: `count` times. */
int raw_exports(int (*give)(const void *, int64_t, managed **), const void *tensor, int64_t consumer, int count) {
    for (int i = 0; i < count; ++i) {
        managed *given;
        int status = give(tensor, consumer, &given);
        if (status) return status;
        given->deleter(given);
    }
    return 0;
}
