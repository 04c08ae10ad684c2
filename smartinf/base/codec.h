// Values as bytes that go to another process: little-endian, one function for both directions, so
// that they cannot differ. What is read is not believed: every length is compared with the bytes
// that are left before memory is taken for it.
//
// A struct has a describe(wire, value) in its namespace that binds all of its members by
// `auto& [a, b] = value;` and names those that are sent, in their order: a member that is added to
// the struct and not to its description does not compile. A struct without members has none.
//
// Of memory a struct points to only this is sent: a pointer as whether it is there, a span as its
// size. What is read points to nothing; whoever reads it gives it memory of its own.
#pragma once

#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "smartinf/base/choice.h"
#include "smartinf/base/ids.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/status.h"
#include "smartinf/base/traffic.h"

namespace smartinf::base {

static_assert(std::endian::native == std::endian::little, "values are sent as they are in memory");

class Encoder {
 public:
  static constexpr bool kReads = false;

  template <typename... T>
  void operator()(T&&... values) {
    (put(values), ...);
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  void put_raw(const void* data, size_t size) {
    const auto* from = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), from, from + size);
  }
  template <typename T>
  requires(std::is_arithmetic_v<T>) void put(const T& value) { put_raw(&value, sizeof value); }
  template <typename E>
  void put(const Choice<E>& choice) {
    put(static_cast<uint8_t>(choice.value));
  }
  /// Encodes an enumeration that is compared only: no Decoder takes one without its bound.
  template <typename E>
  requires(std::is_enum_v<E>) void put(E value) { put(static_cast<uint64_t>(value)); }
  void put(std::string_view text) {
    put(static_cast<uint32_t>(text.size()));
    put_raw(text.data(), text.size());
  }
  template <typename T>
  void put(T* const& pointer) {
    put(pointer != nullptr);
  }
  template <typename T>
  void put(const std::span<T>& memory) {
    put(uint64_t{memory.size_bytes()});
  }
  template <typename T>
  void put(const std::vector<T>& list) {
    put(static_cast<uint32_t>(list.size()));
    for (const T& item : list) put(item);
  }
  template <typename T, size_t N>
  void put(const std::array<T, N>& list) {
    for (const T& item : list) put(item);
  }
  template <typename T>
  void put(const std::optional<T>& maybe) {
    put(maybe.has_value());
    if (maybe) put(*maybe);
  }
  template <typename... T>
  void put(const std::variant<T...>& one) {
    put(static_cast<uint8_t>(one.index()));
    std::visit([this](const auto& value) { put(value); }, one);
  }
  void put(const std::string& text) { put(std::string_view(text)); }
  void put(const char* text) { put(std::string_view(text)); }
  void put(const Status& status) {
    const ErrorPlace& place = status.place();
    (*this)(static_cast<uint8_t>(status.code()), status.what(), status.advice(), place.path,
            place.offset_bytes, place.length_bytes, place.system_errno);
  }
  template <typename T>
  requires(std::is_class_v<T>) void put(const T& value) {
    if constexpr (!std::is_empty_v<T>) describe(*this, const_cast<T&>(value));  // reads only
  }

  std::vector<std::byte> bytes_;
};

class Decoder {
 public:
  static constexpr bool kReads = true;

  explicit Decoder(std::span<const std::byte> bytes) : left_(bytes) {}

  template <typename... T>
  void operator()(T&&... values) {
    (get(values), ...);
  }
  /// All that was read was there and right. What was read otherwise must not be used.
  bool ok() const { return ok_; }
  /// Likewise, and it was all.
  bool done() const { return ok_ && left_.empty(); }
  void fail() {
    ok_ = false;
    left_ = {};
  }
  /// Leaves out the rest, which is not known here.
  void skip_rest() { left_ = {}; }

