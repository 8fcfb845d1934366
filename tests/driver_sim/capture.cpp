#include "capture.h"

#include <cstring>

#include "event.h"

namespace sim {

void invalidate(Capture &capture, const char *why) {
    if (capture.invalidated) return;
    capture.invalidated = true;
    violation("capture invalidated", why, capture.id);
}

bool is_open(const Capture &capture) {
    for (const auto &open : world().captures)
        if (open.get() == &capture) return true;
    return false;
}

bool capture_forbids_unsafe_call(const ThreadState &thread, const char *name) {
    if (thread.capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    bool forbidden = false;
    for (const auto &capture : world().captures) {
        if (capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED) continue;
        bool mine = capture->thread == thread.number;
        bool seen = mine || (thread.capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                             capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
        if (!seen) continue;
        invalidate(*capture, name);
        forbidden = true;
    }
    return forbidden;
}

bool invalidate_captures_in(const ContextPtr &context, const char *why) {
    bool any = false;
    for (const auto &capture : world().captures)
        for (const StreamPtr &member : capture->members)
            if (member->context == context) {
                invalidate(*capture, why);
                any = true;
            }
    return any;
}

namespace {

void finish_capture(const std::shared_ptr<Capture> &capture) {
    for (const StreamPtr &member : capture->members) {
        member->capture.reset();
        member->capture_tail.clear();
    }
    capture->members.clear();
    auto &all = world().captures;
    for (auto it = all.begin(); it != all.end(); ++it)
        if (*it == capture) {
            all.erase(it);
            break;
        }
}

void collect_ancestors(const NodePtr &node, std::set<NodePtr> &seen) {
    if (!seen.insert(node).second) return;
    for (const NodePtr &before : node->dependencies) collect_ancestors(before, seen);
}

bool has_unjoined_work(const Capture &capture) {
    std::set<NodePtr> reached;
    for (const NodePtr &node : capture.origin->capture_tail) collect_ancestors(node, reached);
    for (const StreamPtr &member : capture.members)
        for (const NodePtr &node : member->capture_tail)
            if (!reached.count(node)) return true;
    return false;
}

} // namespace

void abandon_captures_of(const ContextPtr &context) {
    for (;;) {
        std::shared_ptr<Capture> doomed;
        for (const auto &capture : world().captures)
            if (capture->origin->context == context) doomed = capture;
        if (!doomed) return;
        finish_capture(doomed);
        if (!doomed->graph_is_given) drop_graph(doomed->graph);
    }
}

void refuse_if_capturing(Call &call, const StreamPtr &stream) {
    if (!stream->capture) return;
    invalidate(*stream->capture, call.name());
    throw Fail{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED};
}

void refuse_implicit_dependency(Call &call, const StreamPtr &stream) {
    if (!stream->legacy) return;
    bool found = false;
    for (const auto &capture : world().captures)
        for (const StreamPtr &member : capture->members)
            if (member->context == stream->context && member->blocking()) {
                invalidate(*capture, call.name());
                found = true;
            }
    if (found) throw Fail{CUDA_ERROR_STREAM_CAPTURE_IMPLICIT};
}

void refuse_if_faulted(Call &call, const StreamPtr &stream) {
    if (stream->faulted) call.notice_fault();
}

uint64_t submit(Call &call, const StreamPtr &stream, CUgraphNodeType type, Operation operation) {
    if (operation.kind.empty()) operation.kind = call.name();
    call.record.nbytes = operation.nbytes;
    if (call.record.kind.empty()) call.record.kind = operation.detail;
    if (stream->capture) {
        if (stream->capture->invalidated) throw Fail{CUDA_ERROR_STREAM_CAPTURE_INVALIDATED};
        call.record.note = "captured";
        operation.context = stream->context;
        NodePtr node = add_node(stream->capture->graph, type, stream->capture_tail, std::move(operation));
        stream->capture_tail = {node};
        return 0;
    }
    refuse_if_faulted(call, stream);
    refuse_implicit_dependency(call, stream);
    return enqueue(stream, std::move(operation));
}

} // namespace sim

using namespace sim;

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    return entry("cuThreadExchangeStreamCaptureMode", kInit, [&](Call &call) {
        if (!mode) violation(call.name(), "nowhere to read the mode from");
        static_assert(sizeof(int) == sizeof *mode, "the mode is read as a number: the driver takes any");
        int wanted = 0;
        std::memcpy(&wanted, &require(mode), sizeof wanted);
        if (wanted < CU_STREAM_CAPTURE_MODE_GLOBAL || wanted > CU_STREAM_CAPTURE_MODE_RELAXED)
            violation(call.name(), "no capture mode: " + std::to_string(wanted));
        std::swap(this_thread().capture_mode, wanted);
        std::memcpy(mode, &wanted, sizeof wanted);
    });
}

namespace {

void begin_capture(Call &call, CUstream handle, CUstreamCaptureMode mode, GraphPtr graph, std::vector<NodePtr> tail) {
    StreamPtr stream = call.stream(handle);
    if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    if (stream->legacy) throw Fail{CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED};
    if (stream->capture) throw Fail{CUDA_ERROR_ILLEGAL_STATE};
    auto capture = std::make_shared<Capture>();
    capture->id = world().next_id++;
    capture->mode = mode;
    capture->thread = this_thread().number;
    capture->origin = stream;
    capture->members.insert(stream);
    capture->graph_is_given = graph != nullptr;
    capture->graph = graph ? std::move(graph) : make_graph(stream->context);
    stream->capture = capture;
    stream->capture_tail = std::move(tail);
    world().captures.push_back(capture);
}

} // namespace

CUresult CUDAAPI cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    return entry("cuStreamBeginCapture", kHealthy, [&](Call &call) { begin_capture(call, handle, mode, nullptr, {}); });
}

