// Graphs: captured work that can be run again, and the user objects they keep.
#pragma once

#include "stream.h"

namespace sim {

struct UserObject {
    CUuserObject handle = nullptr;
    void *pointer = nullptr;
    CUhostFn destroy = nullptr;
    uint64_t references = 0;
};
using UserObjectPtr = std::shared_ptr<UserObject>;

struct GraphNode {
    CUgraphNode handle = nullptr;
    uint64_t id = 0;
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    std::vector<NodePtr> dependencies;
    Operation operation;
};

struct Graph {
    CUgraph handle = nullptr;
    uint64_t id = 0;
    ContextPtr context;
    std::vector<NodePtr> nodes; // in the order of their making: a topological order
    std::map<UserObjectPtr, uint64_t> user_objects;
};

struct GraphExec {
    CUgraphExec handle = nullptr;
    uint64_t id = 0;
    ContextPtr context;
    std::vector<NodePtr> nodes;
    std::map<UserObjectPtr, uint64_t> user_objects;
    StreamPtr last_stream; // a launch of the same exec waits for the one before
    uint64_t last_seq = 0;
};

GraphPtr make_graph(const ContextPtr &context);
NodePtr add_node(const GraphPtr &graph, CUgraphNodeType type, std::vector<NodePtr> dependencies, Operation operation);
void release_user_object(const UserObjectPtr &object, uint64_t count);
// Runs a callback on a thread of the driver, without the world's lock, later.
void run_on_driver_thread(std::function<void()> callback);

} // namespace sim
