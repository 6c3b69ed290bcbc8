// The CPU's own allocator, without a budget: in the place of TensorFlow's,
// whose blocks it could not tell the size of.

#ifndef KMEM_MEMORY_HOST_ALLOCATOR_H_
#define KMEM_MEMORY_HOST_ALLOCATOR_H_

#include <cstddef>
#include <optional>
#include <string>

#include "storage.h"
#include "xla/tsl/framework/allocator.h"

namespace kmem {

class HostAllocator : public tsl::Allocator {
 public:
  std::string Name() override { return "kmem_cpu"; }

  void* AllocateRaw(size_t alignment, size_t num_bytes) override;
  void DeallocateRaw(void* ptr) override;
  using tsl::Allocator::AllocateRaw;
  using tsl::Allocator::DeallocateRaw;  // With sizes, which it drops.

  bool TracksAllocationSizes() const override { return true; }
  size_t RequestedSize(const void* ptr) const override;

  std::optional<tsl::AllocatorStats> GetStats() override;

  tsl::AllocatorMemoryType GetMemoryType() const override {
    return tsl::AllocatorMemoryType::kHostPageable;
  }

  PageStorage* pages() { return &pages_; }

 private:
  PageStorage pages_;
};

// The process's. Never destroyed.
HostAllocator* TheHostAllocator();

}  // namespace kmem

#endif  // KMEM_MEMORY_HOST_ALLOCATOR_H_
