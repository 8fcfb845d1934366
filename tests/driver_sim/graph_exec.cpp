// Executable graphs: instantiation, launches, and changes afterwards.
#include <algorithm>

#include "capture.h"
#include "event.h"
#include "graph.h"
#include "launch.h"
#include "memory.h"
#include "module.h"
#include "pool.h"

namespace sim {
namespace {

std::shared_ptr<GraphExec> find_exec(Call &call, CUgraphExec handle) {
    call.record.handle = reinterpret_cast<uint64_t>(handle);
    auto exec = world().graph_execs.find(handle);
    if (!exec) {
        if (world().graph_execs.was_destroyed(handle))
            violation(call.name(), "graph exec was destroyed", call.record.handle);
        throw Fail{CUDA_ERROR_INVALID_VALUE};
    }
    return exec;
}

NodePtr node_of(const GraphExec &exec, CUgraphNode handle) {
    for (const NodePtr &node : exec.nodes)
        if (node->handle == handle) return node;
    throw Fail{CUDA_ERROR_INVALID_VALUE};
}

size_t index_of(const std::vector<NodePtr> &nodes, const NodePtr &node) {
    return static_cast<size_t>(std::find(nodes.begin(), nodes.end(), node) - nodes.begin());
}

// Nodes of the executable's own: changes of the graph do not reach them, nor theirs the graph.
std::vector<NodePtr> clone(const std::vector<NodePtr> &nodes) {
    std::vector<NodePtr> clones;
    for (const NodePtr &node : nodes) {
        auto copy = std::make_shared<GraphNode>(*node);
        for (NodePtr &before : copy->dependencies) before = clones.at(index_of(nodes, before));
        clones.push_back(std::move(copy));
    }
    return clones;
}

bool is_instantiated(const std::shared_ptr<GraphMemory> &memory) {
    for (const auto &[handle, exec] : world().graph_execs.live())
        for (const NodePtr &node : exec->nodes)
            if (node->memory == memory) return true;
    return false;
}

void instantiate(Call &call, CUgraphExec *out, CUgraph handle, unsigned long long flags) {
    GraphPtr graph = find_graph(call, handle);
    require(out);
    constexpr unsigned long long kKnown =
        CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD |
        CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
    if (flags & ~kKnown) throw Fail{CUDA_ERROR_INVALID_VALUE};
    for (const auto &capture : world().captures)
        if (capture->graph == graph) throw Fail{CUDA_ERROR_INVALID_VALUE};
    for (const NodePtr &node : graph->nodes)
        if (node->memory && is_instantiated(node->memory)) throw Fail{CUDA_ERROR_NOT_SUPPORTED};
    auto exec = std::make_shared<GraphExec>();
    exec->id = world().next_id++;
    exec->context = graph->context;
    exec->flags = flags;
    exec->nodes = clone(graph->nodes);
    exec->user_objects = graph->user_objects;
    for (const auto &[object, count] : exec->user_objects) object->references += count;
    exec->handle = reinterpret_cast<CUgraphExec>(world().graph_execs.add(exec));
    *out = exec->handle;
}

// One of the orders that the edges allow: that of their making, or one drawn from the seed. The work of
// a graph runs one node after the other, so a missing edge shows in some orders.
std::vector<NodePtr> order_of(const std::vector<NodePtr> &nodes) {
    if (!shuffling()) return nodes;
    std::vector<NodePtr> order, waiting = nodes;
    std::set<NodePtr> done;
    while (!waiting.empty()) {
        std::vector<size_t> ready;
        for (size_t i = 0; i < waiting.size(); ++i) {
            const auto &before = waiting[i]->dependencies;
            if (std::all_of(before.begin(), before.end(), [&](const NodePtr &n) { return done.count(n) != 0; }))
                ready.push_back(i);
        }
        auto next = waiting.begin() + static_cast<long>(ready.at(draw(ready.size())));
        done.insert(*next);
        order.push_back(*next);
        waiting.erase(next);
    }
    return order;
}

void check_memory(const std::vector<NodePtr> &nodes) {
    for (const NodePtr &node : nodes) {
        if (node->memory && node->memory->allocation->graph_live) throw Fail{CUDA_ERROR_INVALID_VALUE};
        check_memory(node->children);
    }
}

void free_leftovers(const std::vector<NodePtr> &nodes, const StreamPtr &stream) {
    for (const NodePtr &node : nodes) {
        if (!node->memory || !node->memory->allocation->graph_live) continue;
        const AllocationPtr &allocation = node->memory->allocation;
        note_freed(allocation, stream, enqueue(stream, free_work(allocation)));
    }
}

void enqueue_node(const StreamPtr &stream, const NodePtr &node) {
    if (!node->enabled) return;
    Operation operation = node->operation;
    std::shared_ptr<Marker> marker;
    if (node->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
        marker = std::make_shared<Marker>();
        marker->stream = stream;
        operation.work = record_operation(marker).work;
    } else if (node->type == CU_GRAPH_NODE_TYPE_WAIT_EVENT && operation.event->marker &&
               !is_complete(*operation.event)) {
        operation.dependencies.push_back({operation.event->marker->stream, operation.event->marker->seq});
    }
    if (node->memory) node->memory->allocation->graph_live = true;
    EventPtr event = std::move(operation.event);
    uint64_t seq = enqueue(stream, std::move(operation));
    if (marker) {
        marker->seq = seq;
        event->marker = marker;
    }
    if (node->frees) note_freed(node->frees, stream, seq);
}

void enqueue_nodes(const StreamPtr &stream, const std::vector<NodePtr> &nodes) {
    for (const NodePtr &node : order_of(nodes)) {
        if (node->children.empty()) enqueue_node(stream, node);
        else enqueue_nodes(stream, node->children);
    }
}

// What an update may not change.
CUgraphExecUpdateResult compare_nodes(const GraphNode &old, const GraphNode &now) {
    if (old.type != now.type) return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
    if (old.memory || old.frees) return CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
    if (old.type == CU_GRAPH_NODE_TYPE_KERNEL) {
        const KernelLaunch &before = *old.operation.kernel, &after = *now.operation.kernel;
        if (before.function->context != after.function->context)
            return CU_GRAPH_EXEC_UPDATE_ERROR_UNSUPPORTED_FUNCTION_CHANGE;
        if (before.shape.cooperative != after.shape.cooperative) return CU_GRAPH_EXEC_UPDATE_ERROR_ATTRIBUTES_CHANGED;
    }
    // Directions of copies; other work has no detail of its own.
    if (old.type == CU_GRAPH_NODE_TYPE_MEMCPY && old.operation.detail != now.operation.detail)
        return CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED;
    return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

CUgraphExecUpdateResult compare_graphs(const GraphExec &exec, const Graph &graph, CUgraphNode *at) {
    if (exec.nodes.size() != graph.nodes.size()) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
        const GraphNode &old = *exec.nodes[i], &now = *graph.nodes[i];
        *at = now.handle;
        bool same = old.dependencies.size() == now.dependencies.size();
        for (size_t k = 0; same && k < now.dependencies.size(); ++k)
            same = index_of(exec.nodes, old.dependencies[k]) == index_of(graph.nodes, now.dependencies[k]);
        if (!same) return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        CUgraphExecUpdateResult result = compare_nodes(old, now);
        if (result != CU_GRAPH_EXEC_UPDATE_SUCCESS) return result;
    }
    *at = nullptr;
    return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

} // namespace
} // namespace sim

using namespace sim;

CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
    return entry("cuGraphInstantiate", kContext, [&](Call &call) { instantiate(call, out, graph, flags); });
}

CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    return entry("cuGraphInstantiateWithParams", kContext, [&](Call &call) {
        instantiate(call, out, graph, require(params).flags);
        params->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
        params->hErrNode_out = nullptr;
    });
}

CUresult CUDAAPI cuGraphExecGetFlags(CUgraphExec handle, cuuint64_t *flags) {
    return entry("cuGraphExecGetFlags", kInit, [&](Call &call) { require(flags) = find_exec(call, handle)->flags; });
}

CUresult CUDAAPI cuGraphUpload(CUgraphExec handle, CUstream stream) {
    return entry("cuGraphUpload", kContext, [&](Call &call) {
        find_exec(call, handle);
        call.stream(stream);
    });
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
    return entry("cuGraphLaunch", kHealthy, [&](Call &call) {
        auto exec = find_exec(call, handle);
        StreamPtr stream = call.stream(stream_handle);
        for (const NodePtr &node : exec->nodes)
            if (node->operation.kernel && node->operation.kernel->function->module.expired()) {
                violation(call.name(), "the module of a kernel in the graph was unloaded", call.record.handle);
                throw Fail{CUDA_ERROR_INVALID_HANDLE};
            }
        bool frees_leftovers = exec->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        if (!frees_leftovers) check_memory(exec->nodes);
        Operation begin{"graph"};
        if (exec->last_stream && exec->last_stream != stream)
            begin.dependencies.push_back({exec->last_stream, exec->last_seq});
        if (!submit(call, stream, CU_GRAPH_NODE_TYPE_GRAPH, std::move(begin))) {
            stream->capture_tail.back()->children = exec->nodes;
            return;
        }
        if (frees_leftovers) free_leftovers(exec->nodes, stream);
        enqueue_nodes(stream, exec->nodes);
        exec->last_stream = stream;
        exec->last_seq = stream->submitted;
    });
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec handle) {
    return entry("cuGraphExecDestroy", kInit, [&](Call &call) {
        auto exec = find_exec(call, handle);
        world().graph_execs.remove(handle);
        StreamPtr stream = exec->last_stream;
        if (!stream || stream->completed >= exec->last_seq) {
            release_all(exec->user_objects);
            return;
        }
        // Launches in flight keep the executable: released behind them in stream order.
        StreamPtr fence = make_stream(stream->context, CU_STREAM_NON_BLOCKING, 0, false);
        fence->stalled = false;
        Operation operation{"graph exec release"};
        operation.even_if_faulted = true;
        operation.dependencies.push_back({stream, exec->last_seq});
        operation.work = [exec](Exec &) {
            Guard guard(world().lock);
            release_all(exec->user_objects);
        };
        enqueue(fence, std::move(operation));
        retire_stream(fence);
    });
}

