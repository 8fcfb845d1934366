// CUBINs: ELF files as ptxas writes them, as far as loading and launching need.
#include <algorithm>
#include <cstring>

#include "image.h"

namespace sim {
namespace {

constexpr uint16_t kMachineCuda = 190;
constexpr uint16_t kExecutable = 2;
constexpr unsigned char kOsAbiCuda12 = 0x33, kOsAbiCuda13 = 0x41;
constexpr uint32_t kSymbolTable = 2, kNoBits = 8;
constexpr unsigned char kObject = 1, kFunction = 2, kGlobalBinding = 1;
constexpr unsigned char kEntryFlag = 0x10; // in st_other
constexpr uint32_t kReservedShared = 1024; // counted in the shared sections of sm_90 and later
constexpr uint64_t kLargestVariables = uint64_t{1} << 30;

// Attributes of .nv.info sections.
enum Attribute : unsigned char {
    kMaxThreads = 0x05,
    kRequiredThreads = 0x10,
    kFrameSize = 0x11,
    kParameter = 0x17,
    kParameterBytes = 0x19,
    kRegisterCount = 0x2f,
    kClusterSize = 0x3d,
    kExplicitCluster = 0x3e,
    kLargeParameter = 0x45,
};
enum Format : unsigned char { kNoValue = 1, kByte = 2, kHalf = 3, kSized = 4 };

constexpr unsigned char kCompatSpecific = 9; // in .nv.compat: only this very architecture

struct Section {
    std::string name;
    uint32_t type;
    uint64_t offset, size;
};

struct Symbol {
    std::string name;
    unsigned char type, binding, other;
    uint16_t section;
    uint64_t value, size;
};

struct Info {
    unsigned char attribute;
    uint16_t small; // the value of those without bytes
    Bytes value;
};

class Elf {
  public:
    explicit Elf(Bytes file) : file_(file) {
        bool elf64 =
            file.at<uint32_t>(0) == 0x464c457f && file.at<unsigned char>(4) == 2 && file.at<unsigned char>(5) == 1;
        if (!elf64 || file.at<uint16_t>(0x12) != kMachineCuda || file.at<uint16_t>(0x10) != kExecutable)
            throw Garbled{};
        file.part(file.at<uint64_t>(0x20), size_t{56} * file.at<uint16_t>(0x38)); // the program headers are all there
        read_sections();
        read_symbols();
    }

    unsigned char os_abi() const { return file_.at<unsigned char>(7); }
    uint32_t flags() const { return file_.at<uint32_t>(0x30); }
    const std::vector<Section> &sections() const { return sections_; }
    const std::vector<Symbol> &symbols() const { return symbols_; }

    const Section *find(const std::string &name) const {
        for (const Section &section : sections_)
            if (section.name == name) return &section;
        return nullptr;
    }
    Bytes bytes_of(const Section &section) const {
        if (section.type == kNoBits) return {file_.data(), 0};
        return file_.part(section.offset, section.size);
    }
    std::vector<Info> info(const std::string &name) const {
        std::vector<Info> found;
        const Section *section = find(name);
        if (!section) return found;
        Bytes bytes = bytes_of(*section);
        for (size_t at = 0; at < bytes.size();) {
            auto format = bytes.at<unsigned char>(at);
            auto attribute = bytes.at<unsigned char>(at + 1);
            auto small = bytes.at<uint16_t>(at + 2);
            at += 4;
            size_t size = format == kSized ? small : 0;
            if (format < kNoValue || format > kSized) throw Garbled{};
            found.push_back({attribute, small, bytes.part(at, size)});
            at += size;
        }
        return found;
    }

  private:
    void read_sections() {
        auto table = file_.at<uint64_t>(0x28);
        size_t count = file_.at<uint16_t>(0x3c), names_index = file_.at<uint16_t>(0x3e);
        if (file_.at<uint16_t>(0x3a) != 64 || names_index >= count) throw Garbled{};
        Bytes headers = file_.part(table, count * 64);
        auto header = [&](size_t i, std::string name) {
            size_t at = i * 64;
            return Section{std::move(name), headers.at<uint32_t>(at + 4), headers.at<uint64_t>(at + 0x18),
                           headers.at<uint64_t>(at + 0x20)};
        };
        Bytes names = bytes_of(header(names_index, ""));
        for (size_t i = 0; i < count; ++i) {
            sections_.push_back(header(i, i ? names.text(headers.at<uint32_t>(i * 64)) : ""));
            links_.push_back(headers.at<uint32_t>(i * 64 + 0x28));
            if (i) bytes_of(sections_.back()); // a section that the file does not hold makes it invalid
        }
    }

    void read_symbols() {
        for (size_t i = 0; i < sections_.size(); ++i) {
            if (sections_[i].type != kSymbolTable) continue;
            if (links_[i] >= sections_.size() || sections_[i].size % 24) throw Garbled{};
            Bytes table = bytes_of(sections_[i]), names = bytes_of(sections_[links_[i]]);
            for (size_t at = 0; at < table.size(); at += 24) {
                auto info = table.at<unsigned char>(at + 4);
                symbols_.push_back({names.text(table.at<uint32_t>(at)), static_cast<unsigned char>(info & 15),
                                    static_cast<unsigned char>(info >> 4), table.at<unsigned char>(at + 5),
                                    table.at<uint16_t>(at + 6), table.at<uint64_t>(at + 8),
                                    table.at<uint64_t>(at + 16)});
            }
            return;
        }
        throw Garbled{};
    }

    Bytes file_;
    std::vector<Section> sections_;
    std::vector<uint32_t> links_;
    std::vector<Symbol> symbols_;
};

class Cubin {
  public:
    Cubin(Bytes file, Image &image) : elf_(file), image_(image) {}

