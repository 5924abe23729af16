// Threads for a host kernel that is called without a framework, which would have its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace ort_moe {

// Calls body(begin, end) for ranges that cover [0, total), each on a thread of its own: at most `threads`, and each
// with at least `grain`. What a body throws is thrown here.
template <typename Body>
void OnThreads(int64_t total, int64_t grain, int64_t threads, const Body& body) {
  const int64_t count = std::max<int64_t>(1, std::min(threads, total / std::max<int64_t>(1, grain)));
  const auto bound = [&](int64_t i) { return total / count * i + std::min(i, total % count); };
  std::vector<std::exception_ptr> thrown(count);
  const auto run = [&](int64_t i) {
    try {
      body(bound(i), bound(i + 1));
    } catch (...) {
      thrown[i] = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < count; ++i) others.emplace_back(run, i);
  run(0);
  for (std::thread& thread : others) thread.join();
  for (const std::exception_ptr& exception : thrown) {
    if (exception) std::rethrow_exception(exception);
  }
}

// Elements of a row-wise training op for one thread: some 100 us of work, so that starting it costs little beside it.
inline constexpr int64_t kElementsPerThread = 1 << 15;

}  // namespace ort_moe
