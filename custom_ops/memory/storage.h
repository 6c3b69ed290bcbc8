// Where large blocks come from: pages mapped from the system, of which some
// are kept when they are freed.
//
// They are kept for speed alone. The system clears every page that it hands
// out, so training without this would clear the same memory at every step.
// What is kept is bounded: blocks in use and free pages together are at most
// a quarter above the most that was lately in use.
//
// Best fit, with free neighbours joined: a training step asks for many sizes,
// and memory freed by one must serve the next. No list of regions is needed
// as in other allocators of this kind, because the system takes back any
// range of pages, whichever calls mapped them.
//
// Plain C++17 and POSIX, no TensorFlow.

#ifndef KMEM_MEMORY_STORAGE_H_
#define KMEM_MEMORY_STORAGE_H_

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace kmem {

class PageStorage {
 public:
  // Sizes are rounded up to this: a multiple of every page size in use.
  static constexpr size_t kGrain = size_t{64} << 10;
  // Twice this many allocations is what "lately" means: more than those of
  // large blocks in a training step, by far.
  static constexpr uint64_t kWindow = 1 << 15;

  static size_t Round(size_t bytes) {
    return (bytes + kGrain - 1) / kGrain * kGrain;
  }

  // Returns `Round(bytes)` bytes, or nullptr if the system has none left.
  void* Allocate(size_t bytes) {
    bytes = Round(bytes);
    std::unique_lock<std::mutex> lock(mutex_);
    if (++num_allocations_ % kWindow == 0) {
      previous_peak_ = std::exchange(peak_, in_use_);
    }
    auto fit = by_size_.lower_bound({bytes, nullptr});
    char* base;
    if (fit != by_size_.end()) {
      const auto [free_bytes, free_base] = *fit;
      base = free_base;
      Remove(free_base, free_bytes);
      if (free_bytes > bytes) Add(base + bytes, free_bytes - bytes);
    } else {
      // The lock is kept: to map is quick, pages are cleared when touched.
      base = Map(bytes);
      if (base == nullptr) {
        UnmapDownTo(0);
        base = Map(bytes);
        if (base == nullptr) return nullptr;
      }
    }
    in_use_ += bytes;
    peak_ = std::max(peak_, in_use_);
    UnmapSurplus();
    return base;
  }

  // `bytes` as they were asked for.
  void Free(void* block, size_t bytes) {
    bytes = Round(bytes);
    char* base = static_cast<char*>(block);
    std::lock_guard<std::mutex> lock(mutex_);
    in_use_ -= bytes;
    auto next = by_address_.lower_bound(base);
    if (next != by_address_.end() && next->first == base + bytes) {
      const auto [next_base, next_bytes] = *next;
      Remove(next_base, next_bytes);
      bytes += next_bytes;
    }
    next = by_address_.lower_bound(base);
    if (next != by_address_.begin()) {
      const auto [previous_base, previous_bytes] = *std::prev(next);
      if (previous_base + previous_bytes == base) {
        Remove(previous_base, previous_bytes);
        base = previous_base;
        bytes += previous_bytes;
      }
    }
    Add(base, bytes);
    UnmapSurplus();
  }

  // Gives every free page back to the system.
  void Trim() {
    std::lock_guard<std::mutex> lock(mutex_);
    UnmapDownTo(0);
  }

  size_t free_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return free_;
  }

  // A process that forks while another thread holds the lock would leave it
  // held for ever in the child.
  void Lock() { mutex_.lock(); }
  void Unlock() { mutex_.unlock(); }

 private:
  static char* Map(size_t bytes) {
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return base == MAP_FAILED ? nullptr : static_cast<char*>(base);
  }

  void Add(char* base, size_t bytes) {
    by_address_.emplace(base, bytes);
    by_size_.emplace(bytes, base);
    free_ += bytes;
  }

  void Remove(char* base, size_t bytes) {
    by_address_.erase(base);
    by_size_.erase({bytes, base});
    free_ -= bytes;
  }

  void UnmapSurplus() {
    const size_t peak = std::max(peak_, previous_peak_);
    const size_t bound = peak + peak / 4;
    UnmapDownTo(bound > in_use_ ? bound - in_use_ : 0);
  }

  // Unmaps free pages, of the largest range first, until `bytes` are left.
  void UnmapDownTo(size_t bytes) {
    while (free_ > bytes) {
      const auto [range_bytes, base] = *by_size_.rbegin();
      const size_t surplus = std::min(range_bytes, Round(free_ - bytes));
      Remove(base, range_bytes);
      if (range_bytes > surplus) Add(base, range_bytes - surplus);
      munmap(base + (range_bytes - surplus), surplus);
    }
  }

  std::mutex mutex_;
  // The free ranges, no two of which touch.
  std::map<char*, size_t> by_address_;
  std::set<std::pair<size_t, char*>> by_size_;
  size_t free_ = 0;
  size_t in_use_ = 0;
  size_t peak_ = 0;
  size_t previous_peak_ = 0;
  uint64_t num_allocations_ = 0;
};

}  // namespace kmem

#endif  // KMEM_MEMORY_STORAGE_H_
