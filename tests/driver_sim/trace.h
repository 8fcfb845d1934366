// What happened: one record per call, per piece of stream work and per broken rule.
#pragma once

#include <cstdint>
#include <string>

namespace sim {

struct Record {
    const char *event = "call"; // call | exec | violation
    std::string name;
    int result = 0;
    uint64_t thread = 0;
    uint64_t context = 0; // id of the current context, 0 for none
    uint64_t context_after = 0;
    uint64_t stream = 0; // handle as passed
    uint64_t stream_id = 0;
    uint64_t nbytes = 0;
    uint64_t handle = 0; // the object or address concerned
    int device = -1;
    std::string kind; // HtoD, DtoH, ... or the kernel's name
    std::string note;
    bool injected = false; // the result was ordered by a test
    uint64_t number = 0;
    uint64_t time_ns = 0;
};

// All of these take the trace's own lock, which is innermost: callable with World::lock held.
void trace_open(const std::string &path);
void trace_add(Record record);
uint64_t trace_position();
std::string trace_json(uint64_t since);
void trace_clear();

// Held over a fork, taken after World::lock.
void trace_lock();
void trace_unlock();

uint64_t now_ns();

// A rule of the driver API that the program under test broke. Counted, and never fatal by itself.
void violation(const std::string &name, const std::string &note, uint64_t handle = 0);
uint64_t violation_count();

// Call counters and ordered faults.
void count_call(const char *name, bool counted_in_total);
uint64_t call_count(const std::string &name);
uint64_t call_total();
std::string call_counts_json();
void reset_counts();
void add_fault(const std::string &name, uint64_t nth, int result, bool from_then_on);
void clear_faults();
uint64_t faults_delivered();
// Returns the result to force on this call, or -1.
int take_fault(const char *name, bool counted_in_total);

} // namespace sim
