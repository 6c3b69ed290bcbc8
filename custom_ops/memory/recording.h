// What a program asks a device for, in order: to be replayed in pools.
//
// Plain C++17, no TensorFlow.

#ifndef KMEM_MEMORY_RECORDING_H_
#define KMEM_MEMORY_RECORDING_H_

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace kmem {

// A block of `bytes` that was handed out, or of `-bytes` that was given back.
// The address of a block that was given back may be another one's later.
struct Event {
  int64_t address;
  int64_t bytes;
};

class Recording {
 public:
  // `held_bytes` are in use when it begins.
  explicit Recording(int64_t held_bytes) : held_bytes_(held_bytes) {}

  int64_t held_bytes() const { return held_bytes_; }

  void Add(const void* block, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back({reinterpret_cast<intptr_t>(block), bytes});
  }

  std::vector<Event> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::move(events_);
  }

 private:
  const int64_t held_bytes_;
  std::mutex mutex_;
  std::vector<Event> events_;
};

}  // namespace kmem

#endif  // KMEM_MEMORY_RECORDING_H_
