#include "graph.h"

#include <algorithm>

#include "capture.h"
#include "launch.h"
#include "module.h"

namespace sim {

GraphPtr make_graph(const ContextPtr &context) {
    auto graph = std::make_shared<Graph>();
    graph->id = world().next_id++;
    graph->context = context;
    return graph;
}

NodePtr add_node(const GraphPtr &graph, CUgraphNodeType type, std::vector<NodePtr> dependencies, Operation operation) {
    auto node = std::make_shared<GraphNode>();
    node->id = world().next_id++;
    node->type = type;
    node->dependencies = std::move(dependencies);
    node->operation = std::move(operation);
    node->handle = reinterpret_cast<CUgraphNode>(world().graph_nodes.add(node));
    graph->nodes.push_back(node);
    return node;
}

void drop_graph(const GraphPtr &graph) {
    if (graph->handle) world().graphs.remove(graph->handle);
    for (const NodePtr &node : graph->nodes) world().graph_nodes.remove(node->handle);
    release_all(graph->user_objects);
}

GraphPtr find_graph(Call &call, CUgraph handle) {
    call.record.handle = reinterpret_cast<uint64_t>(handle);
    GraphPtr graph = world().graphs.find(handle);
    if (!graph) {
        if (world().graphs.was_destroyed(handle)) violation(call.name(), "graph was destroyed", call.record.handle);
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
    return graph;
}

NodePtr find_node(CUgraphNode handle) {
    NodePtr node = world().graph_nodes.find(handle);
    if (!node) throw Fail{CUDA_ERROR_INVALID_VALUE};
    return node;
}

std::vector<NodePtr> find_nodes(const CUgraphNode *handles, size_t count) {
    std::vector<NodePtr> found;
    if (count && !handles) throw Fail{CUDA_ERROR_INVALID_VALUE};
    for (size_t i = 0; i < count; ++i) found.push_back(find_node(handles[i]));
    return found;
}

Operation kernel_node_work(Call &call, const CUDA_KERNEL_NODE_PARAMS *params) {
    const CUDA_KERNEL_NODE_PARAMS &p = require(params);
    ContextPtr context = call.context_ptr();
    if (!p.func && p.ctx) context = world().contexts.find(p.ctx);
    if (!context) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
    FunctionPtr f = find_function(call, p.func ? p.func : reinterpret_cast<CUfunction>(p.kern), context);
    LaunchShape shape{{p.gridDimX, p.gridDimY, p.gridDimZ},
                      {p.blockDimX, p.blockDimY, p.blockDimZ},
                      {0, 0, 0},
                      p.sharedMemBytes,
                      false};
    Operation operation = prepare_launch(call, f, shape, p.kernelParams, p.extra);
    operation.context = f->context;
    return operation;
}

namespace {

// The way of every call that lists handles: a count alone, or as many as there is room for.
void list_handles(const std::vector<CUgraphNode> &all, CUgraphNode *out, size_t *count) {
    size_t room = require(count);
    if (!out) {
        *count = all.size();
        return;
    }
    for (size_t i = 0; i < room; ++i) out[i] = i < all.size() ? all[i] : nullptr;
    *count = std::min(room, all.size());
}

std::vector<CUgraphNode> handles_of(const std::vector<NodePtr> &nodes) {
    std::vector<CUgraphNode> handles;
    for (const NodePtr &node : nodes) handles.push_back(node->handle);
    return handles;
}

void clear_edge_data(CUgraphEdgeData *data, size_t count) {
    for (size_t i = 0; data && i < count; ++i) data[i] = CUgraphEdgeData{};
}

NodePtr kernel_node(CUgraphNode handle) {
    NodePtr node = find_node(handle);
    if (node->type != CU_GRAPH_NODE_TYPE_KERNEL) throw Fail{CUDA_ERROR_INVALID_VALUE};
    return node;
}

GraphPtr graph_of(const NodePtr &node) {
    for (const auto &[handle, graph] : world().graphs.live())
        if (std::find(graph->nodes.begin(), graph->nodes.end(), node) != graph->nodes.end()) return graph;
    throw Fail{CUDA_ERROR_INVALID_VALUE};
}

CUgraphNode describe_node(Call &call, CUgraph graph, CUgraphNodeType type, const CUgraphNode *dependencies,
                          size_t count, Operation operation) {
    GraphPtr holder = find_graph(call, graph);
    std::vector<NodePtr> before = find_nodes(dependencies, count);
    for (const NodePtr &node : before)
        if (graph_of(node) != holder) throw Fail{CUDA_ERROR_INVALID_VALUE};
    return add_node(holder, type, std::move(before), std::move(operation))->handle;
}

} // namespace
} // namespace sim

using namespace sim;

CUresult CUDAAPI cuGraphCreate(CUgraph *out, unsigned flags) {
    return entry("cuGraphCreate", kInit, [&](Call &call) {
        require(out);
        if (flags) throw Fail{CUDA_ERROR_INVALID_VALUE};
        GraphPtr graph = make_graph(call.context_ptr());
        graph->handle = reinterpret_cast<CUgraph>(world().graphs.add(graph));
        *out = graph->handle;
        call.record.handle = reinterpret_cast<uint64_t>(*out);
    });
}

CUresult CUDAAPI cuGraphDestroy(CUgraph handle) {
    return entry("cuGraphDestroy", kInit, [&](Call &call) { drop_graph(find_graph(call, handle)); });
}

CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                      const CUDA_KERNEL_NODE_PARAMS *params) {
    return entry("cuGraphAddKernelNode", kContext, [&](Call &call) {
        Operation work = kernel_node_work(call, params);
        require(out) = describe_node(call, graph, CU_GRAPH_NODE_TYPE_KERNEL, dependencies, count, std::move(work));
    });
}

