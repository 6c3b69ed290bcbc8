#include "heuristic.h"

#include <cmath>
#include <random>
#include <utility>

#include "cost.h"
#include "evicted_classes.h"
#include "neighbourhood.h"

namespace kmem::dtr {
namespace {

// cost / (bytes x staleness), or a part of it: the paper's family.
class CostHeuristic : public Heuristic {
 public:
  struct Divisor {
    bool bytes;
    double staleness_power;
  };

  CostHeuristic(std::unique_ptr<Cost> cost, Divisor divisor)
      : cost_(std::move(cost)), divisor_(divisor) {}

  double Score(Storage& storage, int64_t now) override {
    double score = static_cast<double>(cost_->Nanoseconds(storage));
    if (divisor_.bytes) score /= static_cast<double>(storage.bytes);
    // The clock stands still between two operators: hence the 1.
    const double staleness = static_cast<double>(now - storage.last_used + 1);
    return score / std::pow(staleness, divisor_.staleness_power);
  }

  void Evicted(Storage& storage) override { cost_->Evicted(storage); }
  void Restored(Storage& storage) override { cost_->Restored(storage); }
  int64_t num_accesses() const override { return cost_->num_accesses(); }

 private:
  const std::unique_ptr<Cost> cost_;
  const Divisor divisor_;
};

class RandomHeuristic : public Heuristic {
 public:
  explicit RandomHeuristic(uint64_t seed) : generator_(seed) {}

  double Score(Storage&, int64_t) override {
    ++num_accesses_;
    return static_cast<double>(generator_());
  }
  int64_t num_accesses() const override { return num_accesses_; }

 private:
  std::mt19937_64 generator_;
  int64_t num_accesses_ = 0;
};

}  // namespace

std::unique_ptr<Heuristic> MakeHeuristic(const std::string& name,
                                         uint64_t seed) {
  using Reach = NeighbourhoodCost::Reach;
  const auto make = [](std::unique_ptr<Cost> cost, bool bytes,
                       double power) -> std::unique_ptr<Heuristic> {
    return std::make_unique<CostHeuristic>(
        std::move(cost), CostHeuristic::Divisor{bytes, power});
  };
  if (name == "dtr_eq") {
    return make(std::make_unique<EvictedClassesCost>(), true, 1);
  }
  if (name == "dtr") {
    return make(std::make_unique<NeighbourhoodCost>(Reach::kBoth), true, 1);
  }
  if (name == "ancestors" || name == "msps") {
    return make(std::make_unique<NeighbourhoodCost>(Reach::kAncestors), true,
                name == "msps" ? 0 : 0.5);
  }
  if (name == "local") return make(std::make_unique<OwnCost>(), true, 1);
  if (name == "size_staleness") {
    return make(std::make_unique<UnitCost>(), true, 1);
  }
  if (name == "lru") return make(std::make_unique<UnitCost>(), false, 1);
  if (name == "random") return std::make_unique<RandomHeuristic>(seed);
  return nullptr;
}

}  // namespace kmem::dtr
