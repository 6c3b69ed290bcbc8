#include "memory/budget.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "tests/check.h"

namespace {

using kmem::Budget;

void CountsWhatIsInUseAndThePeak() {
  Budget budget;
  CHECK_TRUE(budget.Reserve(100));
  CHECK_TRUE(budget.Reserve(50));
  budget.Release(100);
  CHECK_TRUE(budget.Reserve(20));
  CHECK_EQUAL(budget.in_use(), 70);
  CHECK_EQUAL(budget.peak(), 150);
  CHECK_EQUAL(budget.largest(), 100);
  CHECK_EQUAL(budget.num_allocations(), 3);
  budget.ResetPeak();
  CHECK_EQUAL(budget.peak(), 70);
}

void TheLimitItselfFitsAndOneByteMoreDoesNot() {
  Budget budget;
  CHECK_TRUE(budget.SetLimit(100));
  CHECK_TRUE(budget.Reserve(60));
  CHECK_TRUE(!budget.Reserve(41));
  CHECK_EQUAL(budget.in_use(), 60);
  CHECK_EQUAL(budget.peak(), 60);
  CHECK_TRUE(budget.Reserve(40));
  CHECK_EQUAL(budget.peak(), 100);
}

void WhatCannotBeRefusedIsCountedAndOwed() {
  Budget budget;
  CHECK_TRUE(budget.SetLimit(100));
  budget.ReserveAboveLimit(110, /*owed=*/false);
  CHECK_TRUE(!budget.owes());
  CHECK_TRUE(!budget.Reserve(1));
  budget.ReserveAboveLimit(10, /*owed=*/true);
  CHECK_EQUAL(budget.in_use(), 120);
  CHECK_EQUAL(budget.peak(), 120);
  CHECK_TRUE(budget.owes());
  budget.Refuse(7);
  CHECK_TRUE(!budget.owes());
  CHECK_EQUAL(budget.refused(), 7);
}

void ARequestOfAnySizeDoesNotOverflow() {
  Budget budget;
  CHECK_TRUE(budget.Reserve(100));
  CHECK_TRUE(!budget.Reserve(Budget::kNoLimit));
  CHECK_TRUE(budget.SetLimit(1000));
  CHECK_TRUE(!budget.Reserve(Budget::kNoLimit));
  CHECK_EQUAL(budget.in_use(), 100);
}

void ALimitBelowWhatIsInUseIsNotSet() {
  Budget budget;
  CHECK_TRUE(budget.SetLimit(200));
  CHECK_TRUE(budget.Reserve(100));
  CHECK_TRUE(!budget.SetLimit(99));
  CHECK_EQUAL(budget.limit(), 200);
  CHECK_TRUE(budget.SetLimit(100));
}

void WatermarksAreIndependentPeaks() {
  Budget budget;
  CHECK_TRUE(budget.Reserve(100));
  const int outer = budget.OpenWatermark();
  CHECK_TRUE(budget.Reserve(50));
  budget.Release(50);
  const int inner = budget.OpenWatermark();
  CHECK_TRUE(budget.Reserve(20));
  CHECK_EQUAL(budget.Watermark(inner), 120);
  CHECK_EQUAL(budget.Watermark(outer), 150);
  budget.CloseWatermark(inner);
  budget.ResetPeak();
  CHECK_TRUE(budget.Reserve(100));
  CHECK_EQUAL(budget.Watermark(inner), 120);
  CHECK_EQUAL(budget.Watermark(outer), 220);
}

void WatermarksRunOutAndComeBack() {
  Budget budget;
  for (int i = 0; i < Budget::kNumWatermarks; ++i) {
    CHECK_EQUAL(budget.OpenWatermark(), i);
  }
  CHECK_EQUAL(budget.OpenWatermark(), -1);
  budget.CloseWatermark(7);
  CHECK_EQUAL(budget.OpenWatermark(), 7);
}

// Eight threads want four times what there is. The limit must hold at every
// moment, nothing may leak, and the peak must be one that somebody saw.
void TheLimitHoldsAmongThreads() {
  constexpr int kThreads = 8;
  constexpr int kRounds = 200000;
  constexpr int64_t kBytes = 64;
  constexpr int64_t kLimit = 2 * kBytes;
  Budget budget;
  CHECK_TRUE(budget.SetLimit(kLimit));
  std::atomic<int64_t> granted{0};
  std::atomic<bool> crossed{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        if (!budget.Reserve(kBytes)) continue;
        // What the threads hold, counted apart from the budget.
        static std::atomic<int64_t> held{0};
        if (held.fetch_add(kBytes) + kBytes > kLimit) crossed = true;
        ++granted;
        held.fetch_sub(kBytes);
        budget.Release(kBytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_TRUE(!crossed);
  CHECK_EQUAL(budget.in_use(), 0);
  CHECK_TRUE(budget.peak() <= kLimit);
  CHECK_EQUAL(budget.num_allocations(), granted);
}

// Without a limit, and all threads holding at once: the peak is the sum.
void ThePeakOfThreadsIsTheirSum() {
  constexpr int kThreads = 8;
  constexpr int kRounds = 100000;
  Budget budget;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) budget.Reserve(3);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(budget.peak(), 3LL * kThreads * kRounds);
  CHECK_EQUAL(budget.in_use(), 3LL * kThreads * kRounds);
}

}  // namespace

int main() {
  CountsWhatIsInUseAndThePeak();
  TheLimitItselfFitsAndOneByteMoreDoesNot();
  WhatCannotBeRefusedIsCountedAndOwed();
  ARequestOfAnySizeDoesNotOverflow();
  ALimitBelowWhatIsInUseIsNotSet();
  WatermarksAreIndependentPeaks();
  WatermarksRunOutAndComeBack();
  TheLimitHoldsAmongThreads();
  ThePeakOfThreadsIsTheirSum();
  return 0;
}
