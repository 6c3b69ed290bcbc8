// Replays what was recorded, in a pool that nobody uses.

#ifndef KMEM_MEMORY_REPLAY_H_
#define KMEM_MEMORY_REPLAY_H_

#include <cstddef>
#include <cstdint>

#include "pool.h"
#include "recording.h"

namespace kmem {

// Whether every block finds a place.
bool FitsInPool(PoolKind kind, int64_t pool_bytes, const Event* events,
                size_t num_events);

// The size of a pool in which every block finds a place, to a thousandth: by
// halving the distance between one that is too small and one that is not.
int64_t LeastPool(PoolKind kind, const Event* events, size_t num_events);

// The most bytes that are live together.
int64_t LivePeak(const Event* events, size_t num_events);

}  // namespace kmem

#endif  // KMEM_MEMORY_REPLAY_H_
