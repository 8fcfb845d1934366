// As much of PTX as loading and launching need: version, target, entries, parameter layout.
#include <cctype>
#include <cstdlib>
#include <cstring>

#include "image.h"

namespace sim {
namespace {

constexpr int kNewestMajor = 9, kNewestMinor = 0; // what a 13.0 driver accepts

// Targets that its assembler knows, with the version (78 for 7.8) that brought them.
const std::map<std::string, int> kTargets = {
    {"10", 10},   {"11", 10},   {"12", 12},   {"13", 12},   {"20", 20},   {"21", 20},   {"30", 30},   {"32", 40},
    {"35", 31},   {"37", 41},   {"50", 40},   {"52", 41},   {"53", 42},   {"60", 50},   {"61", 50},   {"62", 50},
    {"70", 60},   {"72", 61},   {"75", 63},   {"80", 70},   {"86", 71},   {"87", 74},   {"88", 90},   {"89", 78},
    {"90", 78},   {"90a", 80},  {"100", 86},  {"100a", 86}, {"100f", 88}, {"101", 86},  {"101a", 86}, {"101f", 88},
    {"103", 88},  {"103a", 88}, {"103f", 88}, {"110", 90},  {"110a", 90}, {"110f", 90}, {"120", 87},  {"120a", 87},
    {"120f", 88}, {"121", 88},  {"121a", 88}, {"121f", 88}};

struct Token {
    std::string text;
    int line;
};

bool is_word(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '.' || c == '%';
}

// Words (directives keep their dots), strings, and single punctuation characters; no comments.
std::vector<Token> tokenize(const std::string &text) {
    std::vector<Token> tokens;
    int line = 1;
    for (size_t i = 0; i < text.size();) {
        char c = text[i];
        if (c == '\n') {
            ++line;
            ++i;
        } else if (std::isspace(static_cast<unsigned char>(c))) {
            ++i;
        } else if (text.compare(i, 2, "//") == 0) {
            while (i < text.size() && text[i] != '\n') ++i;
        } else if (text.compare(i, 2, "/*") == 0) {
            size_t end = text.find("*/", i + 2);
            end = end == std::string::npos ? text.size() : end + 2;
            for (; i < end; ++i) line += text[i] == '\n';
        } else if (c == '"') {
            size_t end = text.find('"', i + 1);
            end = end == std::string::npos ? text.size() : end + 1;
            tokens.push_back({text.substr(i, end - i), line});
            i = end;
        } else if (is_word(c)) {
            size_t begin = i;
            while (i < text.size() && is_word(text[i])) ++i;
            tokens.push_back({text.substr(begin, i - begin), line});
        } else {
            tokens.push_back({std::string(1, c), line});
            ++i;
        }
    }
    return tokens;
}

size_t type_size(const std::string &type) {
    static const std::map<std::string, size_t> sizes = {
        {".b8", 1},     {".u8", 1},     {".s8", 1},         {".b16", 2},    {".u16", 2},   {".s16", 2},
        {".f16", 2},    {".bf16", 2},   {".b32", 4},        {".u32", 4},    {".s32", 4},   {".f32", 4},
        {".b64", 8},    {".u64", 8},    {".s64", 8},        {".f64", 8},    {".b128", 16}, {".f16x2", 4},
        {".bf16x2", 4}, {".texref", 8}, {".samplerref", 8}, {".surfref", 8}};
    auto it = sizes.find(type);
    return it == sizes.end() ? 0 : it->second;
}

class Parser {
  public:
    Parser(std::vector<Token> tokens, int last_line, Image &image)
        : tokens_(std::move(tokens)), last_line_(last_line), image_(image) {}

    CUresult run(int capability, std::string &log) {
        capability_ = capability;
        try {
            module();
            return CUDA_SUCCESS;
        } catch (const Problem &problem) {
            log = problem.log;
            return problem.code;
        }
    }

  private:
    struct Problem {
        CUresult code;
        std::string log;
    };

    static std::string at_line(int line, const std::string &text) {
        return "ptxas application ptx input, line " + std::to_string(line) + "; " + text;
    }
    // The text of the assembler, and that it gave up.
    [[noreturn]] static void give_up(const std::string &log) {
        throw Problem{CUDA_ERROR_INVALID_PTX, log + "\nptxas fatal   : Ptx assembly aborted due to errors"};
    }
    [[noreturn]] static void fail_at(int line, const std::string &text) { give_up(at_line(line, "fatal   : " + text)); }
    [[noreturn]] void fail(const std::string &text) { fail_at(line(), text); }
    bool at_end() const { return at_ >= tokens_.size(); }
    int line() const { return at_end() ? last_line_ : tokens_[at_].line; }
    const std::string &peek() {
        static const std::string end = "";
        return at_end() ? end : tokens_[at_].text;
    }
    std::string next() {
        if (at_end()) fail("Parsing error near '': syntax error");
        return tokens_[at_++].text;
    }
    void expect(const std::string &text) {
        std::string got = next();
        if (got != text) fail("Parsing error near '" + got + "': syntax error");
    }
    size_t number() {
        std::string text = next();
        char *end = nullptr;
        size_t value = std::strtoull(text.c_str(), &end, 0);
        if (end == text.c_str()) fail("Parsing error near '" + text + "': syntax error");
        return value;
    }