CUresult CUDAAPI cuGraphExecKernelNodeSetParams(CUgraphExec handle, CUgraphNode node_handle,
                                                const CUDA_KERNEL_NODE_PARAMS *params) {
    return entry("cuGraphExecKernelNodeSetParams", kContext, [&](Call &call) {
        NodePtr node = node_of(*find_exec(call, handle), node_handle);
        if (node->type != CU_GRAPH_NODE_TYPE_KERNEL) throw Fail{CUDA_ERROR_INVALID_VALUE};
        Operation work = kernel_node_work(call, params);
        if (work.context != node->operation.kernel->function->context) throw Fail{CUDA_ERROR_INVALID_VALUE};
        node->operation = std::move(work);
    });
}

CUresult CUDAAPI cuGraphNodeSetEnabled(CUgraphExec handle, CUgraphNode node_handle, unsigned enabled) {
    return entry("cuGraphNodeSetEnabled", kInit, [&](Call &call) {
        NodePtr node = node_of(*find_exec(call, handle), node_handle);
        bool may = node->type == CU_GRAPH_NODE_TYPE_KERNEL || node->type == CU_GRAPH_NODE_TYPE_MEMCPY ||
                   node->type == CU_GRAPH_NODE_TYPE_MEMSET;
        if (!may) throw Fail{CUDA_ERROR_INVALID_VALUE};
        node->enabled = enabled != 0;
    });
}

CUresult CUDAAPI cuGraphNodeGetEnabled(CUgraphExec handle, CUgraphNode node_handle, unsigned *enabled) {
    return entry("cuGraphNodeGetEnabled", kInit,
                 [&](Call &call) { require(enabled) = node_of(*find_exec(call, handle), node_handle)->enabled; });
}

CUresult CUDAAPI cuGraphExecUpdate(CUgraphExec handle, CUgraph graph_handle, CUgraphExecUpdateResultInfo *info) {
    return entry("cuGraphExecUpdate", kInit, [&](Call &call) {
        auto exec = find_exec(call, handle);
        GraphPtr graph = find_graph(call, graph_handle);
        require(info) = CUgraphExecUpdateResultInfo{};
        info->result = compare_graphs(*exec, *graph, &info->errorNode);
        if (info->result != CU_GRAPH_EXEC_UPDATE_SUCCESS) throw Fail{CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE};
        for (size_t i = 0; i < exec->nodes.size(); ++i) {
            exec->nodes[i]->operation = graph->nodes[i]->operation;
            exec->nodes[i]->children = clone(graph->nodes[i]->children);
        }
    });
}
