// Replays what was recorded, in a pool that nobody uses.
//
// What was in use before is there in the replay as well: blocks that the
// recording gives back, each by itself, and the rest as one. Where they lay is
// not known; in a program that trains they are the oldest, and lie together.

#ifndef KMEM_MEMORY_REPLAY_H_
#define KMEM_MEMORY_REPLAY_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pool.h"
#include "recording.h"

namespace kmem {

// The events, after those that made the `held_bytes` there were before.
std::vector<Event> WithPast(int64_t held_bytes, const Event* events,
                            size_t num_events);

// Whether every block finds a place.
bool FitsInPool(PoolKind kind, int64_t pool_bytes,
                const std::vector<Event>& events);

// The size of a pool in which every block finds a place, to a thousandth: by
// halving the distance between one that is too small and one that is not.
int64_t LeastPool(PoolKind kind, const std::vector<Event>& events);

// The most bytes that are live together.
int64_t LivePeak(const std::vector<Event>& events);

}  // namespace kmem

#endif  // KMEM_MEMORY_REPLAY_H_
