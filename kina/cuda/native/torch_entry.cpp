#include "torch_entry.h"

#include <new>

#include "kina_status.h"

namespace {

kina_torch_functions functions;

struct words {
    char text[1536];
    words() { functions.describe(text, sizeof text); }
};

class out_of_memory : public std::bad_alloc {
    words said;

  public:
    const char *what() const noexcept override { return said.text; }
};

class failure : public std::exception {
    words said;

  public:
    const char *what() const noexcept override { return said.text; }
};

void check(int status) {
    if (status == KINA_OUT_OF_MEMORY) throw out_of_memory();
    if (status != 0) throw failure();
}

} // namespace

void kina_torch_install(const kina_torch_functions *given) { functions = *given; }

void *kina_torch_allocate(ptrdiff_t nbytes, int ordinal, void *stream) {
    void *data = nullptr;
    check(functions.allocate(&data, nbytes, ordinal, stream));
    return data;
}

void kina_torch_record_stream(void *data, void *stream) { check(functions.record_stream(data, stream)); }

/* What PyTorch says of size and stream may be those of an earlier allocation at this address: nothing is made of it. */
void kina_torch_deallocate(void *data, ptrdiff_t, int, void *) { functions.deallocate(data); }

void kina_torch_empty_cache() { functions.empty_cache(); }
