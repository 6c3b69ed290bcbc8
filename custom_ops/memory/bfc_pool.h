// A pool that TensorFlow cuts, as it does a GPU's memory: its GPUBFCAllocator,
// with what it is set to by default there.

#ifndef KMEM_MEMORY_BFC_POOL_H_
#define KMEM_MEMORY_BFC_POOL_H_

#include <memory>

#include "pool.h"

namespace kmem {

// `region` must stay as long as the pool.
std::unique_ptr<Pool> MakeBfcPool(void* region, size_t bytes);

}  // namespace kmem

#endif  // KMEM_MEMORY_BFC_POOL_H_
