// Streams: queues drained by their own worker thread, and the waits of the host.
#pragma once

#include "world.h"

namespace sim {

struct Operation {
    explicit Operation(std::string kind_ = {}, std::string detail_ = {})
        : kind(std::move(kind_)), detail(std::move(detail_)) {}
    std::string kind;
    std::string detail; // kernel name, copy direction
    uint64_t seq = 0;
    uint64_t nbytes = 0;
    std::vector<Dependency> dependencies;
    std::function<bool()> ready; // also waited for, if set: something outside the queues, polled
    Work work;
    std::shared_ptr<KernelLaunch> kernel; // what work launches, if it is a kernel
    EventPtr event;                       // that it records or waits for, in a graph
    ContextPtr context;                   // whose work it is, if not the stream's: captured elsewhere
    bool even_if_faulted = false;         // bookkeeping that must happen after a fault too
};

struct Stream {
    CUstream handle = nullptr;
    uint64_t id = 0;
    ContextPtr context;
    unsigned flags = 0;
    int priority = 0;
    bool legacy = false;

    std::deque<Operation> queue;
    uint64_t submitted = 0; // sequence of the last operation queued
    uint64_t completed = 0; // every operation up to here is done
    bool running = false;
    bool faulted = false; // its work failed, or was dropped behind a fault
    bool closing = false; // destroyed: the worker leaves when the queue is empty
    bool worker_started = false;
    std::condition_variable wake;

    // Places of other streams, by id, that its next work comes behind because of events.
    std::map<uint64_t, uint64_t> ordered_after;

    bool stalled = false;
    uint64_t steps = 0; // operations a stalled stream may still run

    std::shared_ptr<Capture> capture;
    std::vector<NodePtr> capture_tail;

    bool blocking() const { return legacy || !(flags & CU_STREAM_NON_BLOCKING); }
    bool idle() const { return completed == submitted; }
};

// What stream work sees while it runs, outside the world's lock.
class Exec {
  public:
    Exec(ContextPtr context, std::string what) : context_(std::move(context)), what_(std::move(what)) {}
    const Context &context() const { return *context_; }
    const std::string &what() const { return what_; }
    // The real bytes behind an address range, or a Fault if the device may not touch it now.
    void *at(CUdeviceptr address, size_t nbytes, bool write) const;

  private:
    ContextPtr context_;
    std::string what_;
};

StreamPtr make_stream(const ContextPtr &context, unsigned flags, int priority, bool legacy);
StreamPtr per_thread_stream(const ContextPtr &context, uint64_t thread);
std::vector<StreamPtr> streams_of(const Context &context);

// Queues an operation behind what the stream, and the default-stream rules, put before it.
// The stream must not be capturing. Returns its sequence number.
uint64_t enqueue(const StreamPtr &stream, Operation operation);

Operation host_function(CUhostFn function, void *data);

// Lets a destroyed stream's worker finish and leave.
void retire_stream(const StreamPtr &stream);

// Blocks until pred() holds, driving the scheduler in shuffle mode; aborts after the timeout.
void host_wait(Guard &guard, const std::string &what, const std::function<bool()> &pred);
void wait_for_stream(Guard &guard, const std::string &what, const StreamPtr &stream);
void wait_for_context(Guard &guard, const std::string &what, const ContextPtr &context);
void wait_for_device(Guard &guard, const std::string &what, int device); // every context of it

// A query in shuffle mode lets one operation run, so that a polling host makes progress.
void nudge_scheduler(Guard &guard);
void note_activity(); // a driver call: the host is not waiting by other means
void wake_streams();  // stall states changed
void start_shuffle(uint64_t seed);
void stop_shuffle();
// A number below n from the seed in shuffle mode, else 0.
size_t draw(size_t n);
bool shuffling();

void mark_faulted(CUresult code, const std::string &why);
std::string describe_streams();

// Test control: every stream created from now on starts stalled.
extern bool stall_new_streams;

} // namespace sim
