// Which storage to evict: the one with the lowest score.

#ifndef KMEM_DTR_HEURISTIC_H_
#define KMEM_DTR_HEURISTIC_H_

#include <cstdint>
#include <memory>
#include <string>

#include "graph.h"

namespace kmem::dtr {

class Heuristic {
 public:
  virtual ~Heuristic() = default;

  // Of a storage that is resident. `now` is the runtime's clock.
  virtual double Score(Storage& storage, int64_t now) = 0;

  // As in cost.h.
  virtual void Evicted(Storage& /*storage*/) {}
  virtual void Restored(Storage& /*storage*/) {}
  virtual int64_t num_accesses() const = 0;
};

// By name, or nullptr if there is none of that name:
//   dtr_eq          cost of the evicted classes / (bytes x staleness)
//   dtr             cost of the evicted neighbourhood / (bytes x staleness)
//   local           its own cost / (bytes x staleness)
//   msps            cost of the evicted ancestors / bytes
//   ancestors       that / square root of the staleness: a mean of both
//   size_staleness  1 / (bytes x staleness)
//   lru             1 / staleness
//   random          drawn from `seed`
std::unique_ptr<Heuristic> MakeHeuristic(const std::string& name,
                                         uint64_t seed);

}  // namespace kmem::dtr

#endif  // KMEM_DTR_HEURISTIC_H_
