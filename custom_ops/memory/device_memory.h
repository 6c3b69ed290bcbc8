// The memory of a device as kmem sees it: how much of it may be in use, who
// gives something up when that is not enough, and the pool that blocks come
// from, if there is one.
//
// Plain C++17, no TensorFlow.

#ifndef KMEM_MEMORY_DEVICE_MEMORY_H_
#define KMEM_MEMORY_DEVICE_MEMORY_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "budget.h"
#include "evictor.h"
#include "pool.h"
#include "recording.h"

namespace kmem {

class DeviceMemory {
 public:
  Budget* budget() { return &budget_; }

  // The limit is never above the pool's size.
  bool SetLimit(int64_t limit) {
    return budget_.SetLimit(std::min(limit, pool_bytes_.load()));
  }

  // What TensorFlow takes of the device; 0 if that is not known.
  int64_t size() const { return size_; }
  void SetSize(int64_t bytes) { size_ = bytes; }

  // Whom to ask before a request is refused or granted above the limit; nobody
  // if it is nullptr. It must never be destroyed.
  void SetEvictor(Evictor* evictor) { evictor_ = evictor; }
  Evictor* evictor() const { return evictor_; }

  // Has blocks come from a pool of this size. Returns false if it is too late:
  // there have been some.
  bool AskForPool(PoolKind kind, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_decided_) return false;
    kind_ = kind;
    pool_bytes_ = bytes;
    return SetLimit(bytes);
  }

  // The pool, if one was asked for. The first call makes it, with
  // `make(kind, bytes)`.
  template <typename Make>
  Pool* PoolMadeBy(Make make) {
    if (!is_decided_.load(std::memory_order_acquire)) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!is_decided_ && kind_ != PoolKind::kNone) {
        pool_ = make(kind_, pool_bytes_.load());
      }
      is_decided_.store(true, std::memory_order_release);
    }
    return pool_.get();
  }

  PoolKind pool_kind() const { return kind_; }

  // Returns false if no pool was asked for.
  bool GetPoolUsage(PoolUsage* usage) const {
    if (pool_bytes_ == Budget::kNoLimit) return false;
    usage->size = usage->largest_free = pool_bytes_;
    if (const Pool* made = pool()) *usage = made->usage();
    return true;
  }

  // Where requests are written down, if they are.
  Recording* recording() const { return recording_; }
  void SetRecording(Recording* recording) { recording_ = recording; }

  // nullptr if there is none, or not yet.
  Pool* pool() const {
    return is_decided_.load(std::memory_order_acquire) ? pool_.get() : nullptr;
  }

 private:
  Budget budget_;
  std::atomic<int64_t> size_{0};
  std::atomic<Evictor*> evictor_{nullptr};
  std::atomic<Recording*> recording_{nullptr};
  std::mutex mutex_;
  std::atomic<bool> is_decided_{false};
  PoolKind kind_ = PoolKind::kNone;
  std::atomic<int64_t> pool_bytes_{Budget::kNoLimit};
  std::unique_ptr<Pool> pool_;
};

constexpr int kMostDevices = 65;

// Number 0 is the CPU's, number i + 1 that of GPU i. Never destroyed: tensors
// outlive static destructors.
inline DeviceMemory* MemoryOf(int number) {
  static DeviceMemory* memories = new DeviceMemory[kMostDevices];
  return memories + number;
}

inline DeviceMemory* MemoryOfCpu() { return MemoryOf(0); }
inline DeviceMemory* MemoryOfGpu(int index) { return MemoryOf(index + 1); }

}  // namespace kmem

#endif  // KMEM_MEMORY_DEVICE_MEMORY_H_