    CUresult read(int capability) {
        bool specific = false;
        if (elf_.os_abi() == kOsAbiCuda13) {
            image_.binary = elf_.flags() >> 8 & 0xff;
            for (const Info &info : elf_.info(".nv.compat")) // the same form as .nv.info
                if (info.attribute == kCompatSpecific) specific = info.small != 0;
        } else if (elf_.os_abi() == kOsAbiCuda12) {
            image_.binary = elf_.flags() & 0xff;
            specific = (elf_.flags() & 0x800) != 0;
        } else {
            throw Garbled{};
        }
        image_.target = image_.binary;
        if (const Section *note = elf_.find(".note.nv.cuinfo")) {
            // Header of 12 bytes, the owner's name in 12; then version, architecture of the PTX, toolkit.
            Bytes bytes = elf_.bytes_of(*note);
            if (bytes.size() >= 28) image_.target = bytes.at<uint16_t>(26);
        }
        bool runs = image_.binary / 10 == capability / 10 && image_.binary % 10 <= capability % 10;
        if (!runs || (specific && image_.binary != capability)) return CUDA_ERROR_NO_BINARY_FOR_GPU;
        for (size_t i = 0; i < elf_.symbols().size(); ++i) {
            const Symbol &symbol = elf_.symbols()[i];
            if (symbol.type == kFunction && (symbol.other & kEntryFlag)) entry(symbol, i);
            if (symbol.type == kObject && symbol.binding == kGlobalBinding) variable(symbol);
        }
        return CUDA_SUCCESS;
    }

  private:
    void entry(const Symbol &symbol, size_t index) {
        EntryPoint e;
        e.name = symbol.name;
        if (e.name.empty() || !elf_.find(".text." + e.name)) throw Garbled{};
        for (const Info &info : elf_.info(".nv.info")) {
            if (info.attribute != kRegisterCount && info.attribute != kFrameSize) continue;
            if (info.value.at<uint32_t>(0) != index) continue;
            auto value = info.value.at<uint32_t>(4);
            if (info.attribute == kFrameSize) e.local_bytes = value;
            else e.registers = static_cast<int>(std::min<uint32_t>(value, 255));
        }
        for (const Info &info : elf_.info(".nv.info." + e.name)) attribute(e, info);
        std::sort(ordered_.begin(), ordered_.end(), [](const auto &a, const auto &b) { return a.first < b.first; });
        for (size_t i = 0; i < ordered_.size(); ++i) {
            const Parameter &parameter = ordered_[i].second;
            if (ordered_[i].first != i || parameter.offset + parameter.size > e.parameter_bytes) throw Garbled{};
            e.parameters.push_back(parameter);
        }
        ordered_.clear();
        if (const Section *shared = elf_.find(".nv.shared." + e.name)) {
            uint64_t reserved = image_.binary >= 90 ? kReservedShared : 0;
            if (shared->size < reserved || shared->size > kLargestVariables) throw Garbled{};
            e.static_shared = shared->size - reserved;
        }
        image_.entries.push_back(std::move(e));
    }

    void attribute(EntryPoint &e, const Info &info) {
        switch (info.attribute) {
        case kParameterBytes: e.parameter_bytes = info.small; break;
        case kExplicitCluster: e.needs_cluster = true; break;
        case kRequiredThreads:
            for (size_t i = 0; i < 3; ++i) e.required_block[i] = info.value.at<uint32_t>(4 * i);
            break;
        case kMaxThreads: {
            uint64_t product = 1;
            for (size_t i = 0; i < 3; ++i) product *= std::min<uint32_t>(info.value.at<uint32_t>(4 * i), 1024);
            e.max_threads = static_cast<int>(std::min<uint64_t>(product, 1024));
            break;
        }
        case kClusterSize:
            for (size_t i = 0; i < 3; ++i) e.required_cluster[i] = info.value.at<uint32_t>(4 * i);
            break;
        case kParameter:
        case kLargeParameter: {
            // The older form packs the size above other fields; the newer has room for large ones.
            Parameter parameter;
            auto packed = info.value.at<uint32_t>(8);
            parameter.offset = info.value.at<uint16_t>(6);
            parameter.size = info.attribute == kParameter ? packed >> 18 : packed & 0xffff;
            ordered_.emplace_back(info.value.at<uint16_t>(4), parameter);
            break;
        }
        default: break;
        }
    }

    void variable(const Symbol &symbol) {
        if (symbol.section == 0 || symbol.section >= elf_.sections().size()) return;
        const Section &section = elf_.sections()[symbol.section];
        if (section.name.compare(0, 10, ".nv.global") != 0 && section.name.compare(0, 12, ".nv.constant") != 0) return;
        if (section.size > kLargestVariables || symbol.value > section.size ||
            symbol.size > section.size - symbol.value)
            throw Garbled{};
        GlobalVariable found;
        found.name = symbol.name;
        found.nbytes = symbol.size;
        if (section.type != kNoBits) {
            Bytes value = elf_.bytes_of(section).part(symbol.value, symbol.size);
            found.value.assign(value.data(), value.data() + value.size());
        }
        image_.globals.push_back(std::move(found));
    }

    Elf elf_;
    Image &image_;
    std::vector<std::pair<size_t, Parameter>> ordered_; // of the entry being read, by number
};

} // namespace

CUresult parse_cubin(const unsigned char *bytes, size_t nbytes, int capability, Image &image) {
    try {
        return Cubin({bytes, nbytes}, image).read(capability);
    } catch (const Garbled &) {
        return CUDA_ERROR_INVALID_IMAGE;
    }
}

} // namespace sim
