#include "dtr/simulate.h"

#include <cstdint>
#include <string>
#include <vector>

#include "memory/pool.h"
#include "tests/check.h"

namespace {

using kmem::dtr::Code;
using kmem::dtr::kCall;
using kmem::dtr::kConstant;
using kmem::dtr::kRelease;
using kmem::dtr::kRetain;
using kmem::dtr::Options;
using kmem::dtr::Statistics;
using kmem::dtr::Status;

Status Run(const std::vector<int64_t>& program, int64_t threshold_bytes,
           Statistics* statistics, const std::string& heuristic = "dtr_eq") {
  Options options;
  options.threshold_bytes = threshold_bytes;
  return Simulate(program, kmem::dtr::MakeHeuristic(heuristic, 0), options,
                  statistics);
}

// A chain of n operators and its backward pass: Checkmate's unit chain. All
// tensors have one byte, all operators take a nanosecond.
std::vector<int64_t> UnitChain(int n) {
  std::vector<int64_t> program = {kConstant, 1};
  for (int i = 0; i < n; ++i) {
    program.insert(program.end(), {kCall, 1, 1, i, 1, 1, -1});
  }
  int64_t gradient = n;  // The loss.
  for (int i = n - 1; i > 0; --i) {
    program.insert(program.end(), {kCall, 1, 2, gradient, i, 1, 1, -1});
    program.insert(program.end(), {kRelease, gradient, kRelease, i});
    gradient = 2 * n - i;
  }
  return program;
}

void WithRoomNothingRunsTwice() {
  Statistics statistics;
  CHECK_TRUE(Run(UnitChain(8), 1000, &statistics).ok());
  CHECK_EQUAL(statistics.total_nanoseconds, 15);
  CHECK_EQUAL(statistics.num_evictions, 0);
  // The constant, the activations, and the gradient that replaces the loss.
  CHECK_EQUAL(statistics.peak_bytes, 10);
  CHECK_EQUAL(statistics.pinned_bytes, 1);
}

// In a quarter of its memory, for less than the program once more and a half.
void ALongChainFitsInLittleMemory() {
  const int n = 64;
  Statistics statistics;
  CHECK_TRUE(Run(UnitChain(n), 18, &statistics).ok());
  CHECK_TRUE(statistics.peak_bytes <= 18);
  CHECK_EQUAL(statistics.total_nanoseconds,
              2 * n - 1 + statistics.recomputed_nanoseconds);
  CHECK_TRUE(statistics.recomputed_nanoseconds <= 3 * n);
}

void TheBudgetIsKeptOrRefused() {
  Statistics statistics;
  for (int64_t threshold_bytes = 1; threshold_bytes <= 66; ++threshold_bytes) {
    const Status status = Run(UnitChain(64), threshold_bytes, &statistics);
    CHECK_TRUE(statistics.peak_bytes <= threshold_bytes);
    // Two inputs and an output beside the constant are what it takes.
    CHECK_TRUE(status.ok() == (threshold_bytes >= 4));
    if (status.ok()) continue;
    CHECK_TRUE(status.code == Code::kNoRoom);
    CHECK_EQUAL(statistics.least_threshold_bytes, threshold_bytes + 1);
  }
}

void WhatIsHeldAtTheEndIsThereAtTheEnd() {
  // 0 constant, 1 and 2 made from it, of which 1 is held twice.
  std::vector<int64_t> program = {
      kConstant, 10, kCall, 5, 1, 0, 1, 40, -1, kRetain, 1,
      kCall,     5,  1,     0, 1, 50, -1, kRelease, 1};
  Statistics statistics;
  CHECK_TRUE(Run(program, 100, &statistics).ok());
  CHECK_EQUAL(statistics.num_recomputations, 0);
  // In 99 bytes each can be made, but not both be there.
  CHECK_TRUE(Run(program, 99, &statistics).code == Code::kNoRoom);
  CHECK_EQUAL(statistics.least_threshold_bytes, 100);
  program.insert(program.end(), {kRelease, 1});
  CHECK_TRUE(Run(program, 99, &statistics).ok());
  CHECK_EQUAL(statistics.live_bytes, 60);
}

// Tensors of one to five grains, each made from the one before and held, then
// let go of from the last to the first.
std::vector<int64_t> ChainOfSizes(int n) {
  constexpr int64_t kGrain = kmem::Pool::kGrain;
  std::vector<int64_t> program = {kConstant, kGrain};
  for (int i = 0; i < n; ++i) {
    const int64_t bytes = (1 + 3 * i % 5) * kGrain;
    program.insert(program.end(), {kCall, 1, 1, i, 1, bytes, -1});
  }
  for (int i = n; i > 1; --i) {
    program.insert(program.end(), {kCall, 1, 1, i, 1, kGrain, -1});
    program.insert(program.end(), {kRelease, 2 * n + 1 - i, kRelease, i});
  }
  return program;
}

void InAPoolItStaysWithinItAndRepeats() {
  constexpr int64_t kGrain = kmem::Pool::kGrain;
  const auto run = [](int64_t units) {
    Options options;
    options.threshold_bytes = units * kGrain;
    Statistics statistics;
    const Status status =
        Simulate(ChainOfSizes(40), kmem::dtr::MakeHeuristic("lru", 0), options,
                 &statistics, {options.threshold_bytes});
    CHECK_TRUE(status.ok());
    CHECK_TRUE(statistics.peak_bytes <= options.threshold_bytes);
    return statistics;
  };
  CHECK_EQUAL(run(1000).num_recomputations, 0);
  for (const int64_t units : {60, 30, 20}) {
    const Statistics found = run(units);
    CHECK_TRUE(found.num_recomputations > 0);
    CHECK_EQUAL(found.num_recomputations, run(units).num_recomputations);
  }
}

void AViewTakesNoBytes() {
  const std::vector<int64_t> program = {
      kConstant, 10, kCall, 5, 1, 0, 1, 40, -1, kCall, 1, 1, 1, 1, 40, 0};
  Statistics statistics;
  CHECK_TRUE(Run(program, 50, &statistics).ok());
  CHECK_EQUAL(statistics.peak_bytes, 50);
  CHECK_EQUAL(statistics.total_nanoseconds, 6);
}

}  // namespace

int main() {
  WithRoomNothingRunsTwice();
  ALongChainFitsInLittleMemory();
  TheBudgetIsKeptOrRefused();
  WhatIsHeldAtTheEndIsThereAtTheEnd();
  InAPoolItStaysWithinItAndRepeats();
  AViewTakesNoBytes();
  return 0;
}
