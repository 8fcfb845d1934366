#include "image.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cstdio>

#include "control.h"

namespace sim {
namespace {

constexpr uint32_t kElf = 0x464c457f, kFatbin = 0xba55ed50, kFatbinWrapper = 0x466243b1;
constexpr size_t kLargestImage = size_t{1} << 30;

// The log buffers of a load call; the driver writes text and the number of bytes written.
struct Logs {
    char *error = nullptr, *info = nullptr;
    void **error_size = nullptr, **info_size = nullptr;

    Logs(unsigned count, CUjit_option *options, void **values) {
        for (unsigned i = 0; i < count; ++i) switch (options[i]) {
            case CU_JIT_ERROR_LOG_BUFFER: error = static_cast<char *>(values[i]); break;
            case CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: error_size = &values[i]; break;
            case CU_JIT_INFO_LOG_BUFFER: info = static_cast<char *>(values[i]); break;
            case CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: info_size = &values[i]; break;
            default: break;
            }
    }
    static void write(char *buffer, void **size, const std::string &text) {
        if (!size) return;
        size_t room = reinterpret_cast<size_t>(*size);
        if (!buffer || !room) return;
        size_t n = std::min(room - 1, text.size());
        std::memcpy(buffer, text.data(), n);
        buffer[n] = 0;
        *size = reinterpret_cast<void *>(n);
    }
};

// The image's address comes without a length. What its own headers claim may not be there at all, so
// the bytes are fetched as another process would, which ends at the first page that is missing.
std::vector<unsigned char> fetch(const void *from, size_t nbytes) {
    constexpr size_t kPage = 4096;
    std::vector<unsigned char> bytes(nbytes);
    size_t done = 0;
    while (done < nbytes) {
        uint64_t at = reinterpret_cast<uint64_t>(from) + done;
        size_t step = std::min(nbytes - done, kPage - at % kPage);
        iovec local{bytes.data() + done, step}, remote{reinterpret_cast<void *>(at), step};
        if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) != static_cast<ssize_t>(step)) break;
        done += step;
    }
    bytes.resize(done);
    return bytes;
}

size_t elf_size(const void *data) {
    std::vector<unsigned char> header = fetch(data, 64);
    Bytes bytes{header.data(), header.size()};
    auto segments = bytes.at<uint64_t>(0x20), table = bytes.at<uint64_t>(0x28);
    size_t count = bytes.at<uint16_t>(0x3c);
    if (table > kLargestImage || segments > kLargestImage) throw Garbled{};
    size_t size = std::max(table + count * 64, segments + size_t{56} * bytes.at<uint16_t>(0x38));
    std::vector<unsigned char> fetched = fetch(static_cast<const char *>(data) + table, count * 64);
    Bytes sections{fetched.data(), fetched.size()};
    for (size_t i = 0; i < count; ++i) {
        constexpr uint32_t kNoBits = 8;
        if (sections.at<uint32_t>(i * 64 + 4) == kNoBits) continue;
        auto offset = sections.at<uint64_t>(i * 64 + 0x18), length = sections.at<uint64_t>(i * 64 + 0x20);
        if (offset > kLargestImage || length > kLargestImage) throw Garbled{};
        size = std::max(size, static_cast<size_t>(offset + length));
    }
    return size;
}

size_t fatbin_size(const void *data) {
    std::vector<unsigned char> header = fetch(data, 16);
    Bytes bytes{header.data(), header.size()};
    auto payload = bytes.at<uint64_t>(8);
    if (payload > kLargestImage) throw Garbled{};
    return bytes.at<uint16_t>(6) + static_cast<size_t>(payload);
}

uint32_t first_word(const void *data) {
    std::vector<unsigned char> bytes = fetch(data, 4);
    bytes.resize(4); // text may be shorter
    uint32_t word;
    std::memcpy(&word, bytes.data(), sizeof word);
    return word;
}

// The bytes of an image, whatever it is. The wrapper that nvcc puts around fat binaries is followed.
std::vector<unsigned char> image_bytes(const void *data) {
    uint32_t word = first_word(data);
    if (word == kFatbinWrapper) {
        std::vector<unsigned char> wrapper = fetch(data, 16);
        data = reinterpret_cast<const void *>(Bytes{wrapper.data(), wrapper.size()}.at<uint64_t>(8));
        word = first_word(data);
        if (word != kFatbin) throw Garbled{};
    }
    if (word == kElf) return fetch(data, elf_size(data));
    if (word == kFatbin) return fetch(data, fatbin_size(data));
    const char *text = static_cast<const char *>(data);
    return {text, text + std::strlen(text)};
}

