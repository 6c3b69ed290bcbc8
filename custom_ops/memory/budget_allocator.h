// TensorFlow's CPU allocator, with a budget.
//
// It takes the place of TensorFlow's own for the whole process, so every
// tensor and every kernel's scratch memory on the CPU goes through it: eager,
// graph and XLA. Over the limit it returns nullptr, and TensorFlow raises the
// same ResourceExhaustedError as on a full GPU.

#ifndef KMEM_MEMORY_BUDGET_ALLOCATOR_H_
#define KMEM_MEMORY_BUDGET_ALLOCATOR_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "budget.h"
#include "caller.h"
#include "evictor.h"
#include "storage.h"
#include "xla/tsl/framework/allocator.h"

namespace kmem {

class BudgetAllocator : public tsl::Allocator {
 public:
  BudgetAllocator(Budget* budget, PageStorage* pages)
      : budget_(budget), pages_(pages) {}

  // TensorFlow ends its out-of-memory message with "by allocator" and this.
  std::string Name() override;

  void* AllocateRaw(size_t alignment, size_t num_bytes) override;
  void* AllocateRaw(size_t alignment, size_t num_bytes,
                    const tsl::AllocationAttributes& attributes) override;
  void DeallocateRaw(void* ptr) override;
  using tsl::Allocator::DeallocateRaw;  // With sizes, which it drops.

  bool TracksAllocationSizes() const override { return true; }
  size_t RequestedSize(const void* ptr) const override;
  size_t AllocatedSize(const void* ptr) const override;

  std::optional<tsl::AllocatorStats> GetStats() override;
  bool ClearStats() override;

  tsl::AllocatorMemoryType GetMemoryType() const override {
    return tsl::AllocatorMemoryType::kHostPageable;
  }

 private:
  bool Reserve(size_t bytes, Attributes attributes);
  void* Allocate(size_t alignment, size_t num_bytes, Attributes attributes);

  Budget* const budget_;
  PageStorage* const pages_;
};

// That of TensorFlow's allocator.
Budget* TheBudget();

// Asks `evictor`, which must never be destroyed, before a request is refused
// or granted above the limit; nobody if it is nullptr.
void SetEvictor(Evictor* evictor);

}  // namespace kmem

#endif  // KMEM_MEMORY_BUDGET_ALLOCATOR_H_
