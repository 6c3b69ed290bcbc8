#include "budget_allocator.h"

#include <algorithm>
#include <memory>

#include "pools.h"

namespace kmem {
namespace {

constexpr size_t kLargestRequest = size_t{1} << 62;

// What a request counts for: TensorFlow aligns to 64 bytes, so that is the
// grain. Depends on the request alone, hence repeats from run to run.
int64_t CountedBytes(size_t requested) {
  constexpr size_t kGrain = tsl::Allocator::kAllocatorAlignment;
  return (std::max(requested, size_t{1}) + kGrain - 1) & ~(kGrain - 1);
}

// From a refusal until the thread allocates again.
thread_local bool xla_was_refused = false;

}  // namespace

std::string BudgetAllocator::Name() {
  std::string name = wrapped()->Name();
  const int64_t limit = memory_->budget()->limit();
  if (limit == Budget::kNoLimit) return name;
  name += ", limited to " + std::to_string(limit) + " bytes, of which " +
          std::to_string(memory_->budget()->in_use()) + " are in use";
  const Pool* pool = memory_->pool();
  if (pool == nullptr) return name;
  const PoolUsage usage = pool->usage();
  return name + ", in a pool of " + std::to_string(usage.size) +
         " bytes, of which " + std::to_string(usage.size - usage.chunks) +
         " are free and " + std::to_string(usage.largest_free) +
         " in one piece";
}

void* BudgetAllocator::AllocateRaw(size_t alignment, size_t num_bytes) {
  return Allocate({alignment, num_bytes, Attributes::kNone, nullptr, true});
}

void* BudgetAllocator::AllocateRaw(
    size_t alignment, size_t num_bytes,
    const tsl::AllocationAttributes& attributes) {
  return Allocate({alignment, num_bytes,
                   attributes.allocation_will_be_logged ? Attributes::kKernel
                                                        : Attributes::kOther,
                   attributes.freed_by_func, attributes.retry_on_failure});
}

void* BudgetAllocator::Allocate(const Request& request) {
  if (request.num_bytes > kLargestRequest) return nullptr;
  Budget* budget = memory_->budget();
  const int64_t bytes = CountedBytes(request.num_bytes);
  xla_was_refused = false;
  if (!Reserve(bytes, request.who)) {
    budget->Refuse(bytes);
    return nullptr;
  }
  void* ptr = FindPlace(request, bytes);
  if (ptr == nullptr) {
    budget->Release(bytes);
    budget->Refuse(bytes);
    return nullptr;
  }
  if (request.num_bytes >= kLeastPooledBytes) Note(ptr, request.num_bytes);
  return ptr;
}

void BudgetAllocator::Note(void* ptr, int64_t bytes) {
  if (Recording* recording = memory_->recording()) recording->Add(ptr, bytes);
}

void* BudgetAllocator::FindPlace(const Request& request, int64_t bytes) {
  void* ptr = Take(request);
  // It fits, but there is no piece that is large enough.
  for (Evictor* evictor = memory_->evictor();
       ptr == nullptr && evictor != nullptr && evictor->MakeBlock(bytes);) {
    ptr = Take(request);
  }
  if (ptr != nullptr) return ptr;
  const Caller caller = Refused(request.who);
  if (caller == Caller::kHostData || caller == Caller::kOneDnn) {
    // From beside the pool.
    ptr = wrapped()->AllocateRaw(request.alignment, request.num_bytes);
    if (caller == Caller::kOneDnn) memory_->budget()->Owe();
  }
  return ptr;
}

bool BudgetAllocator::Reserve(int64_t bytes, Attributes who) {
  Budget* budget = memory_->budget();
  bool fits = budget->Reserve(bytes);
  // Another thread may be quicker to take what was made free.
  for (Evictor* evictor = memory_->evictor();
       !fits && evictor != nullptr && evictor->MakeRoom(bytes);) {
    fits = budget->Reserve(bytes);
  }
  if (fits && !budget->owes()) return true;
  const Caller caller = Refused(who);
  if (caller == Caller::kNoticesFailure || caller == Caller::kXla) {
    if (fits) budget->Release(bytes);
    return false;
  }
  if (!fits) budget->ReserveAboveLimit(bytes, caller == Caller::kOneDnn);
  return true;
}

// Who asks for what there is no room for.
Caller BudgetAllocator::Refused(Attributes who) {
  Caller caller = FindCaller(who);
  if (!grants_ && caller != Caller::kXla) caller = Caller::kNoticesFailure;
  xla_was_refused = caller == Caller::kXla;
  return caller;
}

void* BudgetAllocator::Take(const Request& request) {
  Pool* pool =
      request.num_bytes >= kLeastPooledBytes ? MadePool() : nullptr;
  if (pool != nullptr && request.alignment <= Pool::kGrain) {
    return pool->Allocate(request.num_bytes);
  }
  // Not for TensorFlow to wait for others to free memory, if it can be made.
  const bool waits = request.waits && memory_->evictor() == nullptr;
  return wrapped()->AllocateRaw(
      request.alignment, request.num_bytes,
      {waits, request.who == Attributes::kKernel, request.freed_by});
}

Pool* BudgetAllocator::MadePool() {
  return memory_->PoolMadeBy([this](PoolKind kind, int64_t bytes) {
    void* region = wrapped()->AllocateRaw(Pool::kGrain, bytes);
    // One of no bytes refuses everything.
    return MakePool(kind, region, region == nullptr ? 0 : bytes);
  });
}

void BudgetAllocator::DeallocateRaw(void* ptr) {
  if (ptr == nullptr) return;
  if (xla_was_refused && FreesArgumentsOfXla()) return;
  const size_t requested = RequestedSize(ptr);
  if (requested >= kLeastPooledBytes) {
    Note(ptr, -static_cast<int64_t>(requested));
  }
  Pool* pool = memory_->pool();
  if (pool != nullptr && pool->Owns(ptr)) {
    pool->Free(ptr);
  } else {
    wrapped()->DeallocateRaw(ptr);
  }
  // Last: until then the bytes are there.
  memory_->budget()->Release(CountedBytes(requested));
}

// All three may be asked of a tensor whose allocation was refused.
size_t BudgetAllocator::RequestedSize(const void* ptr) const {
  if (ptr == nullptr) return 0;
  const Pool* pool = memory_->pool();
  return pool != nullptr && pool->Owns(ptr) ? pool->BytesOf(ptr)
                                            : wrapped()->RequestedSize(ptr);
}

size_t BudgetAllocator::AllocatedSize(const void* ptr) const {
  return ptr == nullptr ? 0 : CountedBytes(RequestedSize(ptr));
}

int64_t BudgetAllocator::AllocationId(const void* ptr) const {
  const Pool* pool = memory_->pool();
  const bool is_own = ptr != nullptr && !(pool && pool->Owns(ptr));
  return is_own ? wrapped()->AllocationId(ptr) : 0;
}

std::optional<tsl::AllocatorStats> BudgetAllocator::GetStats() {
  tsl::AllocatorStats stats =
      wrapped()->GetStats().value_or(tsl::AllocatorStats());
  const Budget* budget = memory_->budget();
  stats.num_allocs = budget->num_allocations();
  stats.bytes_in_use = budget->in_use();
  stats.peak_bytes_in_use = budget->peak();
  stats.largest_alloc_size = budget->largest();
  if (budget->limit() < stats.bytes_limit.value_or(Budget::kNoLimit)) {
    stats.bytes_limit = budget->limit();
  }
  return stats;
}

bool BudgetAllocator::ClearStats() {
  memory_->budget()->ResetPeak();
  memory_->budget()->ResetCounts();
  return true;
}

}  // namespace kmem
