// Stream capture: what it records, what it forbids, and how it dies.
#pragma once

#include "call.h"
#include "graph.h"
#include "stream.h"

namespace sim {

struct Capture {
    uint64_t id = 0;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    uint64_t thread = 0; // that began it
    StreamPtr origin;
    std::set<StreamPtr> members;
    GraphPtr graph;
    bool graph_is_given = false; // by the caller, who keeps it
    bool invalidated = false;
};

// Puts work on a stream, or into its graph while it captures. Returns the sequence number, 0 for
// captured work. Throws Fail for an invalidated capture or a forbidden implicit dependency.
uint64_t submit(Call &call, const StreamPtr &stream, CUgraphNodeType type, Operation operation);

// True if this thread may not make a potentially unsafe call now; the captures in its way die.
bool capture_forbids_unsafe_call(const ThreadState &thread, const char *name);
// Kills every capture with a stream in the context; true if there was one.
bool invalidate_captures_in(const ContextPtr &context, const char *why);
void invalidate(Capture &capture, const char *why);
bool is_open(const Capture &capture); // not ended, though it may be invalid
// Forgets captures whose streams are going away.
void abandon_captures_of(const ContextPtr &context);
// A call that reads or waits for a capturing stream: throws 900 and kills the capture.
void refuse_if_capturing(Call &call, const StreamPtr &stream);
// New work behind a fault of its stream: throws its error.
void refuse_if_faulted(Call &call, const StreamPtr &stream);
// The legacy stream may not be used while a blocking stream of its context captures.
void refuse_implicit_dependency(Call &call, const StreamPtr &stream);

} // namespace sim
