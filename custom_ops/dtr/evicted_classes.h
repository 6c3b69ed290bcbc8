// The cost of h_DTR_eq (Kirisame et al., ICLR 2021, section 4.1): a storage's
// own and that of every evicted storage that is connected to it, direction
// ignored. The evicted storages are kept in classes by union-find, so that a
// cost is the sum over the classes of the neighbours. Unlike in the paper, the
// outputs of one operator are neighbours, and the operator counts once.
//
// Union-find cannot split. As in the paper, a storage that comes back takes
// its own cost out of its class and leaves the rest joined, so a cost may be
// too high until the class is empty.

#ifndef KMEM_DTR_EVICTED_CLASSES_H_
#define KMEM_DTR_EVICTED_CLASSES_H_

#include <cstdint>
#include <memory>

#include "cost.h"

namespace kmem::dtr {

struct EvictedClass : std::enable_shared_from_this<EvictedClass> {
  std::shared_ptr<EvictedClass> parent;
  int64_t nanoseconds = 0;  // Of the whole class, in its root.
  int rank = 0;
  uint64_t visit = 0;
};

class EvictedClassesCost : public Cost {
 public:
  int64_t Nanoseconds(Storage& storage) override;
  void Evicted(Storage& storage) override;
  void Restored(Storage& storage) override;

 private:
  static int64_t UncountedNanoseconds(const Storage& storage);
  EvictedClass* Root(EvictedClass* member);
  template <typename Visit>
  void VisitEvictedNeighbours(const Storage& storage, Visit visit);

  uint64_t visit_ = 0;
};

}  // namespace kmem::dtr

#endif  // KMEM_DTR_EVICTED_CLASSES_H_
