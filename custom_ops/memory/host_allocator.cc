#include "host_allocator.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace kmem {
namespace {

constexpr size_t kAlignment = tsl::Allocator::kAllocatorAlignment;
// Blocks from this size on come as pages; malloc is quick with smaller ones.
constexpr size_t kLargeBytes = size_t{256} << 10;

// Stands right before the bytes that are handed out.
struct Header {
  uint64_t requested_bytes;
  uint32_t offset;  // From the start of the block to the bytes handed out.
  uint32_t alignment;
};
static_assert(sizeof(Header) == 16, "malloc aligns to 16 bytes");

Header* HeaderOf(const void* ptr) {
  return static_cast<Header*>(const_cast<void*>(ptr)) - 1;
}

// The header takes 16 of the bytes that are needed to align.
size_t BlockBytes(size_t requested, size_t alignment) {
  return (requested + kAlignment - 1) / kAlignment * kAlignment + alignment;
}

}  // namespace

void* HostAllocator::AllocateRaw(size_t alignment, size_t num_bytes) {
  alignment = std::max(alignment, kAlignment);
  const size_t block_bytes = BlockBytes(num_bytes, alignment);
  void* base = block_bytes >= kLargeBytes ? pages_.Allocate(block_bytes)
                                          : std::malloc(block_bytes);
  if (base == nullptr) return nullptr;
  const uintptr_t start = reinterpret_cast<uintptr_t>(base);
  const uintptr_t user =
      (start + sizeof(Header) + alignment - 1) & ~(alignment - 1);
  void* ptr = reinterpret_cast<void*>(user);
  *HeaderOf(ptr) = {num_bytes, static_cast<uint32_t>(user - start),
                    static_cast<uint32_t>(alignment)};
  return ptr;
}

void HostAllocator::DeallocateRaw(void* ptr) {
  const Header header = *HeaderOf(ptr);
  void* base = static_cast<char*>(ptr) - header.offset;
  const size_t block_bytes =
      BlockBytes(header.requested_bytes, header.alignment);
  if (block_bytes >= kLargeBytes) {
    pages_.Free(base, block_bytes);
  } else {
    std::free(base);
  }
}

size_t HostAllocator::RequestedSize(const void* ptr) const {
  return HeaderOf(ptr)->requested_bytes;
}

std::optional<tsl::AllocatorStats> HostAllocator::GetStats() {
  tsl::AllocatorStats stats;
  stats.pool_bytes = pages_.free_bytes();
  return stats;
}

HostAllocator* TheHostAllocator() {
  static HostAllocator* allocator = new HostAllocator;
  return allocator;
}

}  // namespace kmem