CUresult CUDAAPI cuStreamBeginCaptureToGraph(CUstream handle, CUgraph graph_handle, const CUgraphNode *dependencies,
                                             const CUgraphEdgeData *, size_t count, CUstreamCaptureMode mode) {
    return entry("cuStreamBeginCaptureToGraph", kContext, [&](Call &call) {
        GraphPtr graph = find_graph(call, graph_handle);
        begin_capture(call, handle, mode, graph, find_nodes(dependencies, count));
    });
}

CUresult CUDAAPI cuStreamEndCapture(CUstream handle, CUgraph *out) {
    return entry("cuStreamEndCapture", kHealthy, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        if (out) *out = nullptr;
        std::shared_ptr<Capture> capture = stream->capture;
        if (!capture) throw Fail{CUDA_ERROR_ILLEGAL_STATE};
        if (capture->origin != stream) {
            invalidate(*capture, "ended in another stream than it began");
            throw Fail{CUDA_ERROR_STREAM_CAPTURE_UNMATCHED};
        }
        bool dead = capture->invalidated;
        bool unjoined = !dead && has_unjoined_work(*capture);
        // Of another thread: refused, and ended all the same.
        bool wrong = capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != this_thread().number;
        GraphPtr graph = capture->graph;
        finish_capture(capture);
        if ((dead || unjoined || wrong || !out) && !capture->graph_is_given) drop_graph(graph);
        if (wrong) throw Fail{CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD};
        if (dead) throw Fail{CUDA_ERROR_STREAM_CAPTURE_INVALIDATED};
        if (unjoined) throw Fail{CUDA_ERROR_STREAM_CAPTURE_UNJOINED};
        if (!out) return;
        // It has a handle already if somebody asked for it meanwhile, or gave it.
        if (!graph->handle) graph->handle = reinterpret_cast<CUgraph>(world().graphs.add(graph));
        *out = graph->handle;
        call.record.handle = reinterpret_cast<uint64_t>(*out);
    });
}

namespace {

CUstreamCaptureStatus status_of(const Stream &stream) {
    if (!stream.capture) return CU_STREAM_CAPTURE_STATUS_NONE;
    return stream.capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

// Asking about the legacy stream is refused while a blocking stream captures, and kills nothing.
void refuse_legacy_question(const StreamPtr &stream) {
    if (!stream->legacy) return;
    for (const auto &capture : world().captures)
        for (const StreamPtr &member : capture->members)
            if (member->context == stream->context && member->blocking())
                throw Fail{CUDA_ERROR_STREAM_CAPTURE_IMPLICIT};
}

} // namespace

CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
    return entry("cuStreamIsCapturing", kInit | kUnrefused, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        refuse_legacy_question(stream);
        require(status) = status_of(*stream);
    });
}

CUresult CUDAAPI cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                        const CUgraphNode **nodes, const CUgraphEdgeData **edges, size_t *count) {
    return entry("cuStreamGetCaptureInfo", kInit, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        refuse_legacy_question(stream);
        require(status) = status_of(*stream);
        if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return;
        Capture &capture = *stream->capture;
        if (id) *id = capture.id;
        if (graph) {
            // The graph under construction is visible, and lives until the capture ends.
            if (!capture.graph->handle)
                capture.graph->handle = reinterpret_cast<CUgraph>(world().graphs.add(capture.graph));
            *graph = capture.graph->handle;
        }
        if (nodes) {
            static thread_local std::vector<CUgraphNode> handles;
            handles.clear();
            for (const NodePtr &node : stream->capture_tail) handles.push_back(node->handle);
            *nodes = handles.data();
        }
        if (edges) {
            static thread_local std::vector<CUgraphEdgeData> plain;
            plain.assign(stream->capture_tail.size(), CUgraphEdgeData{});
            *edges = plain.data();
        }
        if (count) *count = stream->capture_tail.size();
    });
}

CUresult CUDAAPI cuStreamUpdateCaptureDependencies(CUstream handle, CUgraphNode *nodes, const CUgraphEdgeData *,
                                                   size_t count, unsigned flags) {
    return entry("cuStreamUpdateCaptureDependencies", kContext, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        if (!stream->capture) throw Fail{CUDA_ERROR_ILLEGAL_STATE};
        if (stream->capture->invalidated) throw Fail{CUDA_ERROR_STREAM_CAPTURE_INVALIDATED};
        if (flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES) throw Fail{CUDA_ERROR_INVALID_VALUE};
        std::vector<NodePtr> wanted = find_nodes(nodes, count);
        if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) stream->capture_tail.clear();
        for (const NodePtr &node : wanted) stream->capture_tail.push_back(node);
    });
}
