// What Python calls, as declared in kmem/base/bindings.py.

#pragma once

#define KMEM_EXPORT __attribute__((visibility("default")))
