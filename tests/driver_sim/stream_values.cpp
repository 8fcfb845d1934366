// Words of memory that streams wait for and write.
#include "capture.h"
#include "memory.h"

using namespace sim;

namespace {

template <class Word> bool satisfies(Word found, Word wanted, unsigned condition) {
    switch (condition) {
    case CU_STREAM_WAIT_VALUE_EQ: return found == wanted;
    case CU_STREAM_WAIT_VALUE_AND: return (found & wanted) != 0;
    case CU_STREAM_WAIT_VALUE_NOR: return static_cast<Word>(~(found | wanted)) != 0;
    default: return static_cast<std::make_signed_t<Word>>(found - wanted) >= 0;
    }
}

// The word's bytes; it must be memory that the driver knows.
template <class Word> Word *word_at(Call &call, CUdeviceptr address) {
    if (address % sizeof(Word)) throw Fail{CUDA_ERROR_INVALID_VALUE};
    check_host_range(call.name(), address, sizeof(Word));
    return static_cast<Word *>(backing(address));
}

template <class Word>
void wait_for_value(Call &call, CUstream handle, CUdeviceptr address, Word value, unsigned flags) {
    StreamPtr stream = call.stream(handle);
    call.record.handle = address;
    if (flags & ~unsigned{CU_STREAM_WAIT_VALUE_FLUSH | CU_STREAM_WAIT_VALUE_NOR}) throw Fail{CUDA_ERROR_INVALID_VALUE};
    Word *word = word_at<Word>(call, address);
    unsigned condition = flags & CU_STREAM_WAIT_VALUE_NOR;
    Operation operation{"wait for value"};
    operation.ready = [=] { return satisfies(__atomic_load_n(word, __ATOMIC_ACQUIRE), value, condition); };
    submit(call, stream, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, std::move(operation));
}

template <class Word> void write_value(Call &call, CUstream handle, CUdeviceptr address, Word value, unsigned flags) {
    StreamPtr stream = call.stream(handle);
    call.record.handle = address;
    // Writing without a barrier is refused on hardware too.
    if (flags != CU_STREAM_WRITE_VALUE_DEFAULT) throw Fail{CUDA_ERROR_INVALID_VALUE};
    word_at<Word>(call, address);
    require_access(*stream->context, address, sizeof(Word), Access::kernel);
    Operation operation{"write value"};
    operation.nbytes = sizeof(Word);
    operation.work = [=](Exec &run) {
        __atomic_store_n(static_cast<Word *>(run.at(address, sizeof(Word), true)), value, __ATOMIC_RELEASE);
    };
    submit(call, stream, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, std::move(operation));
}

} // namespace

CUresult CUDAAPI cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    return entry("cuStreamWaitValue32", kInit,
                 [&](Call &call) { wait_for_value<uint32_t>(call, stream, address, value, flags); });
}

CUresult CUDAAPI cuStreamWaitValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags) {
    return entry("cuStreamWaitValue64", kInit,
                 [&](Call &call) { wait_for_value<uint64_t>(call, stream, address, value, flags); });
}

CUresult CUDAAPI cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    return entry("cuStreamWriteValue32", kInit,
                 [&](Call &call) { write_value<uint32_t>(call, stream, address, value, flags); });
}

CUresult CUDAAPI cuStreamWriteValue64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags) {
    return entry("cuStreamWriteValue64", kInit,
                 [&](Call &call) { write_value<uint64_t>(call, stream, address, value, flags); });
}

CUresult CUDAAPI cuStreamAttachMemAsync(CUstream handle, CUdeviceptr address, size_t length, unsigned flags) {
    return entry("cuStreamAttachMemAsync", kContext, [&](Call &call) {
        StreamPtr stream = call.stream(handle);
        call.record.handle = address;
        if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST && flags != CU_MEM_ATTACH_SINGLE)
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        if (flags == CU_MEM_ATTACH_SINGLE && stream->legacy) throw Fail{CUDA_ERROR_INVALID_VALUE};
        AllocationPtr found = find_allocation(world().host_view, address, length);
        if (!found || found->kind != MemoryKind::managed || found->base != address)
            throw Fail{CUDA_ERROR_INVALID_VALUE};
        if (length && length != found->nbytes) throw Fail{CUDA_ERROR_INVALID_VALUE};
        refuse_if_capturing(call, stream);
        submit(call, stream, CU_GRAPH_NODE_TYPE_EMPTY, Operation{"attach"});
    });
}