CUresult CUDAAPI cuGraphAddHostNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                    const CUDA_HOST_NODE_PARAMS *params) {
    return entry("cuGraphAddHostNode", kInit, [&](Call &call) {
        CUDA_HOST_NODE_PARAMS p = require(params);
        if (!p.fn) throw Fail{CUDA_ERROR_INVALID_VALUE};
        require(out) =
            describe_node(call, graph, CU_GRAPH_NODE_TYPE_HOST, dependencies, count, host_function(p.fn, p.userData));
    });
}

CUresult CUDAAPI cuGraphAddEmptyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *dependencies, size_t count) {
    return entry("cuGraphAddEmptyNode", kInit, [&](Call &call) {
        require(out) = describe_node(call, graph, CU_GRAPH_NODE_TYPE_EMPTY, dependencies, count, Operation{"empty"});
    });
}

CUresult CUDAAPI cuGraphKernelNodeGetParams(CUgraphNode handle, CUDA_KERNEL_NODE_PARAMS *params) {
    return entry("cuGraphKernelNodeGetParams", kInit, [&](Call &) {
        NodePtr node = kernel_node(handle);
        KernelLaunch &launch = *node->operation.kernel;
        node->parameter_pointers.clear();
        for (const Parameter &parameter : launch.function->entry.parameters)
            node->parameter_pointers.push_back(launch.bytes.data() + parameter.offset);
        CUDA_KERNEL_NODE_PARAMS &p = require(params) = CUDA_KERNEL_NODE_PARAMS{};
        p.func = launch.function->handle;
        p.gridDimX = launch.shape.grid[0];
        p.gridDimY = launch.shape.grid[1];
        p.gridDimZ = launch.shape.grid[2];
        p.blockDimX = launch.shape.block[0];
        p.blockDimY = launch.shape.block[1];
        p.blockDimZ = launch.shape.block[2];
        p.sharedMemBytes = launch.shape.shared;
        p.kernelParams = node->parameter_pointers.empty() ? nullptr : node->parameter_pointers.data();
    });
}

CUresult CUDAAPI cuGraphKernelNodeSetParams(CUgraphNode handle, const CUDA_KERNEL_NODE_PARAMS *params) {
    return entry("cuGraphKernelNodeSetParams", kContext, [&](Call &call) {
        NodePtr node = kernel_node(handle);
        node->operation = kernel_node_work(call, params);
    });
}

