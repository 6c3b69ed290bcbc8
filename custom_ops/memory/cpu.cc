// Puts kmem's allocator in the place of TensorFlow's on the CPU.

#include "cpu.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "budget_allocator.h"
#include "host_allocator.h"
#include "xla/tsl/framework/allocator_registry.h"

namespace kmem {
namespace {

BudgetAllocator* NewAllocator() {
  return new BudgetAllocator(MemoryOfCpu(), TheHostAllocator(),
                             /*grants=*/true);
}

// What TensorFlow asks for when it keeps a pool of its own on top, which it
// does when TF_CPU_ALLOCATOR_USE_BFC is set: then the budget counts the pool.
class BudgetSubAllocator : public tsl::SubAllocator {
 public:
  BudgetSubAllocator() : SubAllocator({}, {}), allocator_(NewAllocator()) {}

  void* Alloc(size_t alignment, size_t num_bytes,
              size_t* bytes_received) override {
    *bytes_received = num_bytes;
    return allocator_->AllocateRaw(alignment, num_bytes);
  }
  void Free(void* ptr, size_t) override { allocator_->DeallocateRaw(ptr); }
  bool SupportsCoalescing() const override { return false; }
  tsl::AllocatorMemoryType GetMemoryType() const override {
    return tsl::AllocatorMemoryType::kHostPageable;
  }

 private:
  BudgetAllocator* const allocator_;
};

// The registry owns, and may delete, what it is given.
class BudgetAllocatorFactory : public tsl::AllocatorFactory {
 public:
  tsl::Allocator* CreateAllocator() override { return NewAllocator(); }
  tsl::SubAllocator* CreateSubAllocator(int) override {
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

void Lock() {
  TheHostAllocator()->pages()->Lock();
  if (Pool* pool = MemoryOfCpu()->pool()) pool->Lock();
}

void Unlock() {
  if (Pool* pool = MemoryOfCpu()->pool()) pool->Unlock();
  TheHostAllocator()->pages()->Unlock();
}

}  // namespace

bool RegisterOnCpu() {
  if (!CanRegister()) return false;
  Register();
  pthread_atfork(Lock, Unlock, Unlock);
  return true;
}

}  // namespace kmem
