#ifndef KMEM_MEMORY_GPU_H_
#define KMEM_MEMORY_GPU_H_

namespace kmem {

// Puts kmem's budget around TensorFlow's allocator of every GPU, by the class
// that TensorFlow has for this. Returns false if it is too late: TensorFlow
// has made its own.
bool RegisterOnGpus();

}  // namespace kmem

#endif  // KMEM_MEMORY_GPU_H_
