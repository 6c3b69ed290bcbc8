// One region of memory that is cut into blocks, as a GPU's memory is: what is
// free in it may be enough and still lie in pieces, none of which is.
//
// This is what pools have in common: which blocks there are. How the region is
// cut is up to those that derive from it.
//
// Plain C++17, no TensorFlow. It never looks into the region, which may be
// memory that only a device can read.

#ifndef KMEM_MEMORY_POOL_H_
#define KMEM_MEMORY_POOL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace kmem {

// Who cuts the region: kmem (best_fit_pool.h) or TensorFlow (pools.cc).
enum class PoolKind : int { kNone, kBestFit, kBfc };

// In bytes.
struct PoolUsage {
  int64_t size = 0;
  int64_t blocks = 0;        // What was asked for, together.
  int64_t chunks = 0;        // What was handed out for it: at least that.
  int64_t peak_chunks = 0;   // The most that they have been.
  int64_t largest_free = 0;  // The largest block that there is room for.
};

// A chunk, or a free piece.
struct Span {
  uintptr_t start;
  int64_t bytes;
  bool is_free;
};

class Pool {
 public:
  // Every chunk begins and ends at a multiple of this: CUDA's alignment.
  static constexpr size_t kGrain = 256;

  Pool(void* region, size_t bytes)
      : start_(static_cast<char*>(region)), size_(bytes) {}
  virtual ~Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // What a block takes at least.
  static size_t Round(size_t bytes) {
    return (std::max<size_t>(bytes, 1) + kGrain - 1) / kGrain * kGrain;
  }

  // nullptr if no free piece is large enough.
  void* Allocate(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [chunk, chunk_bytes] = Take(bytes);
    if (chunk == nullptr) return nullptr;
    blocks_[chunk] = {bytes, chunk_bytes};
    block_bytes_ += bytes;
    chunk_bytes_ += chunk_bytes;
    peak_chunk_bytes_ = std::max(peak_chunk_bytes_, chunk_bytes_);
    return chunk;
  }

  void Free(void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(static_cast<char*>(block));
    const auto [bytes, chunk_bytes] = found->second;
    blocks_.erase(found);
    block_bytes_ -= bytes;
    chunk_bytes_ -= chunk_bytes;
    Give(static_cast<char*>(block), chunk_bytes);
  }

  bool Owns(const void* address) const {
    return address >= start_ && address < start_ + size_;
  }

  // What was asked for.
  size_t BytesOf(const void* block) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return blocks_.at(static_cast<char*>(const_cast<void*>(block))).first;
  }

  PoolUsage usage() const {
    std::lock_guard<std::mutex> lock(mutex_);
    PoolUsage usage;
    usage.size = size_;
    usage.blocks = block_bytes_;
    usage.chunks = chunk_bytes_;
    usage.peak_chunks = peak_chunk_bytes_;
    usage.largest_free = LargestFree();
    return usage;
  }

  // What lies where, in the order of addresses.
  std::vector<Span> Layout() const {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Span> spans;
    VisitSpans([&](const Span& span) { spans.push_back(span); });
    return spans;
  }

  void ResetPeak() {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_chunk_bytes_ = chunk_bytes_;
  }

  // A process that forks while another thread holds the lock would leave it
  // held for ever in the child.
  void Lock() { mutex_.lock(); }
  void Unlock() { mutex_.unlock(); }

 protected:
  // Cuts out a chunk of at least `bytes`, and says how large it is. Nobody
  // else does so at the time.
  virtual std::pair<char*, size_t> Take(size_t bytes) = 0;
  virtual void Give(char* chunk, size_t chunk_bytes) = 0;

  int64_t LargestFree() const {
    int64_t largest = 0;
    VisitSpans([&](const Span& span) {
      if (span.is_free) largest = std::max(largest, span.bytes);
    });
    return largest;
  }

  char* const start_;
  const size_t size_;

 private:
  template <typename Visit>
  void VisitSpans(Visit visit) const {
    const auto address = [](const char* at) {
      return reinterpret_cast<uintptr_t>(at);
    };
    const char* end = start_;
    for (const auto& [chunk, bytes] : blocks_) {
      if (chunk > end) visit(Span{address(end), chunk - end, true});
      end = chunk + bytes.second;
      visit(Span{address(chunk), end - chunk, false});
    }
    const char* last = start_ + size_;
    if (last > end) visit(Span{address(end), last - end, true});
  }

  mutable std::mutex mutex_;
  // By address: the bytes asked for, and those of the chunk.
  std::map<char*, std::pair<size_t, size_t>> blocks_;
  size_t block_bytes_ = 0;
  size_t chunk_bytes_ = 0;
  size_t peak_chunk_bytes_ = 0;
};

}  // namespace kmem

#endif  // KMEM_MEMORY_POOL_H_
