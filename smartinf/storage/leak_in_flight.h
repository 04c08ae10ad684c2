// Keeps until the process ends what a request that hangs may still write to. A drive that does not
// answer must hold up neither closing nor the process, and its late answer must hit nobody else.
#pragma once

#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

namespace smartinf::storage {

/// Takes memory, a ring or a store out of use for good. Threads: any.
template <typename T>
void leak_in_flight(T&& what) {
  static_assert(!std::is_lvalue_reference_v<T>, "what is abandoned is given away");
  // Never destroyed, on purpose.
  static auto* const mutex = new std::mutex;
  static auto* const kept = new std::vector<std::shared_ptr<void>>;
  auto holder = std::make_shared<std::decay_t<T>>(std::move(what));
  const std::lock_guard lock(*mutex);
  kept->push_back(std::move(holder));
}

}  // namespace smartinf::storage
