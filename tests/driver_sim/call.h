// The frame around every entry point: counting, ordered faults, preconditions, trace.
#pragma once

#include "trace.h"
#include "world.h"

namespace sim {

// What an entry point demands before its body runs.
enum Need : unsigned {
    kNothing = 0,
    kInit = 1,                // cuInit was called
    kContext = 2 | kInit,     // a live, healthy context is current
    kUnsafe = 4,              // forbidden while a capture that can see this thread is open
    kPure = 8,                // reads nothing but constants: left out of "the Nth call of any name"
    kCurrent = 16 | kInit,    // a context is current, but it may be dead, and the process faulted
    kHealthy = 32 | kInit,    // no fault was told; with or without a current context
    kNotDead = 64 | kHealthy, // the same, but the current context may not be a dead one
    kUnrefused = 128          // answered inside a host function too, where nothing should be called
};

class Call {
  public:
    Call(const char *name, unsigned needs);

    void admit(); // throws Fail
    CUresult finish(CUresult result);

    Context &context() { return *context_; }
    const ContextPtr &context_ptr() { return context_; }
    Guard &guard() { return guard_; }
    const char *name() const { return name_; }
    Record record;

    // Resolve handles, or throw the error the driver gives.
    StreamPtr stream(CUstream handle);
    EventPtr event(CUevent handle);
    Device &device(CUdevice ordinal);
    PoolPtr pool(CUmemoryPool handle);

    // Blocks the host until pred() holds; the world's lock is released meanwhile.
    void wait(const std::function<bool()> &pred);

    // Throws the error of a fault that was told already.
    void check_healthy();
    // After a wait: a fault is told now, and thrown.
    void notice_fault();
    // Throws 900 and kills the captures if this thread may not make an unsafe call now.
    void check_capture_allows();

  private:
    const char *name_;
    unsigned needs_;
    Guard guard_;
    ContextPtr context_;
};

// Throws the error for a handle that is not live, and notes it if it once was.
template <class Table>
[[noreturn]] void refuse_dead(Table &table, const void *handle, const char *call, const char *what) {
    if (table.was_destroyed(handle)) {
        violation(call, std::string(what) + " was destroyed", reinterpret_cast<uint64_t>(handle));
        if (table.died_with_context(handle)) throw Fail{CUDA_ERROR_CONTEXT_IS_DESTROYED};
    }
    throw Fail{CUDA_ERROR_INVALID_HANDLE};
}

template <class T> T &require(T *out) {
    if (!out) throw Fail{CUDA_ERROR_INVALID_VALUE};
    return *out;
}

template <class Body> CUresult entry(const char *name, unsigned needs, Body &&body) {
    // A forked child owns none of the threads that the state counts on, and maybe a locked lock.
    if (in_forked_child()) return CUDA_ERROR_NOT_INITIALIZED;
    Call call(name, needs);
    try {
        call.admit();
        body(call);
        return call.finish(CUDA_SUCCESS);
    } catch (const Fail &fail) {
        return call.finish(fail.code);
    }
}

} // namespace sim
