// Makes a pool of either kind.

#ifndef KMEM_MEMORY_POOLS_H_
#define KMEM_MEMORY_POOLS_H_

#include <memory>

#include "pool.h"

namespace kmem {

// `region` must stay as long as the pool.
std::unique_ptr<Pool> MakePool(PoolKind kind, void* region, size_t bytes);

}  // namespace kmem

#endif  // KMEM_MEMORY_POOLS_H_
