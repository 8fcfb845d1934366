// Memory that graphs allocate: taken when the node is made, live from launch to free.
#include <algorithm>

#include "graph.h"
#include "memory.h"
#include "pool.h"

namespace sim {

std::shared_ptr<GraphMemory> make_graph_memory(const PoolPtr &pool, size_t nbytes) {
    auto memory = std::make_shared<GraphMemory>();
    World &w = world();
    memory->allocation = allocate_device(*w.devices[pool->device], nbytes);
    memory->allocation->kind = MemoryKind::pool;
    memory->allocation->pool = pool;
    memory->allocation->from_graph = true;
    w.host_view[memory->allocation->base] = memory->allocation;
    w.graph_memory.emplace_back(memory, memory->allocation);
    return memory;
}

void reap_graph_memory() {
    World &w = world();
    if (w.graph_memory.empty()) return;
    auto unused = [&](const auto &entry) {
        const auto &[nodes, allocation] = entry;
        auto known = w.host_view.find(allocation->base);
        if (known == w.host_view.end() || known->second != allocation) return true; // gone with its context
        if (!nodes.expired() || allocation->graph_live || allocation->graph_frees) return false;
        w.host_view.erase(known);
        w.device_view.erase(allocation->base);
        release_device(*w.devices[allocation->device], allocation);
        return true;
    };
    w.graph_memory.erase(std::remove_if(w.graph_memory.begin(), w.graph_memory.end(), unused), w.graph_memory.end());
}

} // namespace sim
