// The seam: a device's own allocator, with a budget around it.
//
// It takes the place of the allocator for the whole process, so every tensor
// and every kernel's scratch memory on the device goes through it: eager,
// graph and XLA, from within operators. Over the limit, once the evictor has
// nothing more to give up, it returns nullptr, and TensorFlow raises its
// ResourceExhaustedError.
//
// With a pool (device_memory.h), blocks of a kilobyte or more come from there.
// Smaller ones come from the device's own allocator: on the CPU they are
// shapes, counters and the like, which a GPU's program keeps on the host.

#ifndef KMEM_MEMORY_BUDGET_ALLOCATOR_H_
#define KMEM_MEMORY_BUDGET_ALLOCATOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "caller.h"
#include "device_memory.h"
#include "xla/tsl/framework/allocator.h"

namespace kmem {

class BudgetAllocator : public tsl::AllocatorWrapper {
 public:
  static constexpr size_t kLeastPooledBytes = 1024;

  // `own` must track the sizes of its blocks; both must outlive it. With
  // `grants`, callers that do not expect a refusal get none (caller.h).
  BudgetAllocator(DeviceMemory* memory, tsl::Allocator* own, bool grants)
      : AllocatorWrapper(own), memory_(memory), grants_(grants) {}

  // TensorFlow ends its out-of-memory message with "by allocator" and this.
  std::string Name() override;

  void* AllocateRaw(size_t alignment, size_t num_bytes) override;
  void* AllocateRaw(size_t alignment, size_t num_bytes,
                    const tsl::AllocationAttributes& attributes) override;
  void DeallocateRaw(void* ptr) override;
  using tsl::Allocator::DeallocateRaw;  // With sizes, which it drops.

  size_t RequestedSize(const void* ptr) const override;
  size_t AllocatedSize(const void* ptr) const override;
  int64_t AllocationId(const void* ptr) const override;
  size_t AllocatedSizeSlow(const void* ptr) const override {
    return AllocatedSize(ptr);
  }

  std::optional<tsl::AllocatorStats> GetStats() override;
  bool ClearStats() override;
  void SetSafeFrontier(uint64_t count) override {
    wrapped()->SetSafeFrontier(count);
  }
  void SetStreamAndPreallocateMemory(void* stream) override {
    wrapped()->SetStreamAndPreallocateMemory(stream);
  }

 private:
  // A request, with what TensorFlow says of it.
  struct Request {
    size_t alignment;
    size_t num_bytes;
    Attributes who;
    std::function<uint64_t()>* freed_by;
    bool waits;
  };

  void* Allocate(const Request& request);
  bool Reserve(int64_t bytes, Attributes who);
  void* FindPlace(const Request& request, int64_t bytes);
  void* Take(const Request& request);
  void Note(void* ptr, int64_t bytes);
  Caller Refused(Attributes who);
  Pool* MadePool();

  DeviceMemory* const memory_;
  const bool grants_;
};

}  // namespace kmem

#endif  // KMEM_MEMORY_BUDGET_ALLOCATOR_H_
