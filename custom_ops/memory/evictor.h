// What an allocator asks to give something up when a request does not fit.

#ifndef KMEM_MEMORY_EVICTOR_H_
#define KMEM_MEMORY_EVICTOR_H_

#include <cstdint>

namespace kmem {

// Called by any thread. Both return false if nothing can be done.
class Evictor {
 public:
  virtual ~Evictor() = default;

  // Frees memory until `bytes` more fit below the limit, at that moment.
  virtual bool MakeRoom(int64_t bytes) = 0;

  // Frees something, as the device has no block of `bytes`, though they fit
  // below the limit: what is free lies in pieces.
  virtual bool MakeBlock(int64_t bytes) = 0;
};

}  // namespace kmem

#endif  // KMEM_MEMORY_EVICTOR_H_
