#include "memory/best_fit_pool.h"

#include <cstdint>
#include <random>
#include <vector>

#include "tests/check.h"

namespace {

using kmem::BestFitPool;
using kmem::Pool;
using kmem::PoolUsage;

constexpr size_t kGrain = Pool::kGrain;

// Nothing looks into the region: it need not be there.
char* const kRegion = reinterpret_cast<char*>(uintptr_t{1} << 40);

// In which blocks of a few grains are not large.
constexpr size_t kWide = 1000 * kGrain;

void BlocksBeginAtTheGrainAndLoseNothing() {
  BestFitPool pool(kRegion, kWide);
  void* one = pool.Allocate(1);
  void* two = pool.Allocate(kGrain);
  void* three = pool.Allocate(kGrain + 1);
  CHECK_TRUE(one == kRegion);
  CHECK_TRUE(two == kRegion + kGrain);
  CHECK_TRUE(three == kRegion + 2 * kGrain);
  CHECK_EQUAL(pool.BytesOf(three), kGrain + 1);
  const PoolUsage usage = pool.usage();
  CHECK_EQUAL(usage.size, kWide);
  CHECK_EQUAL(usage.blocks, 2 * kGrain + 2);
  CHECK_EQUAL(usage.chunks, 4 * kGrain);
  CHECK_EQUAL(usage.largest_free, kWide - 4 * kGrain);
}

void ARegionMayBeginAnywhere() {
  BestFitPool pool(kRegion + 1, 3 * kGrain);
  CHECK_TRUE(pool.Allocate(2 * kGrain) == kRegion + kGrain);
  CHECK_TRUE(pool.Allocate(1) == nullptr);
}

void APoolWithoutARegionRefusesEverything() {
  BestFitPool pool(nullptr, 0);
  CHECK_TRUE(pool.Allocate(1) == nullptr);
  CHECK_TRUE(!pool.Owns(nullptr));
}

void LargeBlocksLieAtTheEndOfAPiece() {
  BestFitPool pool(kRegion, 10 * kGrain);
  CHECK_TRUE(pool.Allocate(2 * kGrain) == kRegion + 8 * kGrain);
  CHECK_TRUE(pool.Allocate(8 * kGrain) == kRegion);
}

void TheSmallestPieceThatIsLargeEnoughIsCut() {
  BestFitPool pool(kRegion, kWide);
  void* wide = pool.Allocate(8 * kGrain);
  pool.Allocate(kGrain);
  void* narrow = pool.Allocate(3 * kGrain);
  pool.Allocate(kGrain);
  pool.Free(wide);
  pool.Free(narrow);
  CHECK_TRUE(pool.Allocate(3 * kGrain) == narrow);
}

void PiecesThatTouchBecomeOne() {
  BestFitPool pool(kRegion, 4 * kGrain);
  std::vector<void*> blocks;
  for (int i = 0; i < 4; ++i) blocks.push_back(pool.Allocate(kGrain));
  // Each is large in so small a pool.
  CHECK_TRUE(blocks[0] == kRegion + 3 * kGrain);
  CHECK_TRUE(pool.Allocate(1) == nullptr);
  // Free in pieces is not free as a whole.
  pool.Free(blocks[0]);
  pool.Free(blocks[2]);
  CHECK_EQUAL(pool.usage().largest_free, kGrain);
  CHECK_TRUE(pool.Allocate(2 * kGrain) == nullptr);
  pool.Free(blocks[1]);
  CHECK_EQUAL(pool.usage().largest_free, 3 * kGrain);
  pool.Free(blocks[3]);
  CHECK_TRUE(pool.Allocate(4 * kGrain) == kRegion);
}

void ThePeakIsTheMostThatChunksTook() {
  BestFitPool pool(kRegion, 4 * kGrain);
  void* block = pool.Allocate(3 * kGrain);
  pool.Free(block);
  CHECK_EQUAL(pool.usage().peak_chunks, 3 * kGrain);
  pool.ResetPeak();
  CHECK_EQUAL(pool.usage().peak_chunks, 0);
}

// A model of the pool that is as plain as can be: which grains are taken.
class NaivePool {
 public:
  explicit NaivePool(size_t num_grains) : taken_(num_grains) {}

  size_t LargestFree() const {
    size_t largest = 0, run = 0;
    for (const bool taken : taken_) {
      run = taken ? 0 : run + 1;
      largest = std::max(largest, run);
    }
    return largest;
  }

  void Mark(size_t first, size_t count, bool taken) {
    for (size_t i = first; i < first + count; ++i) {
      CHECK_TRUE(taken_.at(i) != taken);
      taken_[i] = taken;
    }
  }

 private:
  std::vector<bool> taken_;
};

// A request fails exactly when no piece is large enough, and no two blocks
// share a grain.
void RandomRequestsAgreeWithANaiveModel() {
  constexpr size_t kNumGrains = 200;
  struct Block {
    char* start;
    size_t num_grains;
  };
  std::mt19937 random(0);
  BestFitPool pool(kRegion, kNumGrains * kGrain);
  NaivePool naive(kNumGrains);
  std::vector<Block> blocks;
  int num_refused = 0;
  for (int round = 0; round < 50000; ++round) {
    if (blocks.empty() || random() % 100 < 55) {
      const size_t bytes = 1 + random() % (20 * kGrain);
      const size_t num_grains = (bytes + kGrain - 1) / kGrain;
      char* start = static_cast<char*>(pool.Allocate(bytes));
      CHECK_EQUAL(start == nullptr, num_grains > naive.LargestFree());
      if (start == nullptr) {
        ++num_refused;
        continue;
      }
      CHECK_EQUAL((start - kRegion) % kGrain, 0);
      naive.Mark((start - kRegion) / kGrain, num_grains, true);
      blocks.push_back({start, num_grains});
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      const Block block = blocks.back();
      blocks.pop_back();
      pool.Free(block.start);
      naive.Mark((block.start - kRegion) / kGrain, block.num_grains, false);
    }
    CHECK_EQUAL(pool.usage().largest_free, naive.LargestFree() * kGrain);
  }
  CHECK_TRUE(num_refused > 100);
  for (const Block& block : blocks) pool.Free(block.start);
  CHECK_EQUAL(pool.usage().chunks, 0);
  CHECK_EQUAL(pool.usage().largest_free, kNumGrains * kGrain);
}

}  // namespace

int main() {
  BlocksBeginAtTheGrainAndLoseNothing();
  ARegionMayBeginAnywhere();
  APoolWithoutARegionRefusesEverything();
  LargeBlocksLieAtTheEndOfAPiece();
  TheSmallestPieceThatIsLargeEnoughIsCut();
  PiecesThatTouchBecomeOne();
  ThePeakIsTheMostThatChunksTook();
  RandomRequestsAgreeWithANaiveModel();
  return 0;
}
