// Tests: tests/gpu, and on a CPU that TensorFlow takes this class,
// tests/test_memory.py.

#include "gpu.h"

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "budget_allocator.h"
#include "tensorflow/core/common_runtime/gpu/gpu_process_state.h"

namespace kmem {
namespace {

class BudgetedGpus : public tensorflow::GPUProcessState {
 public:
  tensorflow::Allocator* GetGPUAllocator(
      const tensorflow::GPUOptions& options, tsl::TfDeviceId device,
      size_t total_bytes,
      const std::vector<tsl::TfDeviceId>& peers) override {
    tensorflow::Allocator* own = GPUProcessState::GetGPUAllocator(
        options, device, total_bytes, peers);
    // It tracks sizes unless TF_GPU_ALLOCATOR asks for one that does not.
    if (own == nullptr || !own->TracksAllocationSizes()) return own;
    const int index = device.value();
    if (index + 1 >= kMostDevices) return own;
    MemoryOfGpu(index)->SetSize(total_bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<BudgetAllocator>& budgeted = allocators_[own];
    if (budgeted == nullptr) {
      budgeted = std::make_unique<BudgetAllocator>(MemoryOfGpu(index), own,
                                                   /*grants=*/false);
    }
    return budgeted.get();
  }

 private:
  std::mutex mutex_;
  std::map<tensorflow::Allocator*, std::unique_ptr<BudgetAllocator>>
      allocators_;
};

}  // namespace

bool RegisterOnGpus() {
  tensorflow::GPUProcessState* ours = new BudgetedGpus;  // Never destroyed.
  return tensorflow::GPUProcessState::singleton(ours) == ours;
}

}  // namespace kmem
