#include "control.h"

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "capture.h"
#include "device.h"
#include "event.h"
#include "kernels.h"
#include "memory.h"
#include "module.h"
#include "pool.h"
#include "vmm.h"

using namespace sim;

namespace {

// The stream that a handle names for the calling thread, or null; no error and no trace.
StreamPtr stream_named(void *handle) {
    CUstream stream = static_cast<CUstream>(handle);
    ThreadState &thread = this_thread();
    if (stream == nullptr || stream == CU_STREAM_LEGACY)
        return thread.stack.empty() ? nullptr : thread.stack.back()->legacy;
    if (stream == CU_STREAM_PER_THREAD) {
        if (thread.stack.empty() || !thread.stack.back()->alive) return nullptr;
        return per_thread_stream(thread.stack.back(), thread.number);
    }
    return world().streams.find(stream);
}

template <class Body> int with_stream(void *handle, Body body) {
    Guard guard(world().lock);
    StreamPtr stream = stream_named(handle);
    if (!stream) return -1;
    body(*stream);
    wake_streams();
    return 0;
}

std::vector<StreamPtr> every_stream() {
    std::vector<StreamPtr> all;
    for (const auto &[handle, context] : world().contexts.live())
        if (context->alive)
            for (const StreamPtr &stream : streams_of(*context)) all.push_back(stream);
    return all;
}

char *copy_out(const std::string &text) {
    char *out = static_cast<char *>(std::malloc(text.size() + 1));
    std::memcpy(out, text.c_str(), text.size() + 1);
    return out;
}

bool is_inside_device(unsigned long long address, size_t nbytes) {
    for (const auto &device : world().devices) {
        const AddressSpace &space = device->addresses;
        if (space.contains(address) && nbytes <= space.length() - (address - space.base())) return true;
    }
    return !find_range(world().host_view, address, nbytes).empty();
}

} // namespace

int kina_sim_stall(void *stream) {
    return with_stream(stream, [](Stream &s) {
        s.stalled = true;
        s.steps = 0;
    });
}

int kina_sim_step(void *stream, uint64_t operations) {
    return with_stream(stream, [&](Stream &s) { s.steps += operations; });
}

int kina_sim_resume(void *stream) {
    return with_stream(stream, [](Stream &s) {
        s.stalled = false;
        s.steps = 0;
    });
}

int64_t kina_sim_pending(void *stream) {
    Guard guard(world().lock);
    StreamPtr found = stream_named(stream);
    return found ? static_cast<int64_t>(found->submitted - found->completed) : -1;
}

void kina_sim_stall_all(void) {
    Guard guard(world().lock);
    for (const StreamPtr &stream : every_stream()) stream->stalled = true;
}

void kina_sim_resume_all(void) {
    Guard guard(world().lock);
    for (const StreamPtr &stream : every_stream()) {
        stream->stalled = false;
        stream->steps = 0;
    }
    wake_streams();
}

void kina_sim_stall_new_streams(int on) {
    Guard guard(world().lock);
    stall_new_streams = on != 0;
}

int kina_sim_wait_idle(uint64_t timeout_ms) {
    auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    Guard guard(world().lock);
    for (;;) {
        bool idle = true;
        for (const StreamPtr &stream : every_stream()) idle = idle && stream->idle();
        if (idle) return 0;
        if (std::chrono::steady_clock::now() >= until) return -1;
        nudge_scheduler(guard);
        world().changed.wait_for(guard, std::chrono::milliseconds(1));
    }
}

void kina_sim_shuffle(uint64_t seed) {
    Guard guard(world().lock);
    start_shuffle(seed);
}

void kina_sim_stop_shuffle(void) {
    Guard guard(world().lock);
    stop_shuffle();
}

void kina_sim_set_latency_us(uint64_t latency_us) {
    Guard guard(world().lock);
    world().settings.latency_us = latency_us;
}

