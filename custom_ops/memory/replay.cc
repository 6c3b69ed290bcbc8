#include "replay.h"

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "pools.h"

namespace kmem {

std::vector<Event> WithPast(int64_t held_bytes, const Event* events,
                            size_t num_events) {
  std::vector<Event> past;
  std::unordered_set<int64_t> made;
  for (size_t i = 0; i < num_events; ++i) {
    const Event& event = events[i];
    if (event.bytes > 0) {
      made.insert(event.address);
    } else if (made.insert(event.address).second) {
      past.push_back({event.address, -event.bytes});
      held_bytes += event.bytes;
    }
  }
  constexpr int64_t kNowhere = 0;
  if (held_bytes > 0) past.insert(past.begin(), {kNowhere, held_bytes});
  past.insert(past.end(), events, events + num_events);
  return past;
}

bool FitsInPool(PoolKind kind, int64_t pool_bytes,
                const std::vector<Event>& events) {
  // Addresses alone: nobody writes there.
  void* region = mmap(nullptr, pool_bytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region == MAP_FAILED) return false;
  bool fits = true;
  {
    std::unique_ptr<Pool> pool = MakePool(kind, region, pool_bytes);
    std::unordered_map<int64_t, void*> blocks;
    for (const Event& event : events) {
      if (event.bytes > 0) {
        void* block = pool->Allocate(event.bytes);
        fits = block != nullptr;
        if (!fits) break;
        blocks[event.address] = block;
        continue;
      }
      const auto found = blocks.find(event.address);
      if (found == blocks.end()) continue;
      pool->Free(found->second);
      blocks.erase(found);
    }
  }
  munmap(region, pool_bytes);
  return fits;
}

int64_t LivePeak(const std::vector<Event>& events) {
  int64_t live = 0, peak = 0;
  for (const Event& event : events) {
    live += event.bytes;
    peak = std::max(peak, live);
  }
  return peak;
}

int64_t LeastPool(PoolKind kind, const std::vector<Event>& events) {
  // Enough for all blocks beside each other, so that the search ends.
  int64_t most = Pool::kGrain;
  for (const Event& event : events) {
    if (event.bytes > 0) most += Pool::Round(event.bytes);
  }
  int64_t fails = LivePeak(events);
  int64_t works = fails + fails / 64 + Pool::kGrain;
  while (works < most && !FitsInPool(kind, works, events)) {
    fails = works;
    works += works / 16;
  }
  while (works - fails > works / 1000) {
    const int64_t middle = fails + (works - fails) / 2;
    if (FitsInPool(kind, middle, events)) {
      works = middle;
    } else {
      fails = middle;
    }
  }
  return works;
}

}  // namespace kmem
