// kmem's own pool: the smallest free piece that is large enough, cut to the
// grain, so that nothing is lost at a block's end.
//
// TensorFlow's (bfc_pool.h) hands out a whole piece where the rest of it would
// be small, so that it need not be looked after: a tenth of the memory.
//
// Large blocks are cut from a piece's end and others from its start, so that
// small ones, which may stay longer than what is around them, do not part the
// memory in the middle. With DTR on recorded steps (benchmarks/pool.md) that
// recomputes less than best fit alone, and where a block counts as large, from
// a thirtieth to a thousandth of the pool, hardly matters.
//
// Plain C++17, no TensorFlow.

#ifndef KMEM_MEMORY_BEST_FIT_POOL_H_
#define KMEM_MEMORY_BEST_FIT_POOL_H_

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "pool.h"

namespace kmem {

class BestFitPool : public Pool {
 public:
  // Blocks of this share of the pool, or more, are large.
  static constexpr size_t kLargeShare = 100;

  BestFitPool(void* region, size_t bytes) : Pool(region, bytes) {
    // The region may begin anywhere.
    const size_t before = -reinterpret_cast<uintptr_t>(region) % kGrain;
    if (bytes >= before + kGrain) {
      Add(start_ + before, (bytes - before) / kGrain * kGrain);
    }
  }

 protected:
  std::pair<char*, size_t> Take(size_t bytes) override {
    bytes = Round(bytes);
    const auto fit = by_size_.lower_bound({bytes, nullptr});
    if (fit == by_size_.end()) return {nullptr, 0};
    const auto [piece_bytes, piece] = *fit;
    Remove(piece, piece_bytes);
    const size_t rest = piece_bytes - bytes;
    const bool is_large = bytes >= size_ / kLargeShare;
    if (rest > 0) Add(is_large ? piece : piece + bytes, rest);
    return {is_large ? piece + rest : piece, bytes};
  }

  void Give(char* chunk, size_t bytes) override {
    const auto next = by_address_.find(chunk + bytes);
    if (next != by_address_.end()) {
      const size_t more = next->second;
      Remove(chunk + bytes, more);
      bytes += more;
    }
    const auto after = by_address_.lower_bound(chunk);
    if (after != by_address_.begin()) {
      const auto [previous, more] = *std::prev(after);
      if (previous + more == chunk) {
        Remove(previous, more);
        chunk = previous;
        bytes += more;
      }
    }
    Add(chunk, bytes);
  }

 private:
  void Add(char* piece, size_t bytes) {
    by_address_.emplace(piece, bytes);
    by_size_.emplace(bytes, piece);
  }

  void Remove(char* piece, size_t bytes) {
    by_address_.erase(piece);
    by_size_.erase({bytes, piece});
  }

  // The free pieces, no two of which touch.
  std::map<char*, size_t> by_address_;
  std::set<std::pair<size_t, char*>> by_size_;
};

}  // namespace kmem

#endif  // KMEM_MEMORY_BEST_FIT_POOL_H_
