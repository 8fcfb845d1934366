// The state of the simulated driver: one World, one lock, plain structs.
//
// Every entry point runs under World::lock; only the work of streams (worker threads) and waits
// leave it. One lock is enough for tests and makes every interleaving of calls explainable.
#pragma once

// Everything is built hidden; what cuda.h declares is the library's public face.
#pragma GCC visibility push(default)
#include <cuda.h>
// Older symbols that cuda.h no longer declares, and that are still asked for by version.
extern "C" {
CUresult CUDAAPI cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice dev);
}
#pragma GCC visibility pop

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "handle_table.h"

namespace sim {

struct Allocation;
struct Capture;
struct Context;
struct Device;
struct Event;
struct Function;
struct Graph;
struct GraphExec;
struct GraphMemory;
struct GraphNode;
struct KernelLaunch;
struct Library;
struct Module;
struct Pool;
struct Stream;
struct UserObject;
class Exec;

using AllocationPtr = std::shared_ptr<Allocation>;
using ContextPtr = std::shared_ptr<Context>;
using EventPtr = std::shared_ptr<Event>;
using FunctionPtr = std::shared_ptr<Function>;
using GraphPtr = std::shared_ptr<Graph>;
using ModulePtr = std::shared_ptr<Module>;
using NodePtr = std::shared_ptr<GraphNode>;
using PoolPtr = std::shared_ptr<Pool>;
using StreamPtr = std::shared_ptr<Stream>;

using Work = std::function<void(Exec &)>;
using Guard = std::unique_lock<std::mutex>;

// Thrown inside an entry point to leave it with a result.
struct Fail {
    CUresult code;
};

// Thrown inside stream work: the context is dead from here on.
struct Fault {
    CUresult code;
    std::string why;
};

struct Settings {
    int devices = 1;
    uint64_t memory = uint64_t{143771} << 20;
    std::string peers; // row-major matrix of '0'/'1'; empty: all devices are peers
    std::string trace_path;
    std::string hidden; // comma-separated names that cuGetProcAddress does not find
    int driver_version = 13000;
    int capability = 90; // compute capability, times ten
    bool reuse_handles = false;
    bool host_readable = false; // device memory readable by host code at its device address
    bool host_alloc_syncs = false;
    bool pools = true;       // devices have memory pools
    bool poison = true;      // fill fresh and freed device memory with a pattern
    uint64_t latency_us = 0; // added before every piece of stream work
    // Shuffled: a host that makes no driver call for so long is taken to wait for work by other means. Long
    // enough that one which is only slow does not disturb a seeded order; 0 for never.
    uint64_t quiet_ms = 50;
    uint64_t timeout_ms = 60000; // a host wait longer than this aborts and prints the streams
    bool shuffle = false;
    uint64_t seed = 0;
};

// Work may start when this stream has passed this place.
struct Dependency {
    StreamPtr stream;
    uint64_t seq;
};

struct Context {
    CUcontext handle = nullptr;
    uint64_t id = 0;
    int device = 0;
    bool primary = false;
    bool alive = true;
    unsigned flags = 0;
    StreamPtr legacy;
    std::map<uint64_t, StreamPtr> per_thread; // by thread number
    std::set<int> peers;                      // devices whose memory this context may touch
    std::map<int, size_t> limits;
    std::vector<Dependency> awaited; // by everything that is queued in any of its streams
};

struct World {
    std::mutex lock;
    std::condition_variable changed; // something a host wait may be waiting for has happened
    Settings settings;
    bool initialized = false;
    // A fault takes the whole process: every context of every device. The first cause counts, and nobody is told of
    // it before a call looks.
    CUresult fault = CUDA_SUCCESS;
    std::string fault_why;
    bool fault_is_told = false;
    uint64_t next_id = 1; // contexts, streams, allocations, captures: never reused

    std::vector<std::unique_ptr<Device>> devices;
    HandleTable<Context> contexts{1};
    std::map<CUcontext, ContextPtr> destroyed_contexts; // some calls still take them
    HandleTable<Stream> streams{2};
    HandleTable<Event> events{3};
    HandleTable<Module> modules{4};
    HandleTable<Function> functions{5};
    HandleTable<Pool> pools{6};
    HandleTable<Graph> graphs{7};
    HandleTable<GraphExec> graph_execs{8};
    HandleTable<GraphNode> graph_nodes{9};
    HandleTable<UserObject> user_objects{10};
    HandleTable<Library> libraries{11};
    HandleTable<Function> kernels{12};

    std::map<uint64_t, AllocationPtr> host_view;   // what host calls may name
    std::map<uint64_t, AllocationPtr> device_view; // what work running now may touch
    std::map<uint64_t, AllocationPtr> freed;       // last owner of an address, for diagnosis
    std::vector<std::shared_ptr<Capture>> captures;
    std::vector<std::pair<std::weak_ptr<GraphMemory>, AllocationPtr>> graph_memory;
};

World &world();
void read_settings(Settings &settings);
void initialize(World &w); // cuInit: devices, settings, fork guard

// Per host thread; the number is never reused, unlike the system's thread id.
struct ThreadState {
    uint64_t number;
    std::vector<ContextPtr> stack;
    int capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL; // or a number that is no mode: the driver takes any
    bool in_host_function = false;
    bool in_destructor = false; // of a user object
    ThreadState();
};
ThreadState &this_thread();

bool in_forked_child();

} // namespace sim
