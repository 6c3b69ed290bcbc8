#include "evicted_classes.h"

#include <algorithm>
#include <utility>

namespace kmem::dtr {

EvictedClass* EvictedClassesCost::Root(EvictedClass* member) {
  ++num_accesses_;
  // Halves the path as it goes. The grandparent is held while the parent,
  // which may be held by nobody else, is let go.
  while (member->parent != nullptr) {
    if (member->parent->parent != nullptr) {
      std::shared_ptr<EvictedClass> grandparent = member->parent->parent;
      member->parent = std::move(grandparent);
    }
    member = member->parent.get();
    ++num_accesses_;
  }
  return member;
}

template <typename Visit>
void EvictedClassesCost::VisitEvictedNeighbours(const Storage& storage,
                                                Visit visit) {
  const auto visit_if_evicted = [&](Storage& neighbour) {
    ++num_accesses_;
    const bool is_evicted = neighbour.evicted_class != nullptr;
    if (is_evicted && &neighbour != &storage) visit(neighbour);
  };
  VisitParents(storage, visit_if_evicted);
  VisitChildren(storage, visit_if_evicted);
  VisitSiblings(storage, visit_if_evicted);
}

int64_t EvictedClassesCost::Nanoseconds(Storage& storage) {
  ++num_accesses_;
  ++visit_;
  int64_t nanoseconds = UncountedNanoseconds(storage);
  VisitEvictedNeighbours(storage, [&](Storage& neighbour) {
    EvictedClass* root = Root(neighbour.evicted_class.get());
    if (root->visit == visit_) return;
    root->visit = visit_;
    nanoseconds += root->nanoseconds;
  });
  return nanoseconds;
}

void EvictedClassesCost::Evicted(Storage& storage) {
  const int64_t nanoseconds = UncountedNanoseconds(storage);
  storage.evicted_class = std::make_shared<EvictedClass>();
  storage.evicted_class->nanoseconds = nanoseconds;
  storage.class_nanoseconds = nanoseconds;
  VisitEvictedNeighbours(storage, [&](Storage& neighbour) {
    EvictedClass* high = Root(storage.evicted_class.get());
    EvictedClass* low = Root(neighbour.evicted_class.get());
    if (high == low) return;
    // By rank: no path is long, for `Root` and for a chain of destructors.
    if (high->rank < low->rank) std::swap(high, low);
    if (high->rank == low->rank) ++high->rank;
    high->nanoseconds += low->nanoseconds;
    low->parent = high->shared_from_this();
  });
}

void EvictedClassesCost::Restored(Storage& storage) {
  if (storage.evicted_class == nullptr) return;
  Root(storage.evicted_class.get())->nanoseconds -= storage.class_nanoseconds;
  storage.evicted_class.reset();
}

// The cost of its operators, but for one that counts in its class already
// because another of its outputs was evicted: it would run once for both.
int64_t EvictedClassesCost::UncountedNanoseconds(const Storage& storage) {
  int64_t nanoseconds = storage.nanoseconds;
  for (const Tensor* tensor : storage.tensors) {
    if (tensor->is_view) continue;
    const Operator& maker = *tensor->maker;
    const bool counted = std::any_of(
        maker.outputs.begin(), maker.outputs.end(), [&](const Tensor& output) {
          return output.storage.get() != &storage &&
                 output.storage->evicted_class != nullptr;
        });
    if (counted) nanoseconds -= maker.nanoseconds;
  }
  return nanoseconds;
}

}  // namespace kmem::dtr
