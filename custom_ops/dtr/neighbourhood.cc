#include "neighbourhood.h"

namespace kmem::dtr {

template <typename Visit>
void NeighbourhoodCost::Walk(Storage& storage, Direction direction,
                             Visit visit) {
  ++visit_;
  storage.visit = visit_;
  waiting_.assign(1, &storage);
  const auto reach = [&](Storage& next) {
    ++num_accesses_;
    if (next.visit == visit_) return;
    next.visit = visit_;
    visit(next);
    if (!next.resident) waiting_.push_back(&next);
  };
  while (!waiting_.empty()) {
    Storage* from = waiting_.back();
    waiting_.pop_back();
    if (direction == Direction::kParents) {
      VisitParents(*from, reach);
    } else {
      VisitChildren(*from, reach);
    }
  }
}

int64_t NeighbourhoodCost::Nanoseconds(Storage& storage) {
  ++num_accesses_;
  int64_t& nanoseconds = storage.neighbourhood_nanoseconds;
  if (nanoseconds >= 0) return nanoseconds;
  nanoseconds = storage.nanoseconds;
  const auto add = [&nanoseconds](const Storage& other) {
    if (!other.resident) nanoseconds += other.nanoseconds;
  };
  Walk(storage, Direction::kParents, add);
  if (reach_ == Reach::kBoth) Walk(storage, Direction::kChildren, add);
  return nanoseconds;
}

void NeighbourhoodCost::Forget(Storage& storage) {
  const auto forget = [](Storage& other) {
    other.neighbourhood_nanoseconds = -1;
  };
  forget(storage);
  Walk(storage, Direction::kChildren, forget);
  if (reach_ == Reach::kBoth) Walk(storage, Direction::kParents, forget);
}

}  // namespace kmem::dtr
