// The smallest test framework that says what was expected where.

#ifndef KMEM_TESTS_CHECK_H_
#define KMEM_TESTS_CHECK_H_

#include <cstdio>
#include <cstdlib>

#define CHECK_TRUE(condition)                                         \
  do {                                                                \
    if (!(condition)) {                                               \
      std::fprintf(stderr, "%s:%d: %s must hold\n", __FILE__,         \
                   __LINE__, #condition);                             \
      std::exit(1);                                                   \
    }                                                                 \
  } while (false)

#define CHECK_EQUAL(actual, expected)                                 \
  do {                                                                \
    const long long actual_value = (actual);                          \
    const long long expected_value = (expected);                      \
    if (actual_value != expected_value) {                             \
      std::fprintf(stderr, "%s:%d: %s must be %lld, is %lld\n",       \
                   __FILE__, __LINE__, #actual, expected_value,       \
                   actual_value);                                     \
      std::exit(1);                                                   \
    }                                                                 \
  } while (false)

#endif  // KMEM_TESTS_CHECK_H_
