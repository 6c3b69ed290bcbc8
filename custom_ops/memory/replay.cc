#include "replay.h"

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "pools.h"

namespace kmem {

bool FitsInPool(PoolKind kind, int64_t pool_bytes, const Event* events,
                size_t num_events) {
  // Addresses alone: nobody writes there.
  void* region = mmap(nullptr, pool_bytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region == MAP_FAILED) return false;
  bool fits = true;
  {
    std::unique_ptr<Pool> pool = MakePool(kind, region, pool_bytes);
    std::unordered_map<int64_t, void*> blocks;
    for (size_t i = 0; i < num_events && fits; ++i) {
      if (events[i].bytes > 0) {
        void* block = pool->Allocate(events[i].bytes);
        fits = block != nullptr;
        blocks[events[i].address] = block;
        continue;
      }
      const auto found = blocks.find(events[i].address);
      if (found == blocks.end()) continue;  // From before the recording.
      pool->Free(found->second);
      blocks.erase(found);
    }
  }
  munmap(region, pool_bytes);
  return fits;
}

int64_t LivePeak(const Event* events, size_t num_events) {
  std::unordered_map<int64_t, int64_t> blocks;
  int64_t live = 0, peak = 0;
  for (size_t i = 0; i < num_events; ++i) {
    int64_t& bytes = blocks[events[i].address];
    live += events[i].bytes - bytes;
    bytes = events[i].bytes;
    peak = std::max(peak, live);
  }
  return peak;
}

int64_t LeastPool(PoolKind kind, const Event* events, size_t num_events) {
  int64_t fails = LivePeak(events, num_events);
  int64_t works = fails + fails / 64 + Pool::kGrain;
  while (!FitsInPool(kind, works, events, num_events)) {
    fails = works;
    works += works / 16;
  }
  while (works - fails > works / 1000) {
    const int64_t middle = fails + (works - fails) / 2;
    if (FitsInPool(kind, middle, events, num_events)) {
      works = middle;
    } else {
      fails = middle;
    }
  }
  return works;
}

}  // namespace kmem
