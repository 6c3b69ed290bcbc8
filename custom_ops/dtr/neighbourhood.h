// The exact costs: a storage's own and that of the evicted storages that would
// have to be made with it. With `ancestors` alone, what making it again would
// really take (MSPS: Peng et al., Capuchin, ASPLOS 2020); with `both`, also
// those that would then have to wait for it (h_DTR: Kirisame et al., ICLR
// 2021).
//
// A cost is remembered until something in the neighbourhood changes, so the
// price is a walk through the neighbourhood for each change.

#ifndef KMEM_DTR_NEIGHBOURHOOD_H_
#define KMEM_DTR_NEIGHBOURHOOD_H_

#include <cstdint>
#include <vector>

#include "cost.h"

namespace kmem::dtr {

class NeighbourhoodCost : public Cost {
 public:
  enum class Reach { kAncestors, kBoth };

  explicit NeighbourhoodCost(Reach reach) : reach_(reach) {}

  int64_t Nanoseconds(Storage& storage) override;
  void Evicted(Storage& storage) override { Forget(storage); }
  void Restored(Storage& storage) override { Forget(storage); }

 private:
  enum class Direction { kParents, kChildren };

  // Makes every storage whose neighbourhood has `storage` in it forget.
  void Forget(Storage& storage);
  // Calls `visit` once with everything next to `storage` or to what is
  // reached from it by way of evicted storages.
  template <typename Visit>
  void Walk(Storage& storage, Direction direction, Visit visit);

  const Reach reach_;
  uint64_t visit_ = 0;
  std::vector<Storage*> waiting_;
};

}  // namespace kmem::dtr

#endif  // KMEM_DTR_NEIGHBOURHOOD_H_
