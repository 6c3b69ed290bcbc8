#include "memory/storage.h"

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "tests/check.h"

namespace {

using kmem::PageStorage;

constexpr size_t kMiB = size_t{1} << 20;

void FreedPagesServeTheNextRequest() {
  PageStorage storage;
  void* first = storage.Allocate(4 * kMiB);
  storage.Free(first, 4 * kMiB);
  CHECK_EQUAL(storage.free_bytes(), 4 * kMiB);
  void* second = storage.Allocate(4 * kMiB);
  CHECK_TRUE(second == first);
  CHECK_EQUAL(storage.free_bytes(), 0);
  storage.Free(second, 4 * kMiB);
}

void ALargeFreeRangeIsSplitAndJoinedAgain() {
  PageStorage storage;
  char* whole = static_cast<char*>(storage.Allocate(4 * kMiB));
  storage.Free(whole, 4 * kMiB);
  char* a = static_cast<char*>(storage.Allocate(kMiB));
  char* b = static_cast<char*>(storage.Allocate(3 * kMiB));
  CHECK_TRUE(a == whole);
  CHECK_TRUE(b == whole + kMiB);
  storage.Free(b, 3 * kMiB);
  storage.Free(a, kMiB);
  CHECK_TRUE(storage.Allocate(4 * kMiB) == whole);
  storage.Free(whole, 4 * kMiB);
}

void TheSmallestRangeThatFitsIsTaken() {
  PageStorage storage;
  // The blocks between keep the free ones apart.
  void* large = storage.Allocate(3 * kMiB);
  CHECK_TRUE(storage.Allocate(kMiB) != nullptr);
  void* small = storage.Allocate(2 * kMiB);
  CHECK_TRUE(storage.Allocate(8 * kMiB) != nullptr);
  storage.Free(large, 3 * kMiB);
  storage.Free(small, 2 * kMiB);
  CHECK_TRUE(storage.Allocate(2 * kMiB) == small);
  CHECK_TRUE(storage.Allocate(3 * kMiB) == large);
}

void PagesInUseAndFreeStayWithinAQuarterAboveThePeak() {
  PageStorage storage;
  std::mt19937 random(0);
  std::vector<std::pair<void*, size_t>> blocks;
  size_t in_use = 0;
  size_t peak = 0;
  for (int i = 0; i < 20000; ++i) {
    if (blocks.empty() || random() % 2 == 0) {
      const size_t bytes = PageStorage::Round(1 + random() % (8 * kMiB));
      void* block = storage.Allocate(bytes);
      CHECK_TRUE(block != nullptr);
      std::memset(block, 1, 64);  // It must be ours to write to.
      blocks.push_back({block, bytes});
      in_use += bytes;
      peak = std::max(peak, in_use);
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      storage.Free(blocks.back().first, blocks.back().second);
      in_use -= blocks.back().second;
      blocks.pop_back();
    }
    CHECK_TRUE(in_use + storage.free_bytes() <= peak + peak / 4);
  }
}

void PagesGoBackWhenAProgramNeedsLess() {
  PageStorage storage;
  void* large = storage.Allocate(1024 * kMiB);
  storage.Free(large, 1024 * kMiB);
  for (uint64_t i = 0; i < 2 * PageStorage::kWindow; ++i) {
    storage.Free(storage.Allocate(4 * kMiB), 4 * kMiB);
  }
  CHECK_TRUE(storage.free_bytes() <= 5 * kMiB);
  storage.Trim();
  CHECK_EQUAL(storage.free_bytes(), 0);
}

void WhatTheSystemDoesNotHaveIsRefused() {
  PageStorage storage;
  CHECK_TRUE(storage.Allocate(size_t{1} << 60) == nullptr);
  CHECK_TRUE(storage.Allocate(kMiB) != nullptr);
}

// Each thread fills its blocks with its own number and finds it again: no
// block is ever given to two.
void ThreadsNeverShareABlock() {
  PageStorage storage;
  std::vector<std::thread> threads;
  for (int number = 1; number <= 8; ++number) {
    threads.emplace_back([&storage, number] {
      std::mt19937 random(number);
      for (int round = 0; round < 2000; ++round) {
        const size_t bytes = 1 + random() % kMiB;
        char* block = static_cast<char*>(storage.Allocate(bytes));
        block[0] = block[bytes - 1] = static_cast<char>(number);
        std::this_thread::yield();
        CHECK_EQUAL(block[0], number);
        CHECK_EQUAL(block[bytes - 1], number);
        storage.Free(block, bytes);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  FreedPagesServeTheNextRequest();
  ALargeFreeRangeIsSplitAndJoinedAgain();
  TheSmallestRangeThatFitsIsTaken();
  PagesInUseAndFreeStayWithinAQuarterAboveThePeak();
  PagesGoBackWhenAProgramNeedsLess();
  WhatTheSystemDoesNotHaveIsRefused();
  ThreadsNeverShareABlock();
  return 0;
}
