// Opaque handles: values that no process can dereference, looked up before every use.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace sim {

// Handles are non-canonical addresses, so that following one faults at once instead of reading
// something by luck. By default a value is never given out twice, which makes a stale handle
// detectable for ever; with reuse on, the last freed value comes back first, as a real driver's
// allocator likes to do, which is what breaks caches keyed by a handle.
template <class T> class HandleTable {
  public:
    explicit HandleTable(unsigned kind) : base_((uint64_t{0x51} << 56) | (uint64_t{kind} << 48)) {}

    void set_reuse(bool on) { reuse_ = on; }

    uint64_t add(std::shared_ptr<T> object) {
        uint64_t value;
        if (reuse_ && !freed_.empty()) {
            value = freed_.back();
            freed_.pop_back();
            dead_.erase(value);
        } else {
            value = base_ | (++count_ << 4);
        }
        live_.emplace(value, std::move(object));
        return value;
    }

    std::shared_ptr<T> find(const void *handle) const {
        auto it = live_.find(reinterpret_cast<uint64_t>(handle));
        return it == live_.end() ? nullptr : it->second;
    }

    bool was_destroyed(const void *handle) const { return dead_.count(reinterpret_cast<uint64_t>(handle)) != 0; }

    bool died_with_context(const void *handle) const {
        auto it = dead_.find(reinterpret_cast<uint64_t>(handle));
        return it != dead_.end() && it->second;
    }

    std::shared_ptr<T> remove(const void *handle, bool with_context = false) {
        auto it = live_.find(reinterpret_cast<uint64_t>(handle));
        if (it == live_.end()) return nullptr;
        std::shared_ptr<T> object = std::move(it->second);
        dead_[it->first] = with_context;
        if (reuse_) freed_.push_back(it->first);
        live_.erase(it);
        return object;
    }

    const std::unordered_map<uint64_t, std::shared_ptr<T>> &live() const { return live_; }

  private:
    uint64_t base_;
    uint64_t count_ = 0;
    bool reuse_ = false;
    std::unordered_map<uint64_t, std::shared_ptr<T>> live_;
    std::unordered_map<uint64_t, bool> dead_; // value: its context was destroyed under it
    std::vector<uint64_t> freed_;
};

} // namespace sim
