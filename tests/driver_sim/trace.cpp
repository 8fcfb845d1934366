#include "trace.h"

#include <chrono>
#include <cstdio>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "world.h"

namespace sim {
namespace {

// A long run must not eat the machine: the oldest records go first.
constexpr size_t kKept = 400000;

struct FaultRule {
    std::string name;   // "*": any counted call
    uint64_t remaining; // fires when it reaches zero
    int result;
    bool from_then_on;
};

struct Trace {
    std::mutex lock;
    std::deque<Record> records;
    uint64_t next = 1;
    FILE *file = nullptr;
    std::map<std::string, uint64_t> counts;
    uint64_t total = 0;
    uint64_t violations = 0;
    uint64_t delivered = 0;
    std::vector<FaultRule> faults;
};

Trace &trace() {
    static Trace *instance = new Trace; // never destroyed: workers outlive static destruction
    return *instance;
}

void append_string(std::string &out, const char *key, const std::string &value) {
    out += ",\"";
    out += key;
    out += "\":\"";
    for (char c : value) {
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (static_cast<unsigned char>(c) < 0x20) {
            char code[8];
            std::snprintf(code, sizeof code, "\\u%04x", c);
            out += code;
        } else {
            out += c;
        }
    }
    out += '"';
}

void append_number(std::string &out, const char *key, uint64_t value) {
    out += ",\"";
    out += key;
    out += "\":";
    out += std::to_string(value);
}

void append_json(std::string &out, const Record &r) {
    out += "{\"n\":" + std::to_string(r.number);
    append_number(out, "t_ns", r.time_ns);
    append_string(out, "event", r.event);
    append_string(out, "name", r.name);
    out += ",\"result\":" + std::to_string(r.result);
    append_number(out, "thread", r.thread);
    append_number(out, "ctx", r.context);
    append_number(out, "ctx_after", r.context_after);
    append_number(out, "stream", r.stream);
    append_number(out, "stream_id", r.stream_id);
    append_number(out, "nbytes", r.nbytes);
    append_number(out, "handle", r.handle);
    out += ",\"device\":" + std::to_string(r.device);
    append_string(out, "kind", r.kind);
    if (!r.note.empty()) append_string(out, "note", r.note);
    if (r.injected) out += ",\"injected\":true";
    out += "}\n";
}

} // namespace

uint64_t now_ns() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

void trace_open(const std::string &path) {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    if (t.file) std::fclose(t.file);
    // Close-on-exec and append: children of the process may name the same file.
    t.file = path.empty() ? nullptr : std::fopen(path.c_str(), "ae");
}

void trace_lock() { trace().lock.lock(); }

void trace_unlock() { trace().lock.unlock(); }

void trace_add(Record record) {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    record.number = t.next++;
    record.time_ns = now_ns();
    if (t.file) {
        std::string line;
        append_json(line, record);
        std::fwrite(line.data(), 1, line.size(), t.file);
        std::fflush(t.file); // the trace is most wanted when the process dies
    }
    t.records.push_back(std::move(record));
    if (t.records.size() > kKept) t.records.pop_front();
}

uint64_t trace_position() {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    return t.next - 1;
}

std::string trace_json(uint64_t since) {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    std::string out;
    for (const Record &r : t.records)
        if (r.number > since) append_json(out, r);
    return out;
}

void trace_clear() {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    t.records.clear();
    t.violations = 0;
}

void violation(const std::string &name, const std::string &note, uint64_t handle) {
    Record r;
    r.event = "violation";
    r.name = name;
    r.note = note;
    r.handle = handle;
    r.thread = this_thread().number;
    {
        Trace &t = trace();
        std::lock_guard<std::mutex> guard(t.lock);
        t.violations++;
    }
    trace_add(std::move(r));
}

uint64_t violation_count() {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    return t.violations;
}

void count_call(const char *name, bool counted_in_total) {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    t.counts[name]++;
    if (counted_in_total) t.total++;
}

uint64_t call_count(const std::string &name) {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    auto it = t.counts.find(name);
    return it == t.counts.end() ? 0 : it->second;
}

uint64_t call_total() {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    return t.total;
}

std::string call_counts_json() {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    std::string out = "{";
    for (const auto &[name, count] : t.counts) {
        if (out.size() > 1) out += ",";
        out += "\"" + name + "\":" + std::to_string(count);
    }
    return out + "}";
}

void reset_counts() {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    t.counts.clear();
    t.total = 0;
}

void add_fault(const std::string &name, uint64_t nth, int result, bool from_then_on) {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    t.faults.push_back({name, nth == 0 ? 1 : nth, result, from_then_on});
}

void clear_faults() {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    t.faults.clear();
    t.delivered = 0;
}

uint64_t faults_delivered() {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    return t.delivered;
}

int take_fault(const char *name, bool counted_in_total) {
    Trace &t = trace();
    std::lock_guard<std::mutex> guard(t.lock);
    int forced = -1;
    for (auto it = t.faults.begin(); it != t.faults.end();) {
        bool hit = it->name == name || (it->name == "*" && counted_in_total);
        if (!hit) {
            ++it;
            continue;
        }
        if (it->remaining > 0) it->remaining--;
        if (it->remaining > 0) {
            ++it;
            continue;
        }
        if (forced < 0) {
            forced = it->result;
            t.delivered++;
        }
        it = it->from_then_on ? it + 1 : t.faults.erase(it);
    }
    return forced;
}

} // namespace sim
