// Which storages to evict for a block, in a memory where what is free lies in
// pieces (Zhang et al., "Coop: Memory is not a Commodity", NeurIPS 2023).
//
// To evict the cheapest storages, wherever they are, may free enough and leave
// no piece that is large enough. What goes here is a window: storages that lie
// side by side in the order of addresses, with what is free between them. Of
// all windows that are large enough it is the one that weighs least in sum,
// what is free weighing nothing. What cannot be evicted is in no window.
//
// Not done: Coop's placing of cheap and dear tensors at opposite ends, and its
// recomputation in place.

#ifndef KMEM_DTR_WINDOW_H_
#define KMEM_DTR_WINDOW_H_

#include <cstdint>
#include <vector>

#include "../memory/pool.h"
#include "graph.h"

namespace kmem::dtr {

// A storage that can be evicted, and what it weighs.
struct Occupant {
  Storage* storage;
  double weight;
};

// Of windows that weigh the same the one at the lowest address. Empty if there
// is none, or if a piece is free that is large enough.
std::vector<Storage*> CheapestWindow(const std::vector<Span>& layout,
                                     std::vector<Occupant> occupants,
                                     int64_t bytes);

}  // namespace kmem::dtr

#endif  // KMEM_DTR_WINDOW_H_