 private:
  bool get_raw(void* data, size_t size) {
    if (left_.size() < size) {
      fail();
      return false;
    }
    std::memcpy(data, left_.data(), size);
    left_ = left_.subspan(size);
    return true;
  }
  void get(bool& value) {
    uint8_t byte = 0;
    get(byte);
    if (byte > 1) fail();
    value = byte == 1;
  }
  template <typename T>
  requires(std::is_arithmetic_v<T> && !std::same_as<T, bool>) void get(T& value) {
    if (!get_raw(&value, sizeof value)) value = T{};
  }
  template <typename E>
  void get(Choice<E>& choice) {
    uint8_t value = 0;
    get(value);
    if (value >= choice.count) {
      fail();
      value = 0;
    }
    choice.value = static_cast<E>(value);
  }
  void get(std::string& text) {
    uint32_t size = 0;
    get(size);
    if (size > left_.size()) return fail();
    text.assign(reinterpret_cast<const char*>(left_.data()), size);
    left_ = left_.subspan(size);
  }
  /// A place that is none of the caller's: it is aligned, and nobody reads or writes there.
  template <typename T>
  static T* nowhere() {
    alignas(4096) static std::byte place;
    return static_cast<T*>(static_cast<void*>(&place));
  }
  template <typename T>
  void get(T*& pointer) {
    bool there = false;
    get(there);
    pointer = there ? nowhere<T>() : nullptr;
  }
  template <typename T>
  requires(sizeof(T) == 1) void get(std::span<T>& memory) {
    uint64_t bytes = 0;
    get(bytes);
    memory = {nowhere<T>(), bytes};
  }
  template <typename T>
  void get(std::vector<T>& list) {
    uint32_t size = 0;
    get(size);
    // Every item has a byte at least; the list grows only while there is something left.
    if (size > left_.size()) return fail();
    list.clear();
    for (uint32_t i = 0; i < size && ok_; ++i) get(list.emplace_back());
    if (!ok_) list.clear();
  }
  template <typename T, size_t N>
  void get(std::array<T, N>& list) {
    for (T& item : list) get(item);
  }
  template <typename T>
  void get(std::optional<T>& maybe) {
    bool there = false;
    get(there);
    maybe.reset();
    if (there) get(maybe.emplace());
  }
  template <typename... T>
  void get(std::variant<T...>& one) {
    uint8_t index = 0;
    get(index);
    if (!ok_ || index >= sizeof...(T)) return fail();
    get_alternative<0>(one, index);
  }
  template <size_t I, typename... T>
  void get_alternative(std::variant<T...>& one, uint8_t index) {
    if constexpr (I < sizeof...(T)) {
      if (index == I) {
        get(one.template emplace<I>());
      } else {
        get_alternative<I + 1>(one, index);
      }
    }
  }
  void get(Status& status) {
    auto code = ErrorCode::kOk;
    std::string what, advice;
    ErrorPlace place;
    (*this)(choice(code, kErrorCodeLast), what, advice, place.path, place.offset_bytes,
            place.length_bytes, place.system_errno);
    status = code == ErrorCode::kOk
                 ? Status()
                 : Status(code, std::move(what), std::move(advice), std::move(place));
  }
  template <typename T>
  requires(std::is_class_v<T>) void get(T& value) {
    if constexpr (!std::is_empty_v<T>) describe(*this, value);
  }

  std::span<const std::byte> left_;
  bool ok_ = true;
};

template <typename Wire, typename Tag>
void describe(Wire& wire, Id<Tag>& id) {
  auto& [value] = id;
  wire(value);
}
template <typename Wire>
void describe(Wire& wire, StateFormat& format) {
  auto& [moments, master] = format;
  wire(choice(moments, MomentFormat::kQ4), choice(master, MasterFormat::kBf16));
}
template <typename Wire>
void describe(Wire& wire, TrafficReading& traffic) {
  auto& [up_bytes, down_bytes] = traffic;
  wire(up_bytes, down_bytes);
}

}  // namespace smartinf::base
