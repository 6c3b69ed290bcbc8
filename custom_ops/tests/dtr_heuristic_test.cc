#include "dtr/heuristic.h"

#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "dtr/evicted_classes.h"
#include "dtr/neighbourhood.h"
#include "tests/dtr_fixture.h"

namespace {

using kmem::dtr::EvictedClassesCost;
using kmem::dtr::MakeHeuristic;
using kmem::dtr::NeighbourhoodCost;
using kmem::dtr::Operator;
using kmem::dtr::Storage;
using kmem::dtr::Tensor;

// A graph without a runtime, to ask a cost what it thinks of it. Storage `i`
// costs 2 to the power of `i`, so that a sum tells what is in it.
class Drawing {
 public:
  // Adds a storage that is made from others.
  void Add(const std::vector<int>& parents) {
    auto op = std::make_unique<Operator>();
    op->nanoseconds = int64_t{1} << operators_.size();
    op->outputs.resize(1);
    Tensor& tensor = op->outputs[0];
    tensor.maker = op.get();
    tensor.storage = std::make_shared<Storage>();
    tensor.storage->nanoseconds = op->nanoseconds;
    tensor.storage->bytes = 1;
    tensor.storage->tensors = {&tensor};
    for (int parent : parents) {
      Tensor* input = &operators_[parent]->outputs[0];
      input->readers.push_back({op.get(), op->inputs.size()});
      op->inputs.push_back({input, input->readers.size() - 1});
    }
    operators_.push_back(std::move(op));
  }

  Storage& operator[](int i) { return *operators_[i]->outputs[0].storage; }
  int size() const { return static_cast<int>(operators_.size()); }

  void Evict(kmem::dtr::Cost& cost, int i) {
    (*this)[i].resident = false;
    cost.Evicted((*this)[i]);
  }

  void Restore(kmem::dtr::Cost& cost, int i) {
    (*this)[i].resident = true;
    cost.Restored((*this)[i]);
  }

  // The plain definition: everything that is reached by way of evicted ones.
  int64_t Neighbourhood(int i, bool children) {
    std::set<Storage*> reached;
    std::vector<Storage*> waiting = {&(*this)[i]};
    while (!waiting.empty()) {
      Storage* from = waiting.back();
      waiting.pop_back();
      const auto reach = [&](Storage& next) {
        if (!next.resident && reached.insert(&next).second) {
          waiting.push_back(&next);
        }
      };
      if (children) {
        VisitChildren(*from, reach);
      } else {
        VisitParents(*from, reach);
      }
    }
    int64_t nanoseconds = 0;
    for (const Storage* storage : reached) nanoseconds += storage->nanoseconds;
    return nanoseconds;
  }

