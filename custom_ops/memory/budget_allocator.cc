#include "budget_allocator.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>

#include "xla/tsl/framework/allocator_registry.h"

namespace kmem {
namespace {

constexpr size_t kAlignment = tsl::Allocator::kAllocatorAlignment;
constexpr size_t kLargestRequest = size_t{1} << 62;
// Blocks from this size on come as pages; malloc is quick with smaller ones.
constexpr size_t kLargeBytes = size_t{256} << 10;

// Stands right before the bytes that are handed out.
struct Header {
  uint64_t requested_bytes;
  uint32_t offset;  // From the start of the block to the bytes handed out.
  uint32_t alignment;
};
static_assert(sizeof(Header) == 16, "malloc aligns to 16 bytes");

Header* HeaderOf(const void* ptr) {
  return static_cast<Header*>(const_cast<void*>(ptr)) - 1;
}

// What a request counts for: TensorFlow aligns to 64 bytes, so that is the
// grain. Depends on the request alone, hence repeats from run to run.
size_t CountedBytes(size_t requested) {
  return (std::max(requested, size_t{1}) + kAlignment - 1) & ~(kAlignment - 1);
}

// From a refusal until the thread allocates again.
thread_local bool xla_was_refused = false;

std::atomic<Evictor*> the_evictor{nullptr};

bool MakeRoom(int64_t bytes) {
  Evictor* evictor = the_evictor.load();
  return evictor != nullptr && evictor->MakeRoom(bytes);
}

}  // namespace

void SetEvictor(Evictor* evictor) { the_evictor = evictor; }

// Never destroyed: tensors outlive static destructors.
Budget* TheBudget() {
  static Budget* budget = new Budget;
  return budget;
}

std::string BudgetAllocator::Name() {
  const int64_t limit = budget_->limit();
  if (limit == Budget::kNoLimit) return "kmem_cpu";
  return "kmem_cpu, limited to " + std::to_string(limit) + " bytes, of which " +
         std::to_string(budget_->in_use()) + " are in use";
}

void* BudgetAllocator::AllocateRaw(size_t alignment, size_t num_bytes) {
  return Allocate(alignment, num_bytes, Attributes::kNone);
}

void* BudgetAllocator::AllocateRaw(
    size_t alignment, size_t num_bytes,
    const tsl::AllocationAttributes& attributes) {
  return Allocate(alignment, num_bytes,
                  attributes.allocation_will_be_logged ? Attributes::kKernel
                                                       : Attributes::kOther);
}

bool BudgetAllocator::Reserve(size_t bytes, Attributes attributes) {
  xla_was_refused = false;
  bool fits = budget_->Reserve(bytes);
  // Another thread may be quicker to take what was made free.
  while (!fits && MakeRoom(bytes)) fits = budget_->Reserve(bytes);
  if (fits && !budget_->owes()) return true;
  const Caller caller = FindCaller(attributes);
  if (caller == Caller::kNoticesFailure || caller == Caller::kXla) {
    xla_was_refused = caller == Caller::kXla;
    if (fits) budget_->Release(bytes);
    budget_->Refuse(bytes);
    return false;
  }
  if (!fits) budget_->ReserveAboveLimit(bytes, caller == Caller::kOneDnn);
  return true;
}

void* BudgetAllocator::Allocate(size_t alignment, size_t num_bytes,
                                Attributes attributes) {
  if (num_bytes > kLargestRequest) return nullptr;
  const size_t counted = CountedBytes(num_bytes);
  if (!Reserve(counted, attributes)) return nullptr;

  // The header takes 16 of the bytes that are needed to align.
  alignment = std::max(alignment, kAlignment);
  const size_t block_bytes = counted + alignment;
  void* base = block_bytes >= kLargeBytes ? pages_->Allocate(block_bytes)
                                          : std::malloc(block_bytes);
  if (base == nullptr) {
    budget_->Release(counted);
    return nullptr;
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(base);
  const uintptr_t user =
      (start + sizeof(Header) + alignment - 1) & ~(alignment - 1);
  void* ptr = reinterpret_cast<void*>(user);
  *HeaderOf(ptr) = {num_bytes, static_cast<uint32_t>(user - start),
                    static_cast<uint32_t>(alignment)};
  return ptr;
}

void BudgetAllocator::DeallocateRaw(void* ptr) {
  if (ptr == nullptr) return;
  if (xla_was_refused && FreesArgumentsOfXla()) return;
  const Header header = *HeaderOf(ptr);
  void* base = static_cast<char*>(ptr) - header.offset;
  const size_t counted = CountedBytes(header.requested_bytes);
  const size_t block_bytes = counted + header.alignment;
  if (block_bytes >= kLargeBytes) {
    pages_->Free(base, block_bytes);
  } else {
    std::free(base);
  }
  // Last: until then the bytes are there.
  budget_->Release(counted);
}

// Both may be asked of a tensor whose allocation was refused.
size_t BudgetAllocator::RequestedSize(const void* ptr) const {
  return ptr == nullptr ? 0 : HeaderOf(ptr)->requested_bytes;
}

size_t BudgetAllocator::AllocatedSize(const void* ptr) const {
  return ptr == nullptr ? 0 : CountedBytes(HeaderOf(ptr)->requested_bytes);
}

std::optional<tsl::AllocatorStats> BudgetAllocator::GetStats() {
  tsl::AllocatorStats stats;
  stats.num_allocs = budget_->num_allocations();
  stats.bytes_in_use = budget_->in_use();
  stats.peak_bytes_in_use = budget_->peak();
  stats.largest_alloc_size = budget_->largest();
  if (budget_->limit() != Budget::kNoLimit) {
    stats.bytes_limit = budget_->limit();
  }
  stats.pool_bytes = stats.bytes_in_use + pages_->free_bytes();
  return stats;
}

bool BudgetAllocator::ClearStats() {
  budget_->ResetPeak();
  budget_->ResetCounts();
  return true;
}

namespace {

PageStorage* ThePages() {
  static PageStorage* pages = new PageStorage;
  return pages;
}

BudgetAllocator* TheAllocator() {
  static BudgetAllocator* allocator =
      new BudgetAllocator(TheBudget(), ThePages());
  return allocator;
}

// What TensorFlow asks for when it keeps a pool of its own on top, which it
// does when TF_CPU_ALLOCATOR_USE_BFC is set: then the budget counts the pool.
class BudgetSubAllocator : public tsl::SubAllocator {
 public:
  BudgetSubAllocator() : SubAllocator({}, {}) {}

  void* Alloc(size_t alignment, size_t num_bytes,
              size_t* bytes_received) override {
    *bytes_received = num_bytes;
    return TheAllocator()->AllocateRaw(alignment, num_bytes);
  }
  void Free(void* ptr, size_t) override { TheAllocator()->DeallocateRaw(ptr); }
  bool SupportsCoalescing() const override { return false; }
  tsl::AllocatorMemoryType GetMemoryType() const override {
    return tsl::AllocatorMemoryType::kHostPageable;
  }
};

std::atomic<bool> in_use_by_tensorflow{false};

class BudgetAllocatorFactory : public tsl::AllocatorFactory {
 public:
  tsl::Allocator* CreateAllocator() override {
    in_use_by_tensorflow = true;
    // The registry owns, and may delete, what it is given.
    return new BudgetAllocator(TheBudget(), ThePages());
  }
  tsl::SubAllocator* CreateSubAllocator(int) override {
    in_use_by_tensorflow = true;
    return new BudgetSubAllocator;
  }
};

// Above TensorFlow's own: 100 is the default one, 200 oneDNN's.
constexpr int kPriority = 1000;

void Register() {
  tsl::AllocatorFactoryRegistry::singleton()->Register(
      __FILE__, __LINE__, "kmem", kPriority, new BudgetAllocatorFactory);
}

// Whether Register would succeed. When TensorFlow has already allocated, it
// ends the process instead, and there is no way to ask beforehand; so a child
// process tries first.
bool CanRegister() {
  // A device exists: certainly too late, no need for a child.
  if (tsl::AllocatorFactoryRegistry::singleton()->process_state() != nullptr) {
    return false;
  }
  int ends[2];
  if (pipe(ends) != 0) return false;
  const pid_t child = fork();
  if (child == 0) {
    // Nobody wants to read the check failure, nor to find a core file.
    signal(SIGABRT, [](int) { _exit(1); });
    dup2(open("/dev/null", O_WRONLY), STDERR_FILENO);
    Register();
    const char yes = 1;
    _exit(write(ends[1], &yes, 1) == 1 ? 0 : 1);
  }
  close(ends[1]);
  bool registered = false;
  if (child > 0) {
    // The answer comes through the pipe, not through the exit status, which
    // a SIGCHLD handler of the program could take away from us.
    pollfd answer{ends[0], POLLIN, 0};
    const int kMilliseconds = 10000;
    char byte = 0;
    int ready;
    do {
      ready = poll(&answer, 1, kMilliseconds);
    } while (ready < 0 && errno == EINTR);
    registered = ready > 0 && read(ends[0], &byte, 1) == 1;
    if (ready <= 0) kill(child, SIGKILL);
    while (waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  close(ends[0]);
  return registered;
}

}  // namespace
}  // namespace kmem

// What Python calls, as declared in kmem/base/bindings.py.
extern "C" {

#define KMEM_EXPORT __attribute__((visibility("default")))

struct KmemStats {
  int64_t in_use;
  int64_t peak;
  int64_t limit;  // -1: none.
  int64_t largest;
  int64_t num_allocations;
  int64_t refused;
  int64_t cached;
};

// Returns false if it is too late: TensorFlow has already allocated.
KMEM_EXPORT bool kmem_register_allocator() {
  if (!kmem::CanRegister()) return false;
  kmem::Register();
  pthread_atfork([] { kmem::ThePages()->Lock(); },
                 [] { kmem::ThePages()->Unlock(); },
                 [] { kmem::ThePages()->Unlock(); });
  return true;
}

KMEM_EXPORT bool kmem_allocator_in_use() { return kmem::in_use_by_tensorflow; }

KMEM_EXPORT int64_t kmem_stats_bytes() { return sizeof(KmemStats); }

KMEM_EXPORT void kmem_stats(KmemStats* stats) {
  const kmem::Budget* budget = kmem::TheBudget();
  const int64_t limit = budget->limit();
  stats->in_use = budget->in_use();
  stats->peak = budget->peak();
  stats->limit = limit == kmem::Budget::kNoLimit ? -1 : limit;
  stats->largest = budget->largest();
  stats->num_allocations = budget->num_allocations();
  stats->refused = budget->refused();
  stats->cached = kmem::ThePages()->free_bytes();
}

// A negative limit means none. Returns false, and changes nothing, if more
// than `limit` is in use.
KMEM_EXPORT bool kmem_set_limit(int64_t limit) {
  kmem::ThePages()->Trim();
  return kmem::TheBudget()->SetLimit(limit < 0 ? kmem::Budget::kNoLimit
                                               : limit);
}

KMEM_EXPORT void kmem_reset_peak() { kmem::TheBudget()->ResetPeak(); }

KMEM_EXPORT int kmem_open_watermark() {
  return kmem::TheBudget()->OpenWatermark();
}

KMEM_EXPORT int64_t kmem_watermark(int number) {
  return kmem::TheBudget()->Watermark(number);
}

KMEM_EXPORT void kmem_close_watermark(int number) {
  kmem::TheBudget()->CloseWatermark(number);
}

}  // extern "C"
