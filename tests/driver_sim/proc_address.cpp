// cuGetProcAddress: unsuffixed name and version to the function of that time.
//
// The table is generated from cudaTypedefs.h. A name of it that the simulation does not implement
// gives a stub that names itself and aborts, so that a missing entry point cannot be overlooked.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "call.h"

namespace {

[[noreturn]] void missing(const char *name, int version) {
    std::fprintf(stderr, "driver_sim: %s (of CUDA %d.%d) was called, and the simulated driver does not implement it\n",
                 name, version / 1000, version % 1000 / 10);
    std::abort();
}

} // namespace

#include "proc_table.inc" // stubs, weak declarations, kProcTable (rows of a name are adjacent, oldest first)

namespace {

bool is_hidden(const std::string &list, const char *name) {
    size_t length = std::strlen(name);
    for (size_t at = list.find(name); at != std::string::npos; at = list.find(name, at + 1)) {
        bool begins = at == 0 || list[at - 1] == ',';
        bool ends = at + length == list.size() || list[at + length] == ',';
        if (begins && ends) return true;
    }
    return false;
}

} // namespace

CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **out, int version, cuuint64_t flags,
                                  CUdriverProcAddressQueryResult *status) {
    using namespace sim;
    return entry("cuGetProcAddress", kPure, [&](Call &call) {
        require(out) = nullptr;
        constexpr cuuint64_t kKnownFlags =
            CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
        if (!symbol || flags > kKnownFlags) throw Fail{CUDA_ERROR_INVALID_VALUE};
        call.record.kind = symbol;
        call.record.nbytes = static_cast<uint64_t>(version);
        Settings settings;
        read_settings(settings);
        if (version > settings.driver_version) throw Fail{CUDA_ERROR_INVALID_VALUE};
        bool known = false;
        const ProcRow *best = nullptr;
        if (!is_hidden(settings.hidden, symbol))
            for (const ProcRow &row : kProcTable) {
                if (std::strcmp(row.name, symbol) != 0 || row.version > settings.driver_version) continue;
                known = true;
                if (row.version <= version) best = &row;
            }
        if (status)
            *status = best    ? CU_GET_PROC_ADDRESS_SUCCESS
                      : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                              : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        if (!best && status) return; // who asks for the reason is told there
        if (!best) throw Fail{CUDA_ERROR_NOT_FOUND};
        *out = best->function ? best->function : best->stub;
        if (!best->function) call.record.note = "stub";
    });
}
