// What loading reads out of an image: PTX text, a CUBIN, or a fat binary of several.
#pragma once

#include <algorithm>
#include <cstring>

#include "call.h"

namespace sim {

struct Parameter {
    size_t offset = 0;
    size_t size = 0;
    size_t alignment = 1;
    std::string type; // "f32", "u64", "b8", ...; empty where the image does not tell
};

struct EntryPoint {
    std::string name;
    std::vector<Parameter> parameters;
    size_t parameter_bytes = 0;
    size_t static_shared = 0;
    size_t local_bytes = 0;
    int max_threads = 1024;
    unsigned required_block[3] = {0, 0, 0}; // the only shape that it may be launched with
    int registers = 32;
    unsigned required_cluster[3] = {0, 0, 0};
    bool needs_cluster = false; // no launch without one
};

struct GlobalVariable {
    std::string name;
    size_t nbytes = 0;
    std::vector<unsigned char> value; // zeros, if it is shorter
};

struct Image {
    int version_major = 0, version_minor = 0; // of PTX
    int target = 0;                           // what it was written for: 90 for sm_90
    int binary = 90;                          // what it runs as
    size_t nbytes = 0;
    std::vector<EntryPoint> entries;
    std::vector<GlobalVariable> globals;
};

// Each returns the driver's result for a device of the given capability (90); log gets the driver's text.
CUresult parse_ptx(const std::string &text, int capability, Image &image, std::string &log);
CUresult parse_cubin(const unsigned char *bytes, size_t nbytes, int capability, Image &image);
CUresult parse_image(const unsigned char *bytes, size_t nbytes, int capability, Image &image, std::string &log);

// Reads and checks an image with the JIT options of the caller. Throws Fail.
std::shared_ptr<Image> read_image(Call &call, const void *data, int capability, unsigned count, CUjit_option *options,
                                  void **values);

// Bytes of somebody else's making: every access is checked.
struct Garbled {};
class Bytes {
  public:
    Bytes(const unsigned char *begin, size_t size) : begin_(begin), size_(size) {}
    size_t size() const { return size_; }
    const unsigned char *data() const { return begin_; }

    template <class T> T at(size_t offset) const {
        T value;
        std::memcpy(&value, part(offset, sizeof value).begin_, sizeof value);
        return value;
    }
    Bytes part(size_t offset, size_t size) const {
        if (offset > size_ || size > size_ - offset) throw Garbled{};
        return {begin_ + offset, size};
    }
    std::string text(size_t offset) const { // that a zero ends
        Bytes rest = part(offset, size_ - std::min(offset, size_));
        const void *end = std::memchr(rest.begin_, 0, rest.size_);
        if (!end) throw Garbled{};
        return {reinterpret_cast<const char *>(rest.begin_), static_cast<const char *>(end)};
    }

  private:
    const unsigned char *begin_;
    size_t size_;
};

} // namespace sim
