// Graphs: nodes of captured or described work, and executables made of them.
#pragma once

#include "call.h"
#include "stream.h"

namespace sim {

struct UserObject {
    CUuserObject handle = nullptr;
    void *pointer = nullptr;
    CUhostFn destroy = nullptr;
    uint64_t references = 0;
};
using UserObjectPtr = std::shared_ptr<UserObject>;
using UserObjects = std::map<UserObjectPtr, uint64_t>;

// Memory of an allocation node: its address is the graph's until the last node that names it is gone.
struct GraphMemory {
    AllocationPtr allocation;
};

struct GraphNode {
    CUgraphNode handle = nullptr; // in an executable: that of the node it was made from
    uint64_t id = 0;
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    std::vector<NodePtr> dependencies;
    Operation operation;
    std::shared_ptr<GraphMemory> memory; // that it allocates
    AllocationPtr frees;
    bool enabled = true;
    std::vector<NodePtr> children;          // of a graph within the graph
    std::vector<void *> parameter_pointers; // as cuGraphKernelNodeGetParams gives them out
};

struct Graph {
    CUgraph handle = nullptr;
    uint64_t id = 0;
    ContextPtr context;
    std::vector<NodePtr> nodes; // in the order of their making: a topological order
    UserObjects user_objects;
};

struct GraphExec {
    CUgraphExec handle = nullptr;
    uint64_t id = 0;
    ContextPtr context;
    unsigned long long flags = 0;
    std::vector<NodePtr> nodes;
    UserObjects user_objects;
    StreamPtr last_stream; // a launch of the same exec waits for the one before
    uint64_t last_seq = 0;
};

GraphPtr make_graph(const ContextPtr &context);
NodePtr add_node(const GraphPtr &graph, CUgraphNodeType type, std::vector<NodePtr> dependencies, Operation operation);
void drop_graph(const GraphPtr &graph); // with its handles
GraphPtr find_graph(Call &call, CUgraph handle);
NodePtr find_node(CUgraphNode handle);
std::vector<NodePtr> find_nodes(const CUgraphNode *handles, size_t count);

// New work of a kernel node, from the description that callers give. Throws Fail.
Operation kernel_node_work(Call &call, const CUDA_KERNEL_NODE_PARAMS *params);

UserObjectPtr find_object(CUuserObject handle); // throws Fail
void release_user_object(const UserObjectPtr &object, uint64_t count);
void release_all(UserObjects &objects);
// Runs a callback on a thread of the driver, without the world's lock, later.
void run_on_driver_thread(std::function<void()> callback);

// Memory that graphs allocate (graph_memory.cpp).
std::shared_ptr<GraphMemory> make_graph_memory(const PoolPtr &pool, size_t nbytes);
// Gives back what no node names any more and no launch has left allocated.
void reap_graph_memory();

} // namespace sim