 private:
  std::vector<std::unique_ptr<Operator>> operators_;
};

// 0 -> 1 -> 2 -> 3 -> 4
Drawing Chain() {
  Drawing drawing;
  drawing.Add({});
  for (int i = 0; i < 4; ++i) drawing.Add({i});
  return drawing;
}

void AncestorsAreWhatWouldRunAgain() {
  Drawing chain = Chain();
  NeighbourhoodCost cost(NeighbourhoodCost::Reach::kAncestors);
  chain.Evict(cost, 1);
  chain.Evict(cost, 2);
  CHECK_EQUAL(cost.Nanoseconds(chain[3]), 0b01110);
  CHECK_EQUAL(cost.Nanoseconds(chain[0]), 0b00001);
  CHECK_EQUAL(cost.Nanoseconds(chain[4]), 0b10000);
  chain.Restore(cost, 2);
  CHECK_EQUAL(cost.Nanoseconds(chain[3]), 0b01000);
}

void TheNeighbourhoodIsOnBothSides() {
  Drawing chain = Chain();
  NeighbourhoodCost cost(NeighbourhoodCost::Reach::kBoth);
  chain.Evict(cost, 1);
  chain.Evict(cost, 3);
  CHECK_EQUAL(cost.Nanoseconds(chain[2]), 0b01110);
  CHECK_EQUAL(cost.Nanoseconds(chain[0]), 0b00011);
  CHECK_EQUAL(cost.Nanoseconds(chain[4]), 0b11000);
}

void NeighbourhoodsAreExactWhateverHappens() {
  for (int seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    Drawing drawing;
    for (int i = 0; i < 30; ++i) {
      std::vector<int> parents;
      for (unsigned k = 0; i > 0 && k < random() % 4; ++k) {
        parents.push_back(random() % i);
      }
      drawing.Add(parents);
    }
    NeighbourhoodCost ancestors(NeighbourhoodCost::Reach::kAncestors);
    NeighbourhoodCost both(NeighbourhoodCost::Reach::kBoth);
    NeighbourhoodCost& cost = seed % 2 ? ancestors : both;
    for (int step = 0; step < 200; ++step) {
      const int i = random() % drawing.size();
      if (drawing[i].resident) {
        drawing.Evict(cost, i);
      } else {
        drawing.Restore(cost, i);
      }
      const int j = random() % drawing.size();
      if (!drawing[j].resident) continue;
      int64_t expected =
          drawing[j].nanoseconds + drawing.Neighbourhood(j, false);
      if (&cost == &both) expected += drawing.Neighbourhood(j, true);
      CHECK_EQUAL(cost.Nanoseconds(drawing[j]), expected);
    }
  }
}

void ClassesJoinWhatIsConnected() {
  Drawing chain = Chain();
  EvictedClassesCost cost;
  chain.Evict(cost, 1);
  chain.Evict(cost, 3);
  CHECK_EQUAL(cost.Nanoseconds(chain[2]), 0b01110);
  CHECK_EQUAL(cost.Nanoseconds(chain[4]), 0b11000);
  chain.Evict(cost, 2);
  CHECK_EQUAL(cost.Nanoseconds(chain[4]), 0b11110);
  CHECK_EQUAL(cost.Nanoseconds(chain[0]), 0b01111);
}

// The paper's approximation: 1 and 3 stay in one class.
void ClassesDoNotSplitButLoseWhatComesBack() {
  Drawing chain = Chain();
  EvictedClassesCost cost;
  for (int i : {1, 2, 3}) chain.Evict(cost, i);
  chain.Restore(cost, 2);
  CHECK_EQUAL(cost.Nanoseconds(chain[4]), 0b11010);
  CHECK_EQUAL(cost.Nanoseconds(chain[2]), 0b01110);
  chain.Restore(cost, 1);
  chain.Restore(cost, 3);
  CHECK_EQUAL(cost.Nanoseconds(chain[4]), 0b10000);
}

void AClassOfALongChainHasNoLongPath() {
  Drawing chain;
  chain.Add({});
  for (int i = 0; i < 50; ++i) chain.Add({i});
  EvictedClassesCost cost;
  for (int i = 49; i > 0; --i) chain.Evict(cost, i);
  const int64_t before = cost.num_accesses();
  CHECK_EQUAL(cost.Nanoseconds(chain[50]), (int64_t{1} << 51) - 2);
  CHECK_TRUE(cost.num_accesses() - before < 10);
}

void AnOperatorWithTwoEvictedOutputsCountsOnce() {
  kmem::dtr::Session session;
  Tensor* x = session.MakeSource(8);
  const auto made = session.Run({x}, {{10}, {20}}, 100);
  Tensor* reader = session.Make({made[0], made[1]}, 1, 7);
  EvictedClassesCost cost;
  for (Tensor* tensor : made) {
    tensor->storage->resident = false;
    cost.Evicted(*tensor->storage);
  }
  CHECK_EQUAL(cost.Nanoseconds(*reader->storage), 107);
  made[1]->storage->resident = true;
  cost.Restored(*made[1]->storage);
  CHECK_EQUAL(cost.Nanoseconds(*made[1]->storage), 100);
  made[1]->storage->resident = false;
  cost.Evicted(*made[1]->storage);
  for (Tensor* tensor : made) {
    tensor->storage->resident = true;
    cost.Restored(*tensor->storage);
  }
  CHECK_EQUAL(cost.Nanoseconds(*reader->storage), 7);
}

void EachHeuristicHasItsFormula() {
  Drawing chain = Chain();
  Storage& storage = chain[3];  // Costs 8.
  storage.bytes = 2;
  storage.last_used = 100;
  const auto score = [&](const std::string& name) {
    return MakeHeuristic(name, 0)->Score(storage, 103);  // Staleness 3 + 1.
  };
  CHECK_TRUE(score("dtr_eq") == 1.0);
  CHECK_TRUE(score("dtr") == 1.0);
  CHECK_TRUE(score("local") == 1.0);
  CHECK_TRUE(score("msps") == 4.0);
  CHECK_TRUE(score("ancestors") == 2.0);
  CHECK_TRUE(score("size_staleness") == 0.125);
  CHECK_TRUE(score("lru") == 0.25);
  CHECK_TRUE(MakeHeuristic("none", 0) == nullptr);
  CHECK_TRUE(MakeHeuristic("random", 1)->Score(storage, 0) ==
             MakeHeuristic("random", 1)->Score(storage, 0));
  CHECK_TRUE(MakeHeuristic("random", 1)->Score(storage, 0) !=
             MakeHeuristic("random", 2)->Score(storage, 0));
}

}  // namespace

int main() {
  AncestorsAreWhatWouldRunAgain();
  TheNeighbourhoodIsOnBothSides();
  NeighbourhoodsAreExactWhateverHappens();
  ClassesJoinWhatIsConnected();
  ClassesDoNotSplitButLoseWhatComesBack();
  AClassOfALongChainHasNoLongPath();
  AnOperatorWithTwoEvictedOutputsCountsOnce();
  EachHeuristicHasItsFormula();
  return 0;
}
