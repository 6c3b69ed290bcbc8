// What the allocator asks to give something up when a request does not fit.

#ifndef KMEM_MEMORY_EVICTOR_H_
#define KMEM_MEMORY_EVICTOR_H_

#include <cstdint>

namespace kmem {

class Evictor {
 public:
  virtual ~Evictor() = default;

  // Frees memory until `bytes` more fit below the limit, at that moment.
  // Returns false if that cannot be done. Called by any thread.
  virtual bool MakeRoom(int64_t bytes) = 0;
};

}  // namespace kmem

#endif  // KMEM_MEMORY_EVICTOR_H_
