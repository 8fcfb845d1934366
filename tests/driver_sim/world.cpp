#include "world.h"

#include <pthread.h>

#include <cstdlib>

#include "device.h"
#include "stream.h"
#include "trace.h"

namespace sim {
namespace {

std::atomic<bool> forked{false};
std::atomic<uint64_t> next_thread{1};

uint64_t number_from(const char *name, uint64_t otherwise) {
    const char *text = std::getenv(name);
    return text && *text ? std::strtoull(text, nullptr, 0) : otherwise;
}

std::string text_from(const char *name) {
    const char *text = std::getenv(name);
    return text ? text : "";
}

} // namespace

World &world() {
    static World *instance = new World; // never destroyed: workers outlive static destruction
    return *instance;
}

ThreadState::ThreadState() : number(next_thread++) {}

ThreadState &this_thread() {
    static thread_local ThreadState state;
    return state;
}

bool in_forked_child() { return forked.load(std::memory_order_relaxed); }

void read_settings(Settings &s) {
    s.devices = static_cast<int>(number_from("KINA_SIM_DEVICES", s.devices));
    s.memory = number_from("KINA_SIM_MEMORY", s.memory);
    s.peers = text_from("KINA_SIM_PEERS");
    s.trace_path = text_from("KINA_SIM_TRACE");
    s.hidden = text_from("KINA_SIM_HIDE");
    s.driver_version = static_cast<int>(number_from("KINA_SIM_DRIVER_VERSION", s.driver_version));
    s.capability = static_cast<int>(number_from("KINA_SIM_CAPABILITY", s.capability));
    s.reuse_handles = number_from("KINA_SIM_REUSE_HANDLES", 0) != 0;
    s.host_readable = number_from("KINA_SIM_HOST_READABLE", 0) != 0;
    s.host_alloc_syncs = number_from("KINA_SIM_HOST_ALLOC_SYNCS", 0) != 0;
    s.pools = number_from("KINA_SIM_POOLS", 1) != 0;
    s.poison = number_from("KINA_SIM_POISON", 1) != 0;
    s.latency_us = number_from("KINA_SIM_LATENCY_US", 0);
    s.quiet_ms = number_from("KINA_SIM_QUIET_MS", s.quiet_ms);
    s.timeout_ms = number_from("KINA_SIM_TIMEOUT_MS", s.timeout_ms);
    s.shuffle = std::getenv("KINA_SIM_SEED") != nullptr;
    s.seed = number_from("KINA_SIM_SEED", 0);
}

void initialize(World &w) {
    if (w.initialized) return;
    // As the real library: no state of this process is usable in a forked child. The locks are held
    // over the fork all the same, so that the child can ask for counters and the trace: a lock that a
    // worker had then would never be free there.
    static const int registered = pthread_atfork(
        [] {
            world().lock.lock();
            trace_lock();
        },
        [] {
            trace_unlock();
            world().lock.unlock();
        },
        [] {
            forked = true;
            trace_unlock();
            world().lock.unlock();
        });
    (void)registered;
    read_settings(w.settings);
    if (!w.settings.trace_path.empty()) trace_open(w.settings.trace_path);
    w.streams.set_reuse(w.settings.reuse_handles);
    w.events.set_reuse(w.settings.reuse_handles);
    w.modules.set_reuse(w.settings.reuse_handles);
    w.functions.set_reuse(w.settings.reuse_handles);
    w.pools.set_reuse(w.settings.reuse_handles);
    w.contexts.set_reuse(w.settings.reuse_handles);
    create_devices(w);
    if (w.settings.shuffle) start_shuffle(w.settings.seed);
    w.initialized = true;
}

} // namespace sim
