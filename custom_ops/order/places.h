// The operations of traced steps, in the order of their trace.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

namespace kmem {

// The places of a graph's operations, by name.
using Places = std::unordered_map<std::string, int64_t>;

// Keeps the places of operations whose names a line each gives.
int64_t KeepPlaces(const char* names);

void ForgetPlaces(int64_t graph);

// Nothing if they were forgotten.
std::shared_ptr<const Places> PlacesOf(int64_t graph);

}  // namespace kmem