    void module() {
        int version_line = line();
        next(); // .version, or it would not be taken for PTX
        if (!std::isdigit(static_cast<unsigned char>(peek().c_str()[0])))
            fail_at(version_line, "Missing .version directive at start of file 'application ptx input'");
        std::string version = next();
        image_.version_major = std::atoi(version.c_str());
        size_t dot = version.find('.');
        image_.version_minor = dot == std::string::npos ? 0 : std::atoi(version.c_str() + dot + 1);
        if (ptx_version() > 10 * kNewestMajor + kNewestMinor)
            throw Problem{CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
                          at_line(version_line, "fatal   : Unsupported .version " + version + "; current version is '" +
                                                    std::to_string(kNewestMajor) + "." + std::to_string(kNewestMinor) +
                                                    "'")};
        if (peek() != ".target") fail("Missing .target directive at start of file 'application ptx input'");
        next();
        int target_line = line();
        std::string target = next();
        size_t digits = target.find_first_of("0123456789");
        auto known = kTargets.find(digits == std::string::npos ? target : target.substr(digits));
        bool named = target.compare(0, 3, "sm_") == 0 || target.compare(0, 8, "compute_") == 0;
        if (!named || known == kTargets.end()) fail_at(target_line, "Unsupported .target '" + target + "'");
        image_.target = std::atoi(known->first.c_str());
        std::string errors;
        if (peek() == ".address_size" && ptx_version() < 23)
            errors =
                at_line(line(), "error   : Feature '.address_size directive' requires PTX ISA .version 2.3 or later") +
                "\n";
        if (ptx_version() < known->second)
            errors +=
                at_line(target_line, "error   : PTX .version " + version + " does not support .target " + target) +
                "\n";
        if (!errors.empty()) give_up(errors.substr(0, errors.size() - 1));
        if (image_.target > capability_)
            throw Problem{CUDA_ERROR_INVALID_PTX,
                          "ptxas fatal   : SM version specified by .target is higher than default SM version assumed"};
        while (!at_end()) statement();
    }

    int ptx_version() const { return 10 * image_.version_major + image_.version_minor; }

    void statement() {
        const std::string &word = peek();
        if (word == ".entry") entry();
        else if (word == "{") skip_braces(nullptr);
        else if (word == ".shared") module_shared_ += variable(nullptr);
        else if (word == ".global" || word == ".const") global();
        else if (word == "}") fail("Parsing error near '}': syntax error");
        else next();
    }

    // A variable's declaration after its space: alignment, type, name[count]. Returns its size.
    size_t variable(std::string *name, size_t *unit_out = nullptr) {
        next();
        size_t unit = 0, vector = 1;
        for (;;) {
            std::string word = next();
            if (word == ".align") number();
            else if (word == ".v2") vector = 2;
            else if (word == ".v4") vector = 4;
            else if (word == ".attribute") skip_parentheses();
            else if (word[0] == '.') unit = std::max(unit, type_size(word));
            else {
                if (name) *name = word;
                break;
            }
        }
        size_t count = 1;
        while (peek() == "[") {
            next();
            if (peek() == "]") count = 0; // extern array: sized at launch
            else count *= number();
            expect("]");
        }
        if (unit_out) *unit_out = unit;
        return unit * vector * count;
    }

    void global() {
        GlobalVariable found;
        size_t unit = 0;
        found.nbytes = variable(&found.name, &unit);
        bool negative = false;
        while (!at_end() && peek() != ";") {
            std::string word = next();
            if (std::isdigit(static_cast<unsigned char>(word[0]))) append(found, literal(word, negative), unit);
            negative = word == "-";
        }
        found.value.resize(std::min(found.value.size(), found.nbytes));
        image_.globals.push_back(found);
    }

    // The bits of a number: an integer, or 0f and 0d with those of a float.
    static uint64_t literal(const std::string &word, bool negative) {
        bool bits = word.size() > 2 && word[0] == '0' && std::strchr("fFdD", word[1]);
        uint64_t value = bits ? std::strtoull(word.c_str() + 2, nullptr, 16) : std::strtoull(word.c_str(), nullptr, 0);
        return negative ? 0 - value : value;
    }

