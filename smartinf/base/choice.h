// Enumerations as they are sent to other processes (codec.h).
#pragma once

#include <cstdint>

namespace smartinf::base {

/// An enumeration as it is sent: the receiver refuses values from `count` on.
template <typename E>
struct Choice {
  E& value;
  uint8_t count;
};
template <typename E>
Choice<E> choice(E& value, E last) {
  return {value, static_cast<uint8_t>(static_cast<uint8_t>(last) + 1)};
}

}  // namespace smartinf::base