// One image of a fat binary.
struct Member {
    bool is_ptx;
    int arch;
    bool compressed;
    Bytes bytes;
};

std::vector<Member> members_of(Bytes file) {
    constexpr uint16_t kPtx = 1, kCubin = 2;
    constexpr uint64_t kCompressed = 0xa000; // by LZ4 or zstd
    std::vector<Member> found;
    size_t at = file.at<uint16_t>(6);
    if (at < 16 || file.at<uint64_t>(8) > file.size() - at) throw Garbled{};
    Bytes body = file.part(0, at + file.at<uint64_t>(8));
    while (at < body.size()) {
        auto kind = body.at<uint16_t>(at);
        auto header = body.at<uint32_t>(at + 4);
        auto payload = body.at<uint64_t>(at + 8);
        if (header < 48) throw Garbled{};
        Bytes whole = body.part(at, header);
        Bytes bytes = body.part(at + header, payload);
        if (kind == kPtx || kind == kCubin)
            found.push_back({kind == kPtx, static_cast<int>(std::min<uint32_t>(whole.at<uint32_t>(28), 9999)),
                             (whole.at<uint64_t>(40) & kCompressed) != 0, bytes});
        at += header + payload;
    }
    return found;
}

CUresult parse_ptx_bytes(Bytes bytes, int capability, Image &image, std::string &log) {
    const char *begin = reinterpret_cast<const char *>(bytes.data());
    return parse_ptx(std::string(begin, std::find(begin, begin + bytes.size(), '\0')), capability, image, log);
}

// The cubin nearest to the device, else the newest PTX that it takes.
CUresult parse_fatbin(Bytes file, int capability, Image &image, std::string &log) {
    const Member *best = nullptr;
    std::vector<Member> members = members_of(file);
    for (const Member &member : members) {
        bool fits = member.is_ptx ? member.arch <= capability
                                  : member.arch / 10 == capability / 10 && member.arch <= capability;
        bool better =
            !best || (best->is_ptx && !member.is_ptx) || (best->is_ptx == member.is_ptx && member.arch > best->arch);
        if (fits && better) best = &member;
    }
    if (!best) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    if (best->compressed) {
        std::fprintf(stderr, "driver_sim: the fat binary is compressed, which the simulation cannot read\n");
        return CUDA_ERROR_INVALID_IMAGE;
    }
    if (best->is_ptx) return parse_ptx_bytes(best->bytes, capability, image, log);
    return parse_cubin(best->bytes.data(), best->bytes.size(), capability, image);
}

} // namespace

CUresult parse_image(const unsigned char *bytes, size_t nbytes, int capability, Image &image, std::string &log) {
    try {
        Bytes file{bytes, nbytes};
        uint32_t word = nbytes < 4 ? 0 : file.at<uint32_t>(0);
        image.nbytes = nbytes;
        if (word == kElf) return parse_cubin(bytes, nbytes, capability, image);
        if (word == kFatbin) return parse_fatbin(file, capability, image, log);
        return parse_ptx_bytes(file, capability, image, log);
    } catch (const Garbled &) {
        return CUDA_ERROR_INVALID_IMAGE;
    }
}

std::shared_ptr<Image> read_image(Call &call, const void *data, int capability, unsigned count, CUjit_option *options,
                                  void **values) {
    if (!data || (count && (!options || !values))) throw Fail{CUDA_ERROR_INVALID_VALUE};
    Logs logs(count, options, values);
    auto image = std::make_shared<Image>();
    std::string log;
    CUresult result = CUDA_ERROR_INVALID_IMAGE;
    try {
        std::vector<unsigned char> bytes = image_bytes(data);
        call.record.nbytes = bytes.size();
        result = parse_image(bytes.data(), bytes.size(), capability, *image, log);
    } catch (const Garbled &) {
        call.record.note = "an image that its own headers contradict";
    }
    Logs::write(logs.error, logs.error_size, log);
    Logs::write(logs.info, logs.info_size, "");
    if (result == CUDA_SUCCESS) return image;
    if (!log.empty()) call.record.note = log;
    throw Fail{result};
}

} // namespace sim

int kina_sim_parse_image(const void *bytes, size_t nbytes, int capability) {
    sim::Image image;
    std::string log;
    return sim::parse_image(static_cast<const unsigned char *>(bytes), nbytes, capability, image, log);
}
