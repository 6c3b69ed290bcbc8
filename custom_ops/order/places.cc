// See places.h. What Python calls is declared in kmem/base/bindings.py.

#include "places.h"

#include <mutex>
#include <sstream>

#include "../memory/export.h"

namespace kmem {
namespace {

std::mutex mutex;
int64_t num_kept = 0;
std::unordered_map<int64_t, std::shared_ptr<const Places>> kept;

}  // namespace

int64_t KeepPlaces(const char* names) {
  auto places = std::make_shared<Places>();
  std::istringstream lines(names);
  for (std::string name; std::getline(lines, name);) {
    places->emplace(std::move(name), places->size());
  }
  std::lock_guard<std::mutex> lock(mutex);
  kept[++num_kept] = std::move(places);
  return num_kept;
}

void ForgetPlaces(int64_t graph) {
  std::lock_guard<std::mutex> lock(mutex);
  kept.erase(graph);
}

std::shared_ptr<const Places> PlacesOf(int64_t graph) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = kept.find(graph);
  return found == kept.end() ? nullptr : found->second;
}

}  // namespace kmem

extern "C" {

KMEM_EXPORT int64_t kmem_keep_places(const char* names) {
  return kmem::KeepPlaces(names);
}

KMEM_EXPORT void kmem_forget_places(int64_t graph) {
  kmem::ForgetPlaces(graph);
}
}
