// What it would cost to make a storage again: the numerator of a heuristic.

#ifndef KMEM_DTR_COST_H_
#define KMEM_DTR_COST_H_

#include <cstdint>

#include "graph.h"

namespace kmem::dtr {

class Cost {
 public:
  virtual ~Cost() = default;

  // Of a storage that is resident, were it evicted now.
  virtual int64_t Nanoseconds(Storage& storage) = 0;

  // `storage` has just lost its bytes.
  virtual void Evicted(Storage& /*storage*/) {}
  // `storage` has its bytes again, or is about to leave the graph.
  virtual void Restored(Storage& /*storage*/) {}

  // How many storages were looked at: what deciding costs.
  int64_t num_accesses() const { return num_accesses_; }

 protected:
  int64_t num_accesses_ = 0;
};

// All the same.
class UnitCost : public Cost {
 public:
  int64_t Nanoseconds(Storage&) override {
    ++num_accesses_;
    return 1;
  }
};

// Its own operators, as if all that they read were there.
class OwnCost : public Cost {
 public:
  int64_t Nanoseconds(Storage& storage) override {
    ++num_accesses_;
    return storage.nanoseconds;
  }
};

}  // namespace kmem::dtr

#endif  // KMEM_DTR_COST_H_
