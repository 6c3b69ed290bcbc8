// What Python calls, as declared in kmem/base/bindings.py. Devices are numbered
// as in device_memory.h.

#include <cstdint>
#include <fstream>
#include <vector>

#include "cpu.h"
#include "device_memory.h"
#include "export.h"
#include "gpu.h"
#include "host_allocator.h"
#include "replay.h"

extern "C" {

struct KmemStats {
  int64_t in_use;
  int64_t peak;
  int64_t limit;  // -1: none.
  int64_t largest;
  int64_t num_allocations;
  int64_t refused;
  int64_t cached;
  int64_t size;  // 0: not known.
};

// Returns false if it is too late: TensorFlow has already allocated.
KMEM_EXPORT bool kmem_register_allocator() {
  return kmem::RegisterOnCpu() && kmem::RegisterOnGpus();
}

KMEM_EXPORT int64_t kmem_stats_bytes() { return sizeof(KmemStats); }

KMEM_EXPORT void kmem_stats(int device, KmemStats* stats) {
  const kmem::Budget* budget = kmem::MemoryOf(device)->budget();
  const int64_t limit = budget->limit();
  stats->in_use = budget->in_use();
  stats->peak = budget->peak();
  stats->limit = limit == kmem::Budget::kNoLimit ? -1 : limit;
  stats->largest = budget->largest();
  stats->num_allocations = budget->num_allocations();
  stats->refused = budget->refused();
  stats->cached = kmem::TheHostAllocator()->pages()->free_bytes();
  stats->size = kmem::MemoryOf(device)->size();
}

// A negative limit means none. Returns false, and changes nothing, if more
// than `limit` is in use.
KMEM_EXPORT bool kmem_set_limit(int device, int64_t limit) {
  kmem::TheHostAllocator()->pages()->Trim();
  return kmem::MemoryOf(device)->SetLimit(
      limit < 0 ? kmem::Budget::kNoLimit : limit);
}

// Returns false if it is too late for a pool.
KMEM_EXPORT bool kmem_ask_for_pool(int device, int kind, int64_t bytes) {
  return kmem::MemoryOf(device)->AskForPool(
      static_cast<kmem::PoolKind>(kind), bytes);
}

KMEM_EXPORT int64_t kmem_pool_usage_bytes() { return sizeof(kmem::PoolUsage); }

// Who cuts it, as a PoolKind.
KMEM_EXPORT int kmem_pool_kind(int device) {
  return static_cast<int>(kmem::MemoryOf(device)->pool_kind());
}

// Returns false if there is no pool.
KMEM_EXPORT bool kmem_pool_usage(int device, kmem::PoolUsage* usage) {
  return kmem::MemoryOf(device)->GetPoolUsage(usage);
}

KMEM_EXPORT void kmem_reset_peak(int device) {
  kmem::MemoryOf(device)->budget()->ResetPeak();
  if (kmem::Pool* pool = kmem::MemoryOf(device)->pool()) pool->ResetPeak();
}

KMEM_EXPORT int kmem_open_watermark(int device) {
  return kmem::MemoryOf(device)->budget()->OpenWatermark();
}

KMEM_EXPORT int64_t kmem_watermark(int device, int number) {
  return kmem::MemoryOf(device)->budget()->Watermark(number);
}

KMEM_EXPORT void kmem_close_watermark(int device, int number) {
  kmem::MemoryOf(device)->budget()->CloseWatermark(number);
}

// Writes down what a device is asked for, until `kmem_end_recording`.
KMEM_EXPORT void kmem_begin_recording(int device) {
  kmem::DeviceMemory* memory = kmem::MemoryOf(device);
  const kmem::Pool* pool = memory->pool();
  // Never destroyed: another thread may be writing to it.
  memory->SetRecording(new kmem::Recording(
      pool ? pool->usage().chunks : memory->budget()->in_use()));
}

// Ends the recording, and returns the size of a pool of the kind in which all
// of it finds a place, besides what was in use before.
KMEM_EXPORT int64_t kmem_end_recording_in_pool(int device, int kind) {
  kmem::DeviceMemory* memory = kmem::MemoryOf(device);
  kmem::Recording* recording = memory->recording();
  memory->SetRecording(nullptr);
  const std::vector<kmem::Event> events = recording->Take();
  return kmem::LeastPool(static_cast<kmem::PoolKind>(kind),
                         kmem::WithPast(recording->held_bytes(), events.data(),
                                        events.size()));
}

// Returns false if the file cannot be written.
KMEM_EXPORT bool kmem_end_recording(int device, const char* path) {
  kmem::DeviceMemory* memory = kmem::MemoryOf(device);
  const std::vector<kmem::Event> events = memory->recording()->Take();
  memory->SetRecording(nullptr);
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(events.data()),
             events.size() * sizeof(kmem::Event));
  return file.good();
}

KMEM_EXPORT int64_t kmem_live_peak(const kmem::Event* events,
                                   int64_t num_events) {
  return kmem::LivePeak(kmem::WithPast(0, events, num_events));
}

KMEM_EXPORT int64_t kmem_least_pool(int kind, const kmem::Event* events,
                                    int64_t num_events) {
  return kmem::LeastPool(static_cast<kmem::PoolKind>(kind),
                         kmem::WithPast(0, events, num_events));
}

}  // extern "C"
