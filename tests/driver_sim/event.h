// Events: a record is a place in a stream; the event is complete when the stream passed it.
#pragma once

#include "world.h"

namespace sim {

struct Marker {
    StreamPtr stream;
    uint64_t seq = 0;
    uint64_t done_ns = 0;
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

} // namespace sim
