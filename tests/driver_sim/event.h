// Events: a record is a place in a stream; the event is complete when the stream passed it.
#pragma once

#include "stream.h"

namespace sim {

struct Marker {
    StreamPtr stream;
    uint64_t seq = 0;
    uint64_t done_ns = 0;
    std::map<uint64_t, uint64_t> ordered_after; // of its stream, when it was recorded
    // Recorded inside a capture: a set of nodes, not a place in time.
    std::shared_ptr<Capture> capture;
    std::vector<NodePtr> nodes;
};

struct Event {
    CUevent handle = nullptr;
    uint64_t id = 0;
    ContextPtr context;
    unsigned flags = 0;
    std::shared_ptr<Marker> marker; // null until recorded
};

bool is_complete(const Event &event);
// Work that notes when the marker's place was passed.
Operation record_operation(const std::shared_ptr<Marker> &marker);

} // namespace sim