void kina_sim_fail(const char *name, uint64_t nth, int result, int from_then_on) {
    add_fault(name, nth, result, from_then_on != 0);
}

void kina_sim_clear_faults(void) { clear_faults(); }

uint64_t kina_sim_faults_delivered(void) { return faults_delivered(); }

int kina_sim_break_device(int device, int result) {
    Guard guard(world().lock);
    if (device < 0 || static_cast<size_t>(device) >= world().devices.size()) return -1;
    mark_faulted(static_cast<CUresult>(result), "ordered by the test");
    world().fault_is_told = true;
    return 0;
}

uint64_t kina_sim_calls(const char *name) { return std::strcmp(name, "*") == 0 ? call_total() : call_count(name); }

char *kina_sim_call_counts(void) { return copy_out(call_counts_json()); }

void kina_sim_reset_counts(void) { reset_counts(); }

uint64_t kina_sim_trace_position(void) { return trace_position(); }

char *kina_sim_trace(uint64_t since) { return copy_out(trace_json(since)); }

void kina_sim_clear_trace(void) { trace_clear(); }

uint64_t kina_sim_violations(void) { return violation_count(); }

char *kina_sim_live(void) {
    Guard guard(world().lock);
    World &w = world();
    size_t contexts = 0, modules = 0, pools = 0;
    for (const auto &[handle, context] : w.contexts.live()) contexts += context->alive;
    for (const auto &[handle, module] : w.modules.live()) modules += !module->of_library;
    for (const auto &[handle, pool] : w.pools.live()) pools += !pool->is_default;
    std::map<std::string, std::pair<size_t, uint64_t>> memory;
    std::string listed;
    for (const auto &[base, allocation] : w.host_view) {
        auto &[count, bytes] = memory[kind_name(allocation->kind)];
        count++;
        bytes += allocation->nbytes;
        listed += std::string(listed.empty() ? "" : ",") + "{\"address\":" + std::to_string(base) +
                  ",\"nbytes\":" + std::to_string(allocation->nbytes) + ",\"kind\":\"" + kind_name(allocation->kind) +
                  "\",\"device\":" + std::to_string(allocation->device) + "}";
    }
    std::string out =
        "{\"contexts\":" + std::to_string(contexts) + ",\"streams\":" + std::to_string(w.streams.live().size()) +
        ",\"events\":" + std::to_string(w.events.live().size()) + ",\"modules\":" + std::to_string(modules) +
        ",\"libraries\":" + std::to_string(w.libraries.live().size()) + ",\"pools\":" + std::to_string(pools) +
        ",\"graphs\":" + std::to_string(w.graphs.live().size()) +
        ",\"graph_execs\":" + std::to_string(w.graph_execs.live().size()) +
        ",\"user_objects\":" + std::to_string(w.user_objects.live().size()) +
        ",\"reservations\":" + std::to_string(virtual_memory().reservations.size()) +
        ",\"physical\":" + std::to_string(virtual_memory().physical.live().size()) + ",\"allocations\":[" + listed +
        "],\"retains\":[";
    for (size_t i = 0; i < w.devices.size(); ++i) out += (i ? "," : "") + std::to_string(w.devices[i]->primary_retains);
    return copy_out(out + "]}");
}

void kina_sim_free(void *text) { std::free(text); }

int kina_sim_read(unsigned long long address, void *to, size_t nbytes) {
    Guard guard(world().lock);
    if (!is_inside_device(address, nbytes)) return -1;
    std::memcpy(to, backing(address), nbytes);
    return 0;
}

int kina_sim_write(unsigned long long address, const void *from, size_t nbytes) {
    Guard guard(world().lock);
    if (!is_inside_device(address, nbytes)) return -1;
    std::memcpy(backing(address), from, nbytes);
    return 0;
}

void kina_sim_register_kernel(const char *prefix, kina_sim_kernel body, void *user) {
    register_kernel(prefix, body, user);
}
