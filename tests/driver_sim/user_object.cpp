// User objects: what graphs keep alive, and the thread that destroys it.
#include <thread>

#include "graph.h"

namespace sim {
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
        this_thread().in_destructor = true;
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

UserObjectPtr find_object(CUuserObject handle) {
    UserObjectPtr object = world().user_objects.find(handle);
    if (!object) throw Fail{CUDA_ERROR_INVALID_VALUE};
    return object;
}

void release_all(UserObjects &objects) {
    for (const auto &[object, count] : objects) release_user_object(object, count);
    objects.clear();
}

} // namespace sim

using namespace sim;

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