    static void append(GlobalVariable &variable, uint64_t value, size_t unit) {
        for (size_t i = 0; i < unit; ++i)
            variable.value.push_back(static_cast<unsigned char>(i < 8 ? value >> 8 * i : 0));
    }

    void skip_parentheses() {
        expect("(");
        int depth = 1;
        while (depth > 0) {
            std::string word = next();
            depth += word == "(" ? 1 : word == ")" ? -1 : 0;
        }
    }

    void skip_braces(EntryPoint *entry) {
        expect("{");
        int depth = 1;
        while (depth > 0) {
            if (peek() == ".shared" && entry) {
                // ld.shared is one word; a lone .shared declares.
                entry->static_shared += variable(nullptr);
                continue;
            }
            std::string word = next();
            depth += word == "{" ? 1 : word == "}" ? -1 : 0;
        }
    }

    void entry() {
        int entry_line = line();
        next();
        EntryPoint e;
        e.name = next();
        if (e.name[0] == '.' || !is_word(e.name[0])) fail("Parsing error near '" + e.name + "': syntax error");
        if (peek() == "(") {
            next();
            while (peek() != ")") {
                parameter(e);
                if (peek() == ",") next();
                else if (peek() != ")") fail("Parsing error near '" + peek() + "': syntax error");
            }
            next();
        }
        while (peek() != "{" && peek() != ";") directive(e);
        if (peek() == ";") { // declaration only
            next();
            return;
        }
        for (const EntryPoint &other : image_.entries)
            if (other.name == e.name)
                give_up(at_line(entry_line, "error   : Duplicate definition of function '" + e.name + "'"));
        skip_braces(&e);
        e.static_shared += module_shared_;
        image_.entries.push_back(std::move(e));
    }

    void parameter(EntryPoint &e) {
        expect(".param");
        Parameter p;
        size_t unit = 0, alignment = 0;
        while (peek()[0] == '.') {
            std::string word = next();
            if (word == ".align") alignment = number();
            else if (type_size(word)) {
                unit = type_size(word);
                p.type = word.substr(1);
            }
            if (at_end()) fail("Parsing error near '': syntax error");
        }
        next(); // the name
        size_t count = 1;
        if (peek() == "[") {
            next();
            count = number();
            expect("]");
        }
        if (!unit) fail("Unknown type of a parameter of entry '" + e.name + "'");
        p.size = unit * count;
        // .ptr .align N speaks of the pointee when it follows the type, so it never lowers a scalar's own.
        p.alignment = count > 1 && alignment ? alignment : std::max(unit, count > 1 ? alignment : size_t{0});
        p.offset = (e.parameter_bytes + p.alignment - 1) / p.alignment * p.alignment;
        e.parameter_bytes = p.offset + p.size;
        e.parameters.push_back(p);
    }

    void directive(EntryPoint &e) {
        std::string word = next();
        auto dimensions = [&](size_t *out) {
            for (int i = 0; i < 3; ++i) {
                out[i] = number();
                if (peek() != ",") break;
                next();
            }
        };
        size_t d[3] = {1, 1, 1};
        if (word == ".maxntid") {
            dimensions(d);
            e.max_threads = static_cast<int>(d[0] * d[1] * d[2]);
        } else if (word == ".reqntid") {
            dimensions(d);
            for (int i = 0; i < 3; ++i) e.required_block[i] = static_cast<unsigned>(d[i]);
        } else if (word == ".maxnreg") {
            e.registers = static_cast<int>(number());
        } else if (word == ".explicitcluster") {
            e.needs_cluster = true;
        } else if (word == ".reqnctapercluster") {
            dimensions(d);
            for (int i = 0; i < 3; ++i) e.required_cluster[i] = static_cast<unsigned>(d[i]);
        }
    }

    std::vector<Token> tokens_;
    int last_line_;
    Image &image_;
    size_t at_ = 0;
    int capability_ = 0;
    size_t module_shared_ = 0;
};

} // namespace

CUresult parse_ptx(const std::string &text, int capability, Image &image, std::string &log) {
    std::vector<Token> tokens = tokenize(text);
    if (tokens.empty() || tokens[0].text != ".version") {
        // Not taken for PTX at all: the loader knows no such format, and the assembler is never asked.
        log = "error   : Binary format for key='0', ident='' is not recognized";
        return CUDA_ERROR_INVALID_IMAGE;
    }
    int last_line = 1 + static_cast<int>(std::count(text.begin(), text.end(), '\n'));
    return Parser(std::move(tokens), last_line, image).run(capability, log);
}

} // namespace sim
