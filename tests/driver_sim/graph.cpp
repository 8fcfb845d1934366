#include "graph.h"

#include <thread>

#include "capture.h"

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

namespace {

struct DriverThread {
    std::mutex lock;
    std::condition_variable wake;
    std::deque<std::function<void()>> queue;
    bool started = false;
};

DriverThread &driver_thread() {
    static DriverThread *instance = new DriverThread;
    return *instance;
}

} // namespace

void run_on_driver_thread(std::function<void()> callback) {
    DriverThread &t = driver_thread();
    std::lock_guard<std::mutex> guard(t.lock);
    t.queue.push_back(std::move(callback));
    t.wake.notify_one();
    if (t.started) return;
    t.started = true;
    std::thread([&t] {
        this_thread().in_host_function = true; // callbacks may not call the driver
        for (;;) {
            std::unique_lock<std::mutex> guard(t.lock);
            t.wake.wait(guard, [&] { return !t.queue.empty(); });
            std::function<void()> next = std::move(t.queue.front());
            t.queue.pop_front();
            guard.unlock();
            next();
        }
    }).detach();
}

void release_user_object(const UserObjectPtr &object, uint64_t count) {
    if (count > object->references) {
        violation("cuUserObjectRelease", "released more often than retained");
        count = object->references;
    }
    object->references -= count;
    if (object->references) return;
    world().user_objects.remove(object->handle);
    CUhostFn destroy = object->destroy;
    void *pointer = object->pointer;
    run_on_driver_thread([destroy, pointer] { destroy(pointer); });
}

namespace {

template <class Holder> void release_all(Holder &holder) {
    for (const auto &[object, count] : holder.user_objects) release_user_object(object, count);
    holder.user_objects.clear();
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

UserObjectPtr find_object(CUuserObject handle) {
    UserObjectPtr object = world().user_objects.find(handle);
    if (!object) throw Fail{CUDA_ERROR_INVALID_VALUE};
    return object;
}

void instantiate(Call &call, CUgraphExec *out, CUgraph handle) {
    GraphPtr graph = find_graph(call, handle);
    require(out);
    auto exec = std::make_shared<GraphExec>();
    exec->id = world().next_id++;
    exec->context = graph->context;
    exec->nodes = graph->nodes;
    exec->user_objects = graph->user_objects;
    for (const auto &[object, count] : exec->user_objects) object->references += count;
    exec->handle = reinterpret_cast<CUgraphExec>(world().graph_execs.add(exec));
    *out = exec->handle;
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
    return entry("cuGraphDestroy", kInit, [&](Call &call) {
        GraphPtr graph = find_graph(call, handle);
        world().graphs.remove(handle);
        for (const NodePtr &node : graph->nodes) world().graph_nodes.remove(node->handle);
        release_all(*graph);
    });
}

CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long) {
    return entry("cuGraphInstantiate", kContext, [&](Call &call) { instantiate(call, out, graph); });
}

CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    return entry("cuGraphInstantiateWithParams", kContext, [&](Call &call) {
        instantiate(call, out, graph);
        require(params).result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
        params->hErrNode_out = nullptr;
    });
}

CUresult CUDAAPI cuGraphUpload(CUgraphExec handle, CUstream stream) {
    return entry("cuGraphUpload", kContext, [&](Call &call) {
        find_exec(call, handle);
        call.stream(stream);
    });
}

CUresult CUDAAPI cuGraphLaunch(CUgraphExec handle, CUstream stream_handle) {
    return entry("cuGraphLaunch", kContext, [&](Call &call) {
        auto exec = find_exec(call, handle);
        StreamPtr stream = call.stream(stream_handle);
        Operation operation{"graph"};
        if (exec->last_stream && exec->last_stream != stream)
            operation.dependencies.push_back({exec->last_stream, exec->last_seq});
        // The exec stays alive, with its user objects, until the launch is done.
        operation.work = [exec](Exec &run) {
            for (const NodePtr &node : exec->nodes)
                if (node->operation.work) {
                    Exec inner(run.stream(), node->operation.detail);
                    node->operation.work(inner);
                }
        };
        uint64_t seq = submit(call, stream, CU_GRAPH_NODE_TYPE_GRAPH, std::move(operation));
        if (seq) {
            exec->last_stream = stream;
            exec->last_seq = seq;
        }
    });
}

CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec handle) {
    return entry("cuGraphExecDestroy", kInit, [&](Call &call) {
        auto exec = find_exec(call, handle);
        world().graph_execs.remove(handle);
        StreamPtr stream = exec->last_stream;
        if (!stream || stream->completed >= exec->last_seq) {
            release_all(*exec);
            return;
        }
        // Launches in flight keep the user objects: released behind them in stream order.
        StreamPtr fence = make_stream(stream->context, CU_STREAM_NON_BLOCKING, 0, false);
        fence->stalled = false;
        Operation operation{"graph exec release"};
        operation.even_if_faulted = true;
        operation.dependencies.push_back({stream, exec->last_seq});
        operation.work = [exec](Exec &) {
            Guard guard(world().lock);
            release_all(*exec);
        };
        enqueue(fence, std::move(operation));
        retire_stream(fence);
    });
}

CUresult CUDAAPI cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count) {
    return entry("cuGraphGetNodes", kInit, [&](Call &call) {
        GraphPtr graph = find_graph(call, handle);
        size_t room = require(count);
        if (nodes) {
            for (size_t i = 0; i < room; ++i) nodes[i] = i < graph->nodes.size() ? graph->nodes[i]->handle : nullptr;
            *count = std::min(room, graph->nodes.size());
        } else {
            *count = graph->nodes.size();
        }
    });
}

CUresult CUDAAPI cuGraphNodeGetType(CUgraphNode handle, CUgraphNodeType *type) {
    return entry("cuGraphNodeGetType", kInit, [&](Call &) {
        NodePtr node = world().graph_nodes.find(handle);
        if (!node) throw Fail{CUDA_ERROR_INVALID_VALUE};
        require(type) = node->type;
    });
}

CUresult CUDAAPI cuUserObjectCreate(CUuserObject *out, void *pointer, CUhostFn destroy, unsigned initial,
                                    unsigned flags) {
    return entry("cuUserObjectCreate", kInit, [&](Call &call) {
        require(out);
        if (!destroy || initial == 0 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        auto object = std::make_shared<UserObject>();
        object->pointer = pointer;
        object->destroy = destroy;
        object->references = initial;
        object->handle = reinterpret_cast<CUuserObject>(world().user_objects.add(object));
        *out = object->handle;
        call.record.handle = reinterpret_cast<uint64_t>(*out);
    });
}

CUresult CUDAAPI cuUserObjectRetain(CUuserObject handle, unsigned count) {
    return entry("cuUserObjectRetain", kInit, [&](Call &) { find_object(handle)->references += count; });
}

CUresult CUDAAPI cuUserObjectRelease(CUuserObject handle, unsigned count) {
    return entry("cuUserObjectRelease", kInit, [&](Call &) { release_user_object(find_object(handle), count); });
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
        if (it == holder->user_objects.end() || it->second < count) throw Fail{CUDA_ERROR_INVALID_VALUE};
        it->second -= count;
        if (!it->second) holder->user_objects.erase(it);
        release_user_object(object, count);
    });
}
