#include "stream.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "trace.h"

namespace sim {

bool stall_new_streams = false;

namespace {

// How often a stream looks at what no driver call announces: a word that the host writes.
constexpr std::chrono::microseconds kPoll{200};

// In shuffle mode one operation runs at a time, on the stream that holds the turn.
struct Shuffle {
    bool on = false;
    std::mt19937_64 random;
    Stream *turn = nullptr;
    std::vector<const std::function<bool()> *> waits; // what host threads wait for
    bool ticker = false;
    uint64_t last_activity_ns = 0; // a driver call, or work that ended
};

Shuffle &shuffle() {
    static Shuffle *instance = new Shuffle;
    return *instance;
}

// Asked anew each time: a host whose wait is over may not have woken yet, and what would run for it
// until it does would depend on the machine, not on the seed.
bool host_is_waiting() {
    for (const auto *pred : shuffle().waits)
        if (!(*pred)()) return true;
    return false;
}

bool dependencies_met(const Operation &operation) {
    for (const Dependency &d : operation.dependencies)
        if (d.stream->completed < d.seq) return false;
    return !operation.ready || operation.ready();
}

bool runnable(const Stream &stream) {
    if (stream.queue.empty() || stream.running) return false;
    if (stream.stalled && stream.steps == 0) return false;
    return dependencies_met(stream.queue.front());
}

// Every stream with a worker, destroyed ones that still hold work included.
std::vector<Stream *> &active_streams() {
    static auto *instance = new std::vector<Stream *>;
    return *instance;
}

void choose_turn() {
    Shuffle &s = shuffle();
    if (!s.on || s.turn) return;
    std::vector<Stream *> candidates;
    for (Stream *stream : active_streams())
        if (runnable(*stream)) candidates.push_back(stream);
    if (candidates.empty()) return;
    s.turn = candidates[s.random() % candidates.size()];
    s.turn->wake.notify_all();
}

void record_execution(const Stream &stream, const Operation &operation, int result) {
    Record r;
    r.event = "exec";
    r.name = operation.kind;
    r.kind = operation.detail;
    r.result = result;
    r.thread = this_thread().number;
    r.context = r.context_after = stream.context->id;
    r.stream = reinterpret_cast<uint64_t>(stream.handle);
    r.stream_id = stream.id;
    r.nbytes = operation.nbytes;
    r.device = stream.context->device;
    r.handle = operation.seq;
    trace_add(std::move(r));
}

// Runs one operation with the lock released. Returns what the trace should say.
int perform(const StreamPtr &stream, Operation &operation, Guard &guard) {
    const ContextPtr context = operation.context ? operation.context : stream->context;
    if (world().fault != CUDA_SUCCESS && !operation.even_if_faulted) {
        stream->faulted = true;
        return world().fault; // nothing runs any more, but the waits must end
    }
    uint64_t latency = world().settings.latency_us;
    guard.unlock();
    if (latency) std::this_thread::sleep_for(std::chrono::microseconds(latency));
    CUresult result = CUDA_SUCCESS;
    std::string why;
    try {
        Exec exec(context, operation.detail.empty() ? operation.kind : operation.detail);
        if (operation.work) operation.work(exec);
    } catch (const Fault &fault) {
        result = fault.code;
        why = fault.why;
    }
    operation.work = nullptr; // what it kept alive goes before the operation counts as done
    guard.lock();
    if (result != CUDA_SUCCESS) {
        stream->faulted = true;
        mark_faulted(result, why);
    }
    return result;
}

void drain(StreamPtr stream) {
    Guard guard(world().lock);
    Shuffle &s = shuffle();
    for (;;) {
        auto may_go_on = [&] {
            if (stream->queue.empty()) return stream->closing;
            return runnable(*stream) && (!s.on || s.turn == stream.get());
        };
        while (!may_go_on()) {
            bool polls = !stream->queue.empty() && stream->queue.front().ready;
            if (polls) stream->wake.wait_for(guard, kPoll);
            else stream->wake.wait(guard);
        }
        if (stream->queue.empty()) break;
        Operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        stream->running = true;
        if (stream->stalled && stream->steps > 0) stream->steps--;
        int result = perform(stream, operation, guard);
        record_execution(*stream, operation, result);
        stream->running = false;
        stream->completed = operation.seq;
        if (s.turn == stream.get()) s.turn = nullptr;
        s.last_activity_ns = now_ns();
        if (s.on && host_is_waiting()) choose_turn();
        if (!s.on)
            for (Stream *other : active_streams())
                if (!other->queue.empty()) other->wake.notify_all();
        world().changed.notify_all();
    }
    auto &active = active_streams();
    for (auto it = active.begin(); it != active.end(); ++it)
        if (*it == stream.get()) {
            active.erase(it);
            break;
        }
    stream->worker_started = false;
}

void start_worker(const StreamPtr &stream) {
    if (stream->worker_started) return;
    stream->worker_started = true;
    active_streams().push_back(stream.get());
    std::thread([stream] {
        pthread_setname_np(pthread_self(), "sim-stream");
        drain(stream);
    }).detach();
}

// Without this, work that the host waits for by other means (a flag set by a host function)
// would never run in shuffle mode, where only a waiting driver call drives the queues.
void tick() {
    Shuffle &s = shuffle();
    for (;;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        Guard guard(world().lock);
        if (!s.on) {
            s.ticker = false;
            return;
        }
        uint64_t quiet_ns = world().settings.quiet_ms * 1000000;
        if (quiet_ns && now_ns() - s.last_activity_ns > quiet_ns) choose_turn();
    }
}

} // namespace

StreamPtr make_stream(const ContextPtr &context, unsigned flags, int priority, bool legacy) {
    auto stream = std::make_shared<Stream>();
    stream->id = world().next_id++;
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->legacy = legacy;
    stream->stalled = stall_new_streams && !legacy;
    return stream;
}

StreamPtr per_thread_stream(const ContextPtr &context, uint64_t thread) {
    StreamPtr &slot = context->per_thread[thread];
    if (!slot) {
        slot = make_stream(context, CU_STREAM_DEFAULT, 0, false);
        slot->handle = CU_STREAM_PER_THREAD;
    }
    return slot;
}

std::vector<StreamPtr> streams_of(const Context &context) {
    std::vector<StreamPtr> found;
    if (context.legacy) found.push_back(context.legacy);
    for (const auto &[thread, stream] : context.per_thread) found.push_back(stream);
    for (const auto &[handle, stream] : world().streams.live())
        if (stream->context.get() == &context) found.push_back(stream);
    return found;
}

uint64_t enqueue(const StreamPtr &stream, Operation operation) {
    auto depend = [&](const StreamPtr &on) {
        if (on && on != stream && !on->idle()) operation.dependencies.push_back({on, on->submitted});
    };
    auto &awaited = stream->context->awaited;
    awaited.erase(std::remove_if(awaited.begin(), awaited.end(),
                                 [](const Dependency &d) { return d.stream->completed >= d.seq; }),
                  awaited.end());
    for (const Dependency &d : awaited) operation.dependencies.push_back(d);
    // The legacy stream waits for every blocking stream of its context, and they for it.
    if (stream->legacy) {
        for (const StreamPtr &other : streams_of(*stream->context))
            if (other->blocking()) depend(other);
    } else if (stream->blocking()) {
        depend(stream->context->legacy);
    }
    operation.seq = ++stream->submitted;
    uint64_t seq = operation.seq;
    stream->queue.push_back(std::move(operation));
    start_worker(stream);
    if (!shuffle().on) stream->wake.notify_all();
    else if (host_is_waiting()) choose_turn();
    return seq;
}

void retire_stream(const StreamPtr &stream) {
    stream->closing = true;
    // A destroyed stream cannot be resumed by its handle any more: let its work finish.
    stream->stalled = false;
    wake_streams();
    stream->wake.notify_all();
}

void host_wait(Guard &guard, const std::string &what, const std::function<bool()> &pred) {
    Shuffle &s = shuffle();
    auto limit = std::chrono::milliseconds(world().settings.timeout_ms);
    auto until = std::chrono::steady_clock::now() + limit;
    while (!pred()) {
        s.waits.push_back(&pred);
        choose_turn();
        std::cv_status status = world().changed.wait_until(guard, until);
        s.waits.erase(std::find(s.waits.begin(), s.waits.end(), &pred));
        if (status == std::cv_status::timeout && !pred()) {
            std::fprintf(stderr, "driver_sim: %s waited more than %llu ms\n%s", what.c_str(),
                         static_cast<unsigned long long>(world().settings.timeout_ms), describe_streams().c_str());
            std::abort();
        }
    }
}

void wait_for_stream(Guard &guard, const std::string &what, const StreamPtr &stream) {
    uint64_t seq = stream->submitted;
    host_wait(guard, what, [&] { return stream->completed >= seq; });
}

void wait_for_context(Guard &guard, const std::string &what, const ContextPtr &context) {
    // Streams destroyed with work still queued belong to the context's work too.
    std::vector<std::pair<StreamPtr, uint64_t>> all;
    for (const StreamPtr &stream : streams_of(*context)) all.emplace_back(stream, stream->submitted);
    host_wait(guard, what, [&] {
        for (const auto &[stream, seq] : all)
            if (stream->completed < seq) return false;
        for (const Stream *stream : active_streams())
            if (stream->closing && stream->context == context && !stream->idle()) return false;
        return true;
    });
}

void wait_for_device(Guard &guard, const std::string &what, int device) {
    std::vector<ContextPtr> mine;
    for (const auto &[handle, context] : world().contexts.live())
        if (context->alive && context->device == device) mine.push_back(context);
    for (const ContextPtr &context : mine)
        if (context->alive) wait_for_context(guard, what, context);
}

void note_activity() {
    if (shuffle().on) shuffle().last_activity_ns = now_ns();
}

void nudge_scheduler(Guard &guard) {
    Shuffle &s = shuffle();
    if (!s.on) return;
    choose_turn();
    // It has run when the question is answered, or the answer would not be the seed's. A host function
    // may block on the host, which must not wait for it.
    world().changed.wait_for(guard, std::chrono::milliseconds(50), [&] { return !s.on || !s.turn; });
}

void wake_streams() {
    if (shuffle().on) {
        if (host_is_waiting()) choose_turn();
        return;
    }
    for (Stream *stream : active_streams()) stream->wake.notify_all();
}

void start_shuffle(uint64_t seed) {
    Shuffle &s = shuffle();
    s.on = true;
    s.random.seed(seed);
    s.last_activity_ns = now_ns();
    if (!s.ticker) {
        s.ticker = true;
        std::thread([] { tick(); }).detach();
    }
}

void stop_shuffle() {
    shuffle().on = false;
    shuffle().turn = nullptr;
    for (Stream *stream : active_streams()) stream->wake.notify_all();
}

bool shuffling() { return shuffle().on; }

size_t draw(size_t n) { return shuffle().on ? shuffle().random() % n : 0; }

void mark_faulted(CUresult code, const std::string &why) {
    World &w = world();
    if (w.fault != CUDA_SUCCESS) return;
    w.fault = code;
    w.fault_why = why;
    violation("fault", why);
    world().changed.notify_all();
}

std::string describe_streams() {
    std::string out;
    for (const Stream *s : active_streams()) {
        if (s->idle()) continue;
        out += "  stream id " + std::to_string(s->id) + (s->legacy ? " (legacy)" : "") +
               (s->stalled ? " stalled" : "") + (s->running ? " running" : "") + ": " +
               std::to_string(s->submitted - s->completed) + " pending";
        if (!s->queue.empty()) {
            const Operation &front = s->queue.front();
            out += ", next " + front.kind + " " + front.detail;
            for (const Dependency &d : front.dependencies)
                if (d.stream->completed < d.seq) out += ", waits for stream id " + std::to_string(d.stream->id);
        }
        out += "\n";
    }
    return out;
}

} // namespace sim
