#include "pools.h"

#include "best_fit_pool.h"
#include "xla/tsl/framework/allocator.h"
#include "xla/tsl/framework/bfc_allocator.h"

namespace kmem {
namespace {

// Gives out the region, once.
class Region : public tsl::SubAllocator {
 public:
  Region(void* start, size_t bytes)
      : SubAllocator({}, {}), start_(start), bytes_(bytes) {}

  void* Alloc(size_t, size_t num_bytes, size_t* bytes_received) override {
    if (is_taken_ || num_bytes > bytes_) return nullptr;
    is_taken_ = true;
    *bytes_received = num_bytes;
    return start_;
  }
  void Free(void*, size_t) override { is_taken_ = false; }
  bool SupportsCoalescing() const override { return false; }
  tsl::AllocatorMemoryType GetMemoryType() const override {
    return tsl::AllocatorMemoryType::kDevice;
  }

 private:
  void* const start_;
  const size_t bytes_;
  bool is_taken_ = false;
};

// What a GPUBFCAllocator is set to by default. That class itself reads other
// settings from the environment, such as a region that is taken in steps.
tsl::BFCAllocator::Options AsOnGpus() {
  tsl::BFCAllocator::Options options;
  options.allow_growth = false;
  options.garbage_collection = true;
  return options;
}

// TensorFlow cuts it, as it does a GPU's memory.
class BfcPool : public Pool {
 public:
  BfcPool(void* region, size_t bytes)
      : Pool(region, bytes),
        bfc_(std::make_unique<Region>(region, bytes), bytes, "kmem_pool",
             AsOnGpus()) {}

 protected:
  std::pair<char*, size_t> Take(size_t bytes) override {
    // TensorFlow would warn, and where a pool is tried that is no failure.
    if (LargestFree() < static_cast<int64_t>(Round(bytes))) return {nullptr, 0};
    tsl::AllocationAttributes attributes;
    attributes.retry_on_failure = false;  // It would wait for ten seconds.
    void* chunk = bfc_.AllocateRaw(kGrain, bytes, attributes);
    if (chunk == nullptr) return {nullptr, 0};
    return {static_cast<char*>(chunk), bfc_.AllocatedSize(chunk)};
  }
  void Give(char* chunk, size_t) override { bfc_.DeallocateRaw(chunk); }

 private:
  tsl::BFCAllocator bfc_;
};

}  // namespace

std::unique_ptr<Pool> MakePool(PoolKind kind, void* region, size_t bytes) {
  if (kind == PoolKind::kBfc) return std::make_unique<BfcPool>(region, bytes);
  return std::make_unique<BestFitPool>(region, bytes);
}

}  // namespace kmem