CUresult CUDAAPI cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType *type) {
    return entry("cuGraphNodeGetType", kInit, [&](Call &) { require(type) = find_node(handle)->type; });
}

CUresult CUDAAPI cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    return entry("cuGraphGetNodes", kInit,
                 [&](Call &call) { list_handles(handles_of(find_graph(call, handle)->nodes), nodes, count); });
}

CUresult CUDAAPI cuGraphGetRootNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    return entry("cuGraphGetRootNodes", kInit, [&](Call &call) {
        std::vector<CUgraphNode> roots;
        for (const NodePtr &node : find_graph(call, handle)->nodes)
            if (node->dependencies.empty()) roots.push_back(node->handle);
        list_handles(roots, nodes, count);
    });
}

CUresult CUDAAPI cuGraphGetEdges(CUgraph handle, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data,
                                 size_t *count) {
    return entry("cuGraphGetEdges", kInit, [&](Call &call) {
        std::vector<CUgraphNode> begins, ends;
        for (const NodePtr &node : find_graph(call, handle)->nodes)
            for (const NodePtr &before : node->dependencies) {
                begins.push_back(before->handle);
                ends.push_back(node->handle);
            }
        if ((from == nullptr) != (to == nullptr)) throw Fail{CUDA_ERROR_INVALID_VALUE};
        size_t room = require(count);
        list_handles(begins, from, count);
        list_handles(ends, to, &room);
        clear_edge_data(data, *count);
    });
}

CUresult CUDAAPI cuGraphNodeGetDependencies(CUgraphNode handle, CUgraphNode *nodes, CUgraphEdgeData *data,
                                            size_t *count) {
    return entry("cuGraphNodeGetDependencies", kInit, [&](Call &) {
        list_handles(handles_of(find_node(handle)->dependencies), nodes, count);
        clear_edge_data(data, nodes ? *count : 0);
    });
}

CUresult CUDAAPI cuGraphNodeGetDependentNodes(CUgraphNode handle, CUgraphNode *nodes, CUgraphEdgeData *data,
                                              size_t *count) {
    return entry("cuGraphNodeGetDependentNodes", kInit, [&](Call &) {
        NodePtr wanted = find_node(handle);
        std::vector<CUgraphNode> found;
        for (const NodePtr &node : graph_of(wanted)->nodes)
            if (std::count(node->dependencies.begin(), node->dependencies.end(), wanted)) found.push_back(node->handle);
        list_handles(found, nodes, count);
        clear_edge_data(data, nodes ? *count : 0);
    });
}

CUresult CUDAAPI cuGraphRetainUserObject(CUgraph graph, CUuserObject handle, unsigned count, unsigned flags) {
    return entry("cuGraphRetainUserObject", kInit, [&](Call &call) {
        GraphPtr holder = find_graph(call, graph);
        UserObjectPtr object = find_object(handle);
        if (count == 0 || (flags & ~unsigned{CU_GRAPH_USER_OBJECT_MOVE})) throw Fail{CUDA_ERROR_INVALID_VALUE};
        holder->user_objects[object] += count;
        if (!(flags & CU_GRAPH_USER_OBJECT_MOVE)) object->references += count;
    });
}

CUresult CUDAAPI cuGraphReleaseUserObject(CUgraph graph, CUuserObject handle, unsigned count) {
    return entry("cuGraphReleaseUserObject", kInit, [&](Call &call) {
        GraphPtr holder = find_graph(call, graph);
        UserObjectPtr object = find_object(handle);
        auto it = holder->user_objects.find(object);
        if (it == holder->user_objects.end()) throw Fail{CUDA_ERROR_INVALID_VALUE};
        if (it->second < count) violation(call.name(), "the graph holds fewer references");
        it->second -= std::min<uint64_t>(count, it->second);
        if (!it->second) holder->user_objects.erase(it);
        release_user_object(object, count);
    });
}
