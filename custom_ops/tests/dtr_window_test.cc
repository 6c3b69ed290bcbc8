#include "dtr/window.h"

#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "memory/best_fit_pool.h"
#include "tests/check.h"
#include "tests/dtr_fixture.h"

namespace kmem::dtr {
namespace {

constexpr int64_t kUnit = Pool::kGrain;
// Nothing looks into it: it need not be there.
char* const kRegion = reinterpret_cast<char*>(uintptr_t{1} << 40);

// A memory of spans of one unit each: their weights, with the following two.
constexpr double kFree = -1;
constexpr double kPinned = -2;

struct Memory {
  explicit Memory(const std::vector<double>& weights)
      : storages(weights.size()) {
    for (size_t i = 0; i < weights.size(); ++i) {
      storages[i].address = (i + 1) * kUnit;
      layout.push_back({storages[i].address, kUnit, weights[i] == kFree});
      if (weights[i] >= 0) occupants.push_back({&storages[i], weights[i]});
    }
  }

  // The numbers of what goes for so many units.
  std::vector<int> Window(int64_t units) const {
    std::vector<int> numbers;
    for (Storage* storage : CheapestWindow(layout, occupants, units * kUnit)) {
      numbers.push_back(storage - storages.data());
    }
    return numbers;
  }

  std::vector<Storage> storages;
  std::vector<Span> layout;
  std::vector<Occupant> occupants;
};

void TheWindowThatWeighsLeastGoes() {
  const Memory memory({5, 1, 9, 2, 2, 7});
  CHECK_TRUE(memory.Window(1) == std::vector<int>({1}));
  CHECK_TRUE(memory.Window(2) == std::vector<int>({3, 4}));
  CHECK_TRUE(memory.Window(3) == std::vector<int>({3, 4, 5}));
}

void WhatIsFreeWeighsNothing() {
  const Memory memory({1, 1, 3, kFree, 3});
  CHECK_TRUE(memory.Window(2) == std::vector<int>({0, 1}));
  CHECK_TRUE(memory.Window(3) == std::vector<int>({1, 2}));
}

void NothingGoesForAPieceThatIsFree() {
  const Memory memory({1, kFree, kFree, 0.5});
  CHECK_TRUE(memory.Window(2).empty());
}

void WhatCannotGoPartsTheMemory() {
  const Memory memory({1, kPinned, 1, 50, kPinned, 1});
  CHECK_TRUE(memory.Window(2) == std::vector<int>({2, 3}));
  CHECK_TRUE(memory.Window(3).empty());
}

void TensorsInOneBlockGoTogether() {
  Storage one, other;
  one.address = kUnit;
  other.address = kUnit + 64;
  const std::vector<Storage*> window =
      CheapestWindow({{kUnit, kUnit, false}}, {{&other, 1}, {&one, 1}}, kUnit);
  CHECK_EQUAL(window.size(), 2);
}

// All windows, one after another.
double LeastWeight(const std::vector<double>& weights, size_t units) {
  double least = std::numeric_limits<double>::infinity();
  for (size_t first = 0; first + units <= weights.size(); ++first) {
    double sum = 0;
    for (size_t i = first; i < first + units; ++i) {
      sum += weights[i] == kPinned ? std::numeric_limits<double>::infinity()
             : weights[i] == kFree ? 0
                                   : weights[i];
    }
    least = std::min(least, sum);
  }
  return least;
}

void NoWindowWeighsLess() {
  std::mt19937 random(0);
  for (int round = 0; round < 5000; ++round) {
    std::vector<double> weights(1 + random() % 30);
    for (double& weight : weights) {
      const int kind = random() % 10;
      weight = kind == 0 ? kPinned : kind < 3 ? kFree : 1 + random() % 50;
    }
    const size_t units = 1 + random() % 6;
    const std::vector<int> window = Memory(weights).Window(units);
    double sum = 0;
    for (int number : window) sum += weights[number];
    const double least = LeastWeight(weights, units);
    CHECK_TRUE(window.empty() ? least == 0 || least > 1e300 : sum == least);
  }
}

struct Chain {
  std::vector<int64_t> values;
  int64_t num_evictions = 0;
  std::vector<int> order;
};

// A chain of tensors of different sizes, all of them held, then read backwards
// as a gradient reads them. The pool is as large as the threshold.
Chain RunChain(int64_t units) {
  constexpr int kLength = 40;
  std::mt19937 random(1);
  const bool is_bounded = units > 0;
  BestFitPool pool(kRegion, (is_bounded ? units : 1000) * kUnit);
  Chain chain;
  {
    Session session(is_bounded ? Threshold(units * kUnit) : Options(), "lru");
    session.driver.pool = &pool;
    std::vector<Tensor*> tensors = {session.MakeSource(kUnit)};
    for (int i = 1; i < kLength; ++i) {
      const int64_t bytes = (1 + random() % 5) * kUnit;
      tensors.push_back(session.Make({tensors.back()}, bytes));
      CHECK_TRUE(session.status.ok());
    }
    for (int i = kLength - 1; i >= 0; --i) {
      chain.values.push_back(session.Read(tensors[i]));
      CHECK_TRUE(session.status.ok());
    }
    CHECK_TRUE(pool.usage().peak_chunks <= pool.usage().size);
    chain.num_evictions = session.runtime.statistics().num_evictions;
    chain.order = session.driver.order;
    session.Release(tensors);
  }
  CHECK_EQUAL(pool.usage().chunks, 0);
  return chain;
}

void AProgramRunsInAPoolOfItsThreshold() {
  const Chain expected = RunChain(0);
  CHECK_EQUAL(expected.num_evictions, 0);
  // Down to three times the largest tensor and the source: what an operator
  // reads may lie in the middle of all else.
  for (const int64_t units : {80, 40, 20, 17, 16}) {
    const Chain chain = RunChain(units);
    CHECK_TRUE(chain.values == expected.values);
    CHECK_TRUE(chain.num_evictions > 0);
    CHECK_TRUE(chain.order == RunChain(units).order);
  }
}

void ABlockThatCannotBeIsAnError() {
  BestFitPool pool(kRegion, 10 * kUnit);
  Session session(Threshold(10 * kUnit), "lru");
  session.driver.pool = &pool;
  Tensor* low = session.MakeSource(4 * kUnit);
  Tensor* pinned = session.MakeSource(kUnit);
  Tensor* high = session.Make({}, 4 * kUnit);
  session.Release({low});
  CHECK_TRUE(session.Make({}, 6 * kUnit) == nullptr);
  CHECK_TRUE(session.status.code == Code::kNoRoom);
  CHECK_TRUE(session.Make({}, 5 * kUnit) != nullptr);
  CHECK_TRUE(session.Read(high) >= 0);
  session.Release({pinned});
}

}  // namespace
}  // namespace kmem::dtr

int main() {
  using namespace kmem::dtr;
  TheWindowThatWeighsLeastGoes();
  WhatIsFreeWeighsNothing();
  NothingGoesForAPieceThatIsFree();
  WhatCannotGoPartsTheMemory();
  TensorsInOneBlockGoTogether();
  NoWindowWeighsLess();
  AProgramRunsInAPoolOfItsThreshold();
  ABlockThatCannotBeIsAnError();
  return 0;
}
