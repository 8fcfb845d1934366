#include "copy.h"

#include <cstring>

#include "capture.h"

namespace sim {

CopyEnd classify_end(Call &call, CUdeviceptr address, size_t nbytes, Side side) {
    CopyEnd end{address, side};
    AllocationPtr found = find_allocation(world().host_view, address, nbytes);
    if (side == Side::host && is_device_address(address)) {
        violation(call.name(), "device memory named as host memory", address);
        end.side = side = Side::device; // the address says what it is
    }
    if (side == Side::host) {
        end.pageable = !found;
        end.managed = found && found->kind == MemoryKind::managed;
        if (!found && find_allocation(world().freed, address, 0)) {
            violation(call.name(), "use after free of host memory", address);
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        }
        return end;
    }
    bool device_side = found || is_device_address(address);
    if (!address) throw Fail{CUDA_ERROR_INVALID_VALUE};
    if (side == Side::either && !device_side) {
        end.side = Side::host;
        end.pageable = true;
        return end;
    }
    check_host_range(call.name(), address, nbytes);
    found = find_range(world().host_view, address, nbytes).front();
    end.host_memory = found->kind == MemoryKind::pinned || found->kind == MemoryKind::registered;
    end.side = side == Side::either && end.host_memory ? Side::host : Side::device;
    end.device = found->device;
    return end;
}

char *reach_end(Exec &run, const CopyEnd &end, size_t nbytes) {
    if (end.side == Side::host) return reinterpret_cast<char *>(end.address);
    Guard guard(world().lock);
    // The copy engine reaches the memory of every device: access rights are for kernels. A mapping is
    // reached by the devices it grants, through its own one if need be.
    bool reached = true;
    std::vector<AllocationPtr> found = find_range(world().device_view, end.address, nbytes);
    for (const AllocationPtr &piece : found)
        reached = reached && (piece->kind != MemoryKind::mapped || piece->access.count(piece->device));
    if (found.empty() || !reached) {
        guard.unlock();
        return static_cast<char *>(run.at(end.address, nbytes, false)); // throws, with the reason, unless it may
    }
    return static_cast<char *>(backing(end.address));
}

namespace {

std::string direction(const CopyEnd &to, const CopyEnd &from) {
    if (to.side == Side::device && from.side == Side::device) return to.device == from.device ? "DtoD" : "PtoP";
    std::string out = from.side == Side::device ? "Dto" : "Hto";
    return out + (to.side == Side::device ? "D" : "H");
}

// Pageable memory is staged by the driver before the call returns, up to this size at least.
constexpr size_t kStaged = size_t{1} << 20;

void move_box(char *to, const char *from, const Box &box) {
    for (size_t z = 0; z < box.depth; ++z)
        for (size_t y = 0; y < box.height; ++y)
            std::memmove(to + z * box.to.slice + y * box.to.pitch, from + z * box.from.slice + y * box.from.pitch,
                         box.width);
}

} // namespace

void copy(Call &call, CUdeviceptr to, Side to_side, CUdeviceptr from, Side from_side, const Box &box, CUstream handle,
          When when) {
    StreamPtr stream = call.stream(handle);
    call.record.nbytes = box.width * box.height * box.depth;
    if (box.empty()) return;
    if (when == When::waited_for) refuse_if_capturing(call, stream);
    size_t to_span = box.span(box.to), from_span = box.span(box.from);
    CopyEnd target = classify_end(call, to, to_span, to_side);
    CopyEnd source = classify_end(call, from, from_span, from_side);
    for (const CopyEnd &end : {target, source})
        if (end.side == Side::device)
            require_access(*stream->context, end.address, end.address == to ? to_span : from_span, Access::copy);
    Operation operation{"copy", direction(target, source)};
    operation.nbytes = call.record.nbytes;
    std::shared_ptr<std::vector<char>> staged;
    // Within a device nobody waits: what comes behind it comes behind it there.
    bool must_wait = when == When::waited_for && operation.detail != "DtoD";
    if (when != When::waited_for && !stream->capture) {
        bool during = when == When::during_the_call;
        bool uploads = source.pageable && target.side == Side::device;
        if ((uploads && from_span <= kStaged) || (during && source.side == Side::host)) {
            const char *bytes = reinterpret_cast<const char *>(from);
            staged = std::make_shared<std::vector<char>>(bytes, bytes + from_span);
        }
        bool downloads = target.pageable || target.managed;
        if (downloads || ((uploads || during) && !staged)) {
            must_wait = true;
            call.record.note = uploads || downloads ? "pageable: waits" : "waits for its source";
        }
    }
    operation.work = [=](Exec &run) {
        char *t = reach_end(run, target, to_span);
        move_box(t, staged ? staged->data() : reach_end(run, source, from_span), box);
    };
    submit(call, stream, CU_GRAPH_NODE_TYPE_MEMCPY, std::move(operation));
    if (!must_wait) return;
    wait_for_stream(call.guard(), call.name(), stream);
    call.notice_fault();
}

void check_peers(CUcontext to, CUcontext from) {
    for (CUcontext handle : {to, from}) {
        if (!handle) continue; // whichever it is: the address tells
        ContextPtr context = world().contexts.find(handle);
        if (!context || !context->alive) throw Fail{CUDA_ERROR_INVALID_CONTEXT};
    }
}

} // namespace sim
