// The budget: how many bytes are live, the most there have been, and the most
// there may be. Exact under concurrency: bytes are reserved before they are
// allocated, so `Reserve` never crosses the limit, not even for a moment.
//
// Every operation on the allocation path is a few relaxed atomics. Relaxed is
// enough because no other memory is published through these counters.
//
// Plain C++17, no TensorFlow.

#ifndef KMEM_MEMORY_BUDGET_H_
#define KMEM_MEMORY_BUDGET_H_

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>

namespace kmem {

class Budget {
 public:
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  static constexpr int kNumWatermarks = 64;

  // Reserves `bytes`, or returns false if that would cross the limit.
  bool Reserve(int64_t bytes) {
    const int64_t limit = limit_.load(std::memory_order_relaxed);
    int64_t before = in_use_.load(std::memory_order_relaxed);
    do {
      // Not `before + bytes > limit`: that sum could overflow.
      if (bytes > limit - before) return false;
    } while (!in_use_.compare_exchange_weak(before, before + bytes,
                                            std::memory_order_relaxed));
    Count(bytes, before + bytes);
    return true;
  }

  // Reserves `bytes` in any case, for a caller that cannot be refused. With
  // `owed`, the next one that can be should be: see `owes`.
  void ReserveAboveLimit(int64_t bytes, bool owed) {
    const int64_t before =
        in_use_.fetch_add(bytes, std::memory_order_relaxed);
    Count(bytes, before + bytes);
    if (owed) Owe();
  }

  void Owe() { owes_.store(true, std::memory_order_relaxed); }

  // Whether an error is still due for bytes above the limit.
  bool owes() const { return owes_.load(std::memory_order_relaxed); }

  // To be called when a request is refused.
  void Refuse(int64_t bytes) {
    refused_.store(bytes, std::memory_order_relaxed);
    owes_.store(false, std::memory_order_relaxed);
  }

  void Release(int64_t bytes) {
    in_use_.fetch_sub(bytes, std::memory_order_relaxed);
  }

  // Returns false, and changes nothing, if more than `limit` is in use.
  bool SetLimit(int64_t limit) {
    const int64_t before = limit_.exchange(limit);
    if (in_use_.load() <= limit) {
      owes_.store(false);
      return true;
    }
    limit_.store(before);
    return false;
  }

  // The peak becomes what is in use now; open watermarks are untouched.
  void ResetPeak() { peak_.store(in_use_.load()); }

  void ResetCounts() {
    largest_.store(0);
    num_allocations_.store(0);
  }

  // A watermark is a peak of its own, from the moment it is opened. Returns
  // its number, or -1 if all are taken.
  int OpenWatermark() {
    std::lock_guard<std::mutex> lock(watermarks_mutex_);
    const uint64_t open = open_.load();
    if (~open == 0) return -1;
    const int number = __builtin_ctzll(~open);
    watermarks_[number].store(in_use_.load());
    open_.store(open | (uint64_t{1} << number));
    return number;
  }

  int64_t Watermark(int number) const { return watermarks_[number].load(); }

  void CloseWatermark(int number) {
    std::lock_guard<std::mutex> lock(watermarks_mutex_);
    open_.store(open_.load() & ~(uint64_t{1} << number));
  }

  int64_t in_use() const { return in_use_.load(std::memory_order_relaxed); }
  int64_t peak() const { return peak_.load(std::memory_order_relaxed); }
  int64_t limit() const { return limit_.load(std::memory_order_relaxed); }
  int64_t largest() const { return largest_.load(std::memory_order_relaxed); }
  int64_t num_allocations() const {
    return num_allocations_.load(std::memory_order_relaxed);
  }
  // Size of the request that was refused last; 0 if none ever was.
  int64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  void Count(int64_t bytes, int64_t now) {
    Raise(peak_, now);
    for (uint64_t open = open_.load(std::memory_order_relaxed); open != 0;
         open &= open - 1) {
      Raise(watermarks_[__builtin_ctzll(open)], now);
    }
    Raise(largest_, bytes);
    num_allocations_.fetch_add(1, std::memory_order_relaxed);
  }

  static void Raise(std::atomic<int64_t>& mark, int64_t value) {
    int64_t seen = mark.load(std::memory_order_relaxed);
    while (seen < value && !mark.compare_exchange_weak(
                               seen, value, std::memory_order_relaxed)) {
    }
  }

  std::atomic<int64_t> in_use_{0};
  std::atomic<int64_t> peak_{0};
  std::atomic<int64_t> limit_{kNoLimit};
  std::atomic<int64_t> largest_{0};
  std::atomic<int64_t> num_allocations_{0};
  std::atomic<int64_t> refused_{0};
  std::atomic<bool> owes_{false};
  std::mutex watermarks_mutex_;  // Not for allocating: they only read.
  std::atomic<uint64_t> open_{0};  // One bit for each open watermark.
  std::atomic<int64_t> watermarks_[kNumWatermarks] = {};
};

}  // namespace kmem

#endif  // KMEM_MEMORY_BUDGET_H_
