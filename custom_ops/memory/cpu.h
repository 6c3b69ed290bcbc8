#ifndef KMEM_MEMORY_CPU_H_
#define KMEM_MEMORY_CPU_H_

namespace kmem {

// Puts kmem's allocator in the place of TensorFlow's on the CPU. Returns false
// if it is too late: TensorFlow has already allocated.
bool RegisterOnCpu();

}  // namespace kmem

#endif  // KMEM_MEMORY_CPU_H_
